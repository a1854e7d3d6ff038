// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Coded payloads of any bytes. The first byte chooses the kind of payload, the second the rows that
// were asked for, or how many keys of how many rows; the payload follows.

#include "wire_checks.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cpudist::fuzz;  // NOLINT
  if (size >= 2) check_kind(data[0] % kCodedKinds, data[1], {data + 2, size - 2});
  return 0;
}
