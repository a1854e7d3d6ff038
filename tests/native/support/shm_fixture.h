// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Ranks of backend shm as threads over one segment.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "backends/shm/group.h"
#include "support/run_all.h"

namespace cpudist::shm {

constexpr std::chrono::milliseconds kLimit{20'000};

inline std::vector<int> names_of(int size) {
  std::vector<int> names(static_cast<size_t>(size));
  std::iota(names.begin(), names.end(), 0);
  return names;
}

// Runs `body` for each rank of a group of threads.
inline void run_ranks(int size, const std::function<void(Group&, int)>& body,
                      std::chrono::milliseconds limit = kLimit) {
  const Segment segment = Segment::create(size, 7);
  std::vector<std::function<void()>> calls;
  for (int rank = 0; rank < size; ++rank) {
    calls.push_back([&, rank] {
      Group group(segment, rank, names_of(size), limit);
      body(group, rank);
    });
  }
  testing::run_all(calls);
}

inline Call call_of(Kind kind, DType dtype, size_t count, int root = 0) {
  Call call;
  call.kind = kind;
  call.dtype = dtype;
  call.count = count;
  call.root = root;
  return call;
}

inline Call sum_of(std::vector<float>& values) {
  Call call = call_of(Kind::kAllReduce, DType::kF32, values.size());
  call.reduction = Reduction::kSum;
  call.in = call.out = values.data();
  return call;
}

}  // namespace cpudist::shm
