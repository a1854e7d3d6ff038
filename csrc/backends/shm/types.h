// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a collective is about: which one, of which elements, with which operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cpudist::shm {

enum class DType : uint8_t { kF32, kF64, kBf16, kF16, kI8, kU8, kI16, kI32, kI64, kBytes };
enum class Reduction : uint8_t { kNone, kSum, kProduct, kMin, kMax, kAnd, kOr, kXor };
enum class Kind : uint8_t {
  kBarrier,
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
};

size_t size_of(DType dtype);
const char* name_of(DType dtype);
const char* name_of(Reduction reduction);
const char* name_of(Kind kind);

// One rank's call of a collective. Pointers stay valid until it has ended.
struct Call {
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kBytes;
  Reduction reduction = Reduction::kNone;
  bool average = false;  // the sum is divided by the number of ranks
  int root = 0;
  size_t count = 0;  // elements of `in` or of each of `ins`; not of kAllToAll
  const void* in = nullptr;
  void* out = nullptr;
  std::vector<const void*> ins;   // by rank: kScatter (root), kReduceScatter, kAllToAll
  std::vector<void*> outs;        // by rank: kAllGather, kGather (root), kAllToAll
  std::vector<size_t> in_bytes;   // by rank: kAllToAll
  std::vector<size_t> out_bytes;  // by rank: kAllToAll

  size_t size_bytes() const { return count * size_of(dtype); }
};

// What every rank tells the others about its call; they must be equal but for the buffer.
struct Header {
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kBytes;
  Reduction reduction = Reduction::kNone;
  uint8_t average = 0;
  int32_t root = 0;
  uint64_t count = 0;
  uint64_t buffer = 0;  // shared buffer the elements are in, 0: in none
  uint64_t offset = 0;  // bytes from its begin

  bool agrees(const Header& other) const {
    return kind == other.kind && dtype == other.dtype && reduction == other.reduction &&
           average == other.average && root == other.root && count == other.count;
  }
  std::string describe() const;
};

}  // namespace cpudist::shm
