// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Which keys of a table get a row on one server, and what it remembers of those that have none yet.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "kernels/hash.h"
#include "table/admission/sketch.h"
#include "wire/layout.h"

namespace cpudist::table {

// What it remembers is this server's and this process's: no snapshot has it.
//
// Thread safety: const members from any number of threads; the others exclusively.
class AdmissionRule {
 public:
  static constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();

  // That of `table`. Takes no memory before begin().
  explicit AdmissionRule(const wire::TableSpec& table);

  // Every key gets a row with its first push.
  bool admits_all() const { return all_; }
  // Before anything is asked or told of keys. Throws std::bad_alloc.
  void begin();
  uint64_t size_bytes() const { return sketch_ ? sketch_->size_bytes() : 0; }
  uint64_t planned_bytes() const { return counts() ? rule_.sketch_bytes : 0; }
  void set_seed(uint64_t seed) { seed_ = seed; }

  // Of a key without a row: the number of the push, counted from now on, that makes one; kNever
  // where none will.
  uint32_t pushes_until(int64_t key) const;
  void prefetch(int64_t key) const {
    if (sketch_) sketch_->prefetch(hash_of(key));
  }
  // It was pushed so often, which did not make a row.
  void note_dropped(int64_t key, uint32_t pushes) noexcept;
  // It has a row now, and so many pushes of this update came too early. If it can lose the row, it
  // is counted from nothing on then.
  void note_made(int64_t key, uint32_t dropped) noexcept;
  // Of all keys: as if none was ever pushed.
  void forget_all() noexcept;

  uint64_t dropped_rows() const { return dropped_; }  // of pushes, ever

 private:
  bool counts() const { return rule_.kind == wire::AdmissionKind::kCount && rule_.count > 1; }
  // Apart from the bits that choose the server and the place in its index.
  uint64_t hash_of(int64_t key) const {
    return kernels::mix64(kernels::hash_of(key, salt_) + kPlace);
  }
  // Added to a hash for another one: odd numbers without a pattern.
  static constexpr uint64_t kPlace = 0xd1b54a32d192ed03u;
  static constexpr uint64_t kChance = 0x8cb92ba72f3d8dd7u;

  wire::Admission rule_;
  bool all_;
  bool forgets_;  // rows may be evicted
  uint64_t salt_;
  uint64_t seed_;
  std::optional<KeySketch> sketch_;
  uint64_t dropped_ = 0;
};

}  // namespace cpudist::table
