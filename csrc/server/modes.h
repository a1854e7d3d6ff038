// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The modes in which parameter sets are updated: with modes.cpp the only place that knows all of
// them. Nothing that a mode is made of includes it.
#pragma once

#include "server/policy.h"

namespace cpudist::server {

const Modes& all_modes();

}  // namespace cpudist::server
