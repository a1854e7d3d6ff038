// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a store holds: slabs of records that do not move, and an order of their addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "data/parse/records.h"

namespace cpudist::data {

// Large slabs are mapped, so that they go back to the system when they are freed: the allocator
// would keep them for threads that have ended.
struct FreeWords {
  size_t mapped_bytes = 0;  // 0: from operator new
  void operator()(uint64_t* words) const noexcept;
};

// Records one behind the other, in memory of just their size.
struct Slab {
  std::unique_ptr<uint64_t[], FreeWords> words;
  size_t size_words = 0;
  size_t records = 0;
};

inline constexpr size_t kSlabWords = (1 << 20) / sizeof(uint64_t);

Slab make_slab(const RecordBuffer& buffer);  // copies

struct Content {
  std::vector<Slab> slabs;
  size_t records = 0;
  size_t size_words = 0;
};

Content make_content(std::vector<Slab> slabs);

using Order = std::vector<const uint64_t*>;

Order order_of(const Content& content);

}  // namespace cpudist::data
