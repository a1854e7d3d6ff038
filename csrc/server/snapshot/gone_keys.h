// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The keys of a table that have lost their rows since its cuts, for snapshots of changes: rows that
// are there say when they changed, these say nothing any more.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/memory_cap.h"
#include "table/table.h"

namespace cpudist::server {

// Thread safety: all members.
class GoneKeys {
 public:
  static constexpr uint64_t kMostBytes = uint64_t{64} << 20;
  using Part = std::shared_ptr<const std::vector<int64_t>>;

  // Above `most_bytes` all of them are dropped: nothing is known any more, and the next snapshot
  // has to have all rows. `cap` counts them.
  explicit GoneKeys(std::shared_ptr<MemoryCap> cap = nullptr, uint64_t most_bytes = kMostBytes)
      : most_bytes_(most_bytes), kept_(std::move(cap)) {}

  // A cut: keys that go from here on are kept. Returns its mark. Throws std::bad_alloc.
  uint64_t mark();
  // Nothing is kept before the first mark.
  void add(std::span<const table::Freed> freed) noexcept;
  // Whether since() has all that went after a mark.
  bool knows(uint64_t mark) const noexcept;
  // What has gone between a mark that is known and the last one; a key may be there twice, and may
  // have a row again. Throws std::bad_alloc.
  std::vector<Part> since(uint64_t mark) const;
  // Nobody will ask for what went before a mark.
  void trim(uint64_t mark) noexcept;
  void drop() noexcept;
  // Of what it keeps, with what it has room for.
  uint64_t size_bytes() const;

 private:
  using Keys = std::vector<int64_t>;

  static uint64_t bytes_of(const Keys& keys) { return keys.capacity() * sizeof(int64_t); }
  // For so many keys in the last part, and for more as far as the bound goes; whether there is.
  bool make_room(size_t wanted) noexcept;
  void drop_first() noexcept;
  void drop_all() noexcept;

  const uint64_t most_bytes_;
  mutable std::mutex mutex_;  // of what follows
  MemoryCap::Kept kept_;
  std::deque<std::shared_ptr<Keys>> parts_;  // each from its mark on to the next one
  uint64_t first_ = 1;                       // the mark of the first part
  uint64_t size_bytes_ = 0;
};

// Where the keys of a table stood at a cut.
struct GoneMark {
  std::shared_ptr<GoneKeys> keys;
  uint64_t mark = 0;
};

}  // namespace cpudist::server
