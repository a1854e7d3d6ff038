// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "support/failing_new.h"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

constexpr int64_t kNone = INT64_MAX;

// Of this thread: allocations until the first one that fails, and how many do; from 0 down they
// have begun to fail.
thread_local int64_t left = kNone;
thread_local int64_t failing = 1;

bool fails_here() {
  if (left == kNone) return false;
  const int64_t at = left--;
  return at <= 0 && at > -failing;
}

// Of all threads but those that are spared.
std::atomic<int64_t> left_elsewhere{kNone};
std::atomic<int64_t> failing_elsewhere{1};
thread_local bool spared = false;

bool fails_elsewhere() {
  if (spared || left_elsewhere.load() == kNone) return false;
  const int64_t at = left_elsewhere.fetch_sub(1);
  return at <= 0 && at > -failing_elsewhere.load();
}

}  // namespace

void* operator new(size_t size) {
  if (fails_here()) throw std::bad_alloc();
  if (fails_elsewhere()) throw std::bad_alloc();
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// Those of the sanitizers would not fit the deletes below.
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

// What slabs, indexes and blocks are made of.
extern "C" void* aligned_alloc(size_t alignment, size_t size) noexcept {
  if (fails_here()) {
    errno = ENOMEM;
    return nullptr;
  }
  void* memory = nullptr;
  return ::posix_memalign(&memory, alignment, size) == 0 ? memory : nullptr;
}

namespace cpudist::testing {

FailingNew::FailingNew(int64_t nth, int64_t count) {
  failing = count;
  left = nth;
}

FailingNew::~FailingNew() { left = kNone; }

bool FailingNew::happened() const { return left < 0; }

FailingNewElsewhere::FailingNewElsewhere(int64_t nth, int64_t count) {
  spared = true;
  failing_elsewhere = count;
  left_elsewhere = nth;
}

FailingNewElsewhere::~FailingNewElsewhere() {
  left_elsewhere = kNone;
  spared = false;
}

bool FailingNewElsewhere::happened() const { return left_elsewhere.load() < 0; }

}  // namespace cpudist::testing
