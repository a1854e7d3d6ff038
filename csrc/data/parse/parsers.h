// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The parser of each format, for make_parser, and what they share. Their schemas have been checked.
#pragma once

#include <memory>

#include "data/parse/parser.h"

namespace cpudist::data {

constexpr bool is_space(char byte) { return byte == ' ' || byte == '\t'; }

std::unique_ptr<Parser> make_multislot_parser(const Schema& schema);
std::unique_ptr<Parser> make_criteo_parser(const Schema& schema);
std::unique_ptr<Parser> make_csv_parser(const Schema& schema);

}  // namespace cpudist::data
