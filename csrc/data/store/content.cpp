// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/store/content.h"

#include <sys/mman.h>

#include <cstring>
#include <utility>

namespace cpudist::data {

namespace {

constexpr size_t kMappedBytesMin = 128 << 10;

std::unique_ptr<uint64_t[], FreeWords> allocate(size_t words) {
  const size_t size = words * sizeof(uint64_t);
  if (size >= kMappedBytesMin) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory != MAP_FAILED) return {static_cast<uint64_t*>(memory), FreeWords{size}};
  }
  return {new uint64_t[words], FreeWords{}};
}

}  // namespace

void FreeWords::operator()(uint64_t* words) const noexcept {
  if (mapped_bytes > 0) {
    ::munmap(words, mapped_bytes);
  } else {
    delete[] words;
  }
}

Slab make_slab(const RecordBuffer& buffer) {
  Slab slab;
  slab.size_words = buffer.size_words();
  slab.records = buffer.count();
  if (slab.records == 0) return slab;
  slab.words = allocate(slab.size_words);
  std::memcpy(slab.words.get(), buffer.record(0), slab.size_words * sizeof(uint64_t));
  return slab;
}

Content make_content(std::vector<Slab> slabs) {
  Content content;
  content.slabs = std::move(slabs);
  for (const Slab& slab : content.slabs) {
    content.records += slab.records;
    content.size_words += slab.size_words;
  }
  return content;
}

Order order_of(const Content& content) {
  Order order;
  order.reserve(content.records);
  for (const Slab& slab : content.slabs) {
    const uint64_t* record = slab.words.get();
    for (size_t i = 0; i < slab.records; ++i) {
      order.push_back(record);
      record += record_words(record);
    }
  }
  return order;
}

}  // namespace cpudist::data
