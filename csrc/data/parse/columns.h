// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Records out of columns, as Parquet has them, without a detour over text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/parse/records.h"
#include "data/parse/schema.h"

namespace cpudist::data {

// The values of one used slot. Integers or floats as the slot's kind says; `offsets` [records + 1],
// into the values, for integers of any number, else empty and `[records, dim]` values.
struct ColumnValues {
  std::span<const int64_t> ints;
  std::span<const float> floats;
  std::span<const int64_t> offsets;
};

// A row that is no record, like a line that is none.
struct BadRow {
  size_t row = 0;  // 0-based, of the columns that were given
  std::string message;
};

struct ColumnRecords {
  RecordBuffer records;
  std::vector<BadRow> bad;
  size_t rows = 0;
};

// Integers are ids as they are, whatever the slot's hash_range. A float that is not finite makes a
// bad row.
// Throws Error(kInvalidArgument) when the arrays do not fit the schema or each other.
ColumnRecords records_of_columns(const Schema& schema, size_t rows,
                                 std::span<const ColumnValues> columns);

}  // namespace cpudist::data
