// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Checks of a layout, and the words for two layouts or settings that differ.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/optimizers.h"
#include "server/options.h"
#include "wire/messages.h"

namespace cpudist::server {

// Throws kInvalidArgument for a decoded layout that does not fit this group of servers.
void check_layout(const wire::ParamSetLayout& layout, const ServerOptions& options);
// Of the dense gradients that an update takes on this server: every trainer's push of a round waits
// until the last one is there; on arrival one must fit.
uint64_t gradients_bytes(const wire::ParamSetLayout& layout, const ServerOptions& options);
// Throws kConfigMismatch for a push with an optimizer whose state has another shape than the one
// that the set was opened with.
void check_configs(const wire::ParamSetLayout& layout, const wire::PushHeader& header);
// The first item in which two layouts differ: "table 0, rows: 10 against 20".
std::string describe_difference(const wire::ParamSetLayout& first,
                                const wire::ParamSetLayout& second);
// The shortest text that reads back as the same number.
std::string show(double value);
// As above for two configurations; empty when equal. "lr: 0.1 against 0.2".
std::string describe_difference(const kernels::OptimizerConfig& first,
                                const kernels::OptimizerConfig& second);

}  // namespace cpudist::server
