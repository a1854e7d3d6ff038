// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Laying out large payloads: first the size, then headers written and sections handed out to be
// filled in place. For the files that encode and decode.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "wire/checks.h"
#include "wire/frame.h"
#include "wire/layout.h"
#include "wire/rows.h"

namespace cpudist::wire {

// Hands out the sections of a payload of known size one after the other; finish() checks that all
// of it was handed out.
class BulkWriter {
 public:
  BulkWriter(uint64_t size_bytes, const Pool& pool)
      : payload_(static_cast<size_t>(check_size(size_bytes)), pool) {}

  void u32(uint32_t value) { put(&value, sizeof(value)); }
  void u64(uint64_t value) { put(&value, sizeof(value)); }
  void f64(double value) { put(&value, sizeof(value)); }
  void bytes(const void* data, uint64_t size_bytes) {
    uint8_t* to = section<uint8_t>(size_bytes);
    if (size_bytes > 0) std::memcpy(to, data, static_cast<size_t>(size_bytes));
  }
  // Room for `count` elements, left to the caller to fill, and zeros up to a multiple of 8 bytes.
  template <typename T>
  T* section(uint64_t count) {
    const auto size_bytes = static_cast<size_t>(count) * sizeof(T);
    const auto end = static_cast<size_t>(padded(size_bytes));
    uint8_t* start = take(end);
    if (end > size_bytes) std::memset(start + size_bytes, 0, end - size_bytes);
    return reinterpret_cast<T*>(start);
  }
  Buffer finish() {
    if (at_ != payload_.size()) {
      throw Error(ErrorCode::kInternal, "a payload is not as long as it was laid out");
    }
    return std::move(payload_);
  }

 private:
  static uint64_t check_size(uint64_t size_bytes) {
    if (size_bytes <= kPayloadLimitBytes) return size_bytes;
    throw Error(ErrorCode::kInvalidArgument,
                "a message of " + std::to_string(size_bytes) + " bytes, at most " +
                    std::to_string(kPayloadLimitBytes) +
                    ": use more servers (CPUDIST_SERVERS) or smaller batches");
  }
  uint8_t* take(size_t size_bytes) {
    if (size_bytes > payload_.size() - at_) {
      throw Error(ErrorCode::kInternal, "a payload is longer than it was laid out");
    }
    uint8_t* start = payload_.data() + at_;
    at_ += size_bytes;
    return start;
  }
  void put(const void* value, size_t size_bytes) {
    std::memcpy(take(size_bytes), value, size_bytes);
  }

  Buffer payload_;
  size_t at_ = 0;
};

// Bytes of `count` elements of `element_bytes`, padded.
inline uint64_t section_bytes(uint64_t count, uint64_t element_bytes) {
  return padded(checked_multiply(count, element_bytes));
}

// The sender's side of "strictly increasing".
template <typename Ref, typename Id>
void check_order(std::span<const Ref> refs, Id Ref::* id, const char* what) {
  for (size_t i = 1; i < refs.size(); ++i) {
    if (refs[i].*id <= refs[i - 1].*id) {
      throw Error(ErrorCode::kInvalidArgument,
                  std::string(what) +
                      " ids of a frame must increase: " + std::to_string(refs[i - 1].*id) +
                      " is followed by " + std::to_string(refs[i].*id));
    }
  }
}

// The receiver's side: known, and above the one before. Call with `*next_id` 0 at first.
inline void check_id(uint32_t id, size_t known, uint64_t* next_id, const char* what) {
  if (id >= known) {
    refuse("unknown " + std::string(what) + " " + std::to_string(id) + " of " +
           std::to_string(known));
  }
  if (id < *next_id) refuse(std::string(what) + " ids of a frame do not increase");
  *next_id = uint64_t{id} + 1;
}

inline void check_equal(uint64_t found, uint64_t expected, const char* what) {
  if (found != expected) {
    refuse(std::string(what) + ": expected " + std::to_string(expected) + ", found " +
           std::to_string(found));
  }
}

// Every key is one of the table.
void check_keys(std::span<const int64_t> keys, const TableSpec& table);

}  // namespace cpudist::wire
