// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Words of another trainer: refused, or records that make a batch. The first byte chooses the
// schema, the words follow.

#include <cstring>

#include "base/errors.h"
#include "data/parse/records.h"
#include "data_schemas.h"

using namespace cpudist;  // NOLINT

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const data::Schema& schema = fuzz::schemas()[data[0] % fuzz::schemas().size()];
  const size_t count = (size - 1) / sizeof(uint64_t);
  const auto words = std::make_unique<uint64_t[]>(count);
  if (count > 0) std::memcpy(words.get(), data + 1, count * sizeof(uint64_t));
  size_t found = 0;
  try {
    found = data::check_records(schema, {words.get(), count});
  } catch (const Error& error) {
    fuzz::require(error.code() == ErrorCode::kProtocol, "refused as malformed");
    return 0;
  }
  std::vector<const uint64_t*> records;
  for (size_t at = 0; at < count; at += data::record_words(&words[at])) {
    records.push_back(&words[at]);
  }
  fuzz::require(records.size() == found, "the records counted are those there are");
  fuzz::check_batch(schema, records);
  return 0;
}
