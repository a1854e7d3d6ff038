// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The parser of each format, for make_parser. Their schemas have been checked.
#pragma once

#include <memory>

#include "data/parser.h"

namespace cpudist::data {

std::unique_ptr<Parser> make_multislot_parser(const Schema& schema);
std::unique_ptr<Parser> make_criteo_parser(const Schema& schema);
std::unique_ptr<Parser> make_csv_parser(const Schema& schema);

}  // namespace cpudist::data
