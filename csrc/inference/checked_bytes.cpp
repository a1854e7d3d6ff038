// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "inference/checked_bytes.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/crc32c.h"

namespace cpudist::inference {

CheckedBytes::CheckedBytes(std::span<const std::byte> bytes, std::vector<uint32_t> checksums,
                           size_t chunk_bytes, std::string name)
    : bytes_(bytes), checksums_(std::move(checksums)), name_(std::move(name)) {
  if (!std::has_single_bit(chunk_bytes)) {
    throw Error(ErrorCode::kInvalidArgument, name_ + ": checksums of every " +
                                                 std::to_string(chunk_bytes) +
                                                 " bytes, expected a power of two");
  }
  shift_ = static_cast<uint32_t>(std::countr_zero(chunk_bytes));
  const uint64_t chunks = (bytes_.size() >> shift_) + (bytes_.size() % chunk_bytes != 0 ? 1 : 0);
  if (checksums_.size() != chunks) {
    throw Damage(name_ + " has " + std::to_string(bytes_.size()) + " bytes and " +
                     std::to_string(checksums_.size()) + " checksums, expected " +
                     std::to_string(chunks),
                 name_);
  }
  right_ = std::make_unique<std::atomic<uint8_t>[]>(chunks);
}

void CheckedBytes::check(uint64_t chunk) const {
  const uint64_t begin = chunk << shift_;
  const uint64_t size = std::min<uint64_t>(uint64_t{1} << shift_, bytes_.size() - begin);
  const uint32_t found = crc32c(bytes_.data() + begin, size);
  if (found != checksums_[chunk]) {
    throw Damage(name_ + " is damaged: bytes " + std::to_string(begin) + " to " +
                     std::to_string(begin + size) + " have the checksum " + std::to_string(found) +
                     ", expected " + std::to_string(checksums_[chunk]) +
                     ". Bring the file back from a copy, or export anew",
                 name_);
  }
  right_[chunk].store(1, std::memory_order_relaxed);
}

void CheckedBytes::throw_outside(uint64_t begin, uint64_t size) const {
  throw Damage(name_ + " is damaged: it has " + std::to_string(bytes_.size()) + " bytes, and " +
                   std::to_string(size) + " from " + std::to_string(begin) + " on are needed",
               name_);
}

}  // namespace cpudist::inference
