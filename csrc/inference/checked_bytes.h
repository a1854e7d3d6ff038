// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Bytes of a mapped file, none of which is used before the checksum of its chunk was found right.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/errors.h"

namespace cpudist::inference {

// A file is not what was written: kSnapshotCorrupt.
class Damage : public Error {
 public:
  Damage(const std::string& message, std::string file)
      : Error(ErrorCode::kSnapshotCorrupt, message), file_(std::move(file)) {}
  const std::string& file() const { return file_; }

 private:
  std::string file_;
};

// Does not own the bytes. Thread safety: any number of threads; some may check the same chunk.
class CheckedBytes {
 public:
  // Chunks of `chunk_bytes`, a power of two, have a checksum each, the last of what is left.
  // `name` is for messages. Throws Damage unless there are as many checksums as chunks, and Error
  // (kInvalidArgument) for other sizes of chunks.
  CheckedBytes(std::span<const std::byte> bytes, std::vector<uint32_t> checksums,
               size_t chunk_bytes, std::string name);

  // `size` bytes from `begin` on, whose chunks are right. Throws Damage: one is not, or the file
  // ends before.
  const std::byte* at(uint64_t begin, uint64_t size) const {
    if (begin > bytes_.size() || size > bytes_.size() - begin) throw_outside(begin, size);
    if (size > 0) {
      for (uint64_t i = begin >> shift_; i <= (begin + size - 1) >> shift_; ++i) {
        if (right_[i].load(std::memory_order_relaxed) == 0) check(i);
      }
    }
    return bytes_.data() + begin;
  }

  uint64_t size() const { return bytes_.size(); }
  const std::string& name() const { return name_; }

 private:
  void check(uint64_t chunk) const;
  [[noreturn]] void throw_outside(uint64_t begin, uint64_t size) const;

  std::span<const std::byte> bytes_;
  std::vector<uint32_t> checksums_;
  uint32_t shift_;
  std::string name_;
  std::unique_ptr<std::atomic<uint8_t>[]> right_;
};

}  // namespace cpudist::inference
