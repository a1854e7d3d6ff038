// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The modes in which parameter sets are updated: with modes.cpp the only place of a client that
// knows all of them. Nothing that a mode is made of includes it.
#pragma once

#include "client/membership.h"

namespace cpudist::client {

// How a trainer takes part in sets of this layout.
const Membership& membership_of(const wire::ParamSetLayout& layout);

}  // namespace cpudist::client
