// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "support/failing_new.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

namespace {

// Of this thread: allocations until the one that fails; below 0: none does, or it has.
thread_local int64_t left = -1;

// Of all threads but those that are spared.
std::atomic<int64_t> left_elsewhere{-1};
thread_local bool spared = false;

bool fails_elsewhere() {
  return !spared && left_elsewhere.load() >= 0 && left_elsewhere.fetch_sub(1) == 0;
}

}  // namespace

void* operator new(size_t size) {
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
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
  if (left >= 0 && left-- == 0) {
    errno = ENOMEM;
    return nullptr;
  }
  void* memory = nullptr;
  return ::posix_memalign(&memory, alignment, size) == 0 ? memory : nullptr;
}

namespace cpudist::testing {

FailingNew::FailingNew(int64_t nth) { left = nth; }

FailingNew::~FailingNew() { left = -1; }

bool FailingNew::happened() const { return left < 0; }

FailingNewElsewhere::FailingNewElsewhere(int64_t nth) {
  spared = true;
  left_elsewhere = nth;
}

FailingNewElsewhere::~FailingNewElsewhere() {
  left_elsewhere = -1;
  spared = false;
}

bool FailingNewElsewhere::happened() const { return left_elsewhere.load() < 0; }

}  // namespace cpudist::testing
