// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Gradients that are no numbers to add up.
#pragma once

#include <string>

#include "wire/layout.h"
#include "wire/messages.h"

namespace cpudist::server {

// The first value of a push that is infinite or NaN, in words: the parameter, where in it, and the
// value. Empty if all are finite, which takes one pass over them.
std::string describe_nonfinite(const wire::PushView& push, const wire::ParamSetLayout& layout);

}  // namespace cpudist::server
