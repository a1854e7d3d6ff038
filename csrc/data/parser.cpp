// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data/parser.h"

#include "core/errors.h"
#include "data/parsers.h"

namespace cpudist::data {

std::unique_ptr<Parser> make_parser(const Schema& schema) {
  schema.check();
  switch (schema.format) {
    case Format::kMultiSlot:
      return make_multislot_parser(schema);
    case Format::kCriteo:
      return make_criteo_parser(schema);
    case Format::kCsv:
      return make_csv_parser(schema);
  }
  throw core::Error(core::ErrorCode::kInvalidArgument, "the schema's format is none there is");
}

}  // namespace cpudist::data
