// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data/parse/parser.h"

#include "base/errors.h"
#include "data/parse/parsers.h"

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
  throw Error(ErrorCode::kInvalidArgument, "the schema's format is none there is");
}

}  // namespace cpudist::data
