// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a server counts while it works; ServerStats is what it tells of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace cpudist::server {

// Thread safety: all members.
struct ServerCounters {
  std::atomic<uint64_t> rounds{0};
  std::atomic<uint64_t> pushes{0};
  std::atomic<uint64_t> nonfinite{0};
  std::atomic<uint64_t> duplicates{0};
  std::atomic<uint64_t> pending_bytes{0};
  std::atomic<uint64_t> refused{0};
};

// Bytes that are counted as long as this lives. The counter outlives it.
class CountedBytes {
 public:
  CountedBytes() = default;
  CountedBytes(std::atomic<uint64_t>& counter, uint64_t size_bytes)
      : counter_(&counter), size_bytes_(size_bytes) {
    counter.fetch_add(size_bytes);
  }
  ~CountedBytes() { release(); }
  CountedBytes(CountedBytes&& other) noexcept
      : counter_(std::exchange(other.counter_, nullptr)), size_bytes_(other.size_bytes_) {}
  CountedBytes& operator=(CountedBytes&& other) noexcept {
    std::swap(counter_, other.counter_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }

  uint64_t size_bytes() const { return counter_ == nullptr ? 0 : size_bytes_; }
  void release() noexcept {
    if (auto* counter = std::exchange(counter_, nullptr)) counter->fetch_sub(size_bytes_);
  }

 private:
  std::atomic<uint64_t>* counter_ = nullptr;
  uint64_t size_bytes_ = 0;
};

}  // namespace cpudist::server
