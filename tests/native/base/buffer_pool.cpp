// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Buffers and the pool of large blocks.

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/buffer.h"
#include "support/check.h"

using cpudist::Buffer;
using cpudist::BufferPool;

namespace {
constexpr size_t kKiB = 1024;
}  // namespace

TEST(buffer_is_aligned_and_movable) {
  for (const size_t size : {size_t{1}, size_t{63}, size_t{64}, size_t{1000}, 70 * kKiB}) {
    Buffer buffer(size);
    CHECK_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    std::memset(buffer.data(), 7, size);
    Buffer moved(std::move(buffer));
    CHECK_EQ(moved.size(), size);
    CHECK(buffer.empty() && buffer.data() == nullptr);  // NOLINT: a moved-from buffer is empty
    moved.shrink(size / 2);
    CHECK_EQ(moved.size(), size / 2);
    moved.shrink(size);  // never grows
    CHECK_EQ(moved.size(), size / 2);
  }
  CHECK(Buffer(0).empty());
  CHECK(Buffer().share().empty());
  CHECK_THROWS(Buffer(SIZE_MAX), std::bad_alloc);
}

TEST(buffer_lives_as_long_as_its_last_handle) {
  const auto pool = std::make_shared<BufferPool>(1 << 20);
  Buffer first(100 * kKiB, pool);
  std::memset(first.data(), 5, first.size());
  Buffer second = first.share();
  CHECK(second.data() == first.data());
  first = Buffer();
  // The pool may not hand the block out again yet.
  Buffer other(100 * kKiB, pool);
  CHECK(other.data() != second.data());
  std::memset(other.data(), 6, other.size());
  const uint8_t* begin = second.data();
  CHECK(std::all_of(begin, begin + second.size(), [](uint8_t byte) { return byte == 5; }));
  second.shrink(10);
  const uint8_t* block = second.data();
  second = Buffer();
  CHECK(Buffer(100 * kKiB, pool).data() == block);
}

TEST(buffer_pool_reuses_large_blocks) {
  const auto pool = std::make_shared<BufferPool>(1 << 20);
  const uint8_t* first = nullptr;
  {
    const Buffer buffer(100 * kKiB, pool);
    first = buffer.data();
  }
  {
    const Buffer far_smaller(70 * kKiB - 20 * kKiB, pool);  // below the pooled size
    CHECK(far_smaller.data() != first);
    const Buffer fits(90 * kKiB, pool);
    CHECK(fits.data() == first);
    const Buffer second(90 * kKiB, pool);
    CHECK(second.data() != first);
  }
}

TEST(buffer_pool_takes_the_best_fit_within_twice_the_size) {
  const auto pool = std::make_shared<BufferPool>(64 << 20);
  const uint8_t* small = nullptr;
  const uint8_t* large = nullptr;
  {
    const Buffer a(128 * kKiB, pool);
    const Buffer b(160 * kKiB, pool);
    small = a.data();
    large = b.data();
  }
  const Buffer fits_both(120 * kKiB, pool);
  CHECK(fits_both.data() == small);
  const Buffer below_half(72 * kKiB, pool);
  CHECK(below_half.data() != large);
  const Buffer fits_large(100 * kKiB, pool);
  CHECK(fits_large.data() == large);
}

TEST(buffer_pool_keeps_no_more_than_its_cap) {
  const auto pool = std::make_shared<BufferPool>(300 * kKiB);
  const uint8_t* oldest = nullptr;
  const uint8_t* newest = nullptr;
  {
    Buffer a(100 * kKiB, pool);
    Buffer b(100 * kKiB, pool);
    Buffer c(100 * kKiB, pool);
    Buffer d(200 * kKiB, pool);
    oldest = a.data();
    newest = d.data();
    for (Buffer* buffer : {&a, &b, &c, &d}) *buffer = Buffer();  // a and b make room for d
  }
  size_t capacity = 0;
  uint8_t* block = pool->take(200 * kKiB, &capacity);
  CHECK(block == newest);
  pool->give_back(block, capacity);
  // What is above the cap as a whole is freed, and with it nothing else.
  pool->give_back(static_cast<uint8_t*>(std::aligned_alloc(64, 512 * kKiB)), 512 * kKiB);
  block = pool->take(200 * kKiB, &capacity);
  CHECK(block == newest);
  CHECK(block != oldest);
  pool->give_back(block, capacity);
}

TEST(buffer_pool_serves_threads) {
  const auto pool = std::make_shared<BufferPool>(4 << 20);
  std::vector<std::thread> threads;
  std::vector<int> damaged(4, 0);
  for (size_t t = 0; t < damaged.size(); ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < 50; ++i) {
        Buffer buffer((65 + (i * 37 + t * 11) % 64) * kKiB, pool);
        std::memset(buffer.data(), static_cast<int>(t), buffer.size());
        std::this_thread::yield();
        for (size_t at = 0; at < buffer.size(); at += 4096) damaged[t] += buffer.data()[at] != t;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const int count : damaged) CHECK_EQ(count, 0);
}
