// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/huge_pages.h"

#include <algorithm>

#include "base/errors.h"
#include "base/threads.h"
#include "kernels/aligned.h"

namespace cpudist::client {
namespace {

// Less is done at once: it takes no longer than a thread takes to begin.
constexpr size_t kAtOnceBytes = size_t{4} << 20;
constexpr size_t kPageBytes = size_t{2} << 20;
// What forget() may have to wait for.
constexpr size_t kStepBytes = size_t{8} << 20;

}  // namespace

HugePages::HugePages() : HugePages(kernels::prefer_huge_pages) {}

HugePages::~HugePages() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) join_thread(thread_);
}

void HugePages::prefer(void* memory, size_t size_bytes) {
  if (size_bytes <= kAtOnceBytes) {
    prefer_(memory, size_bytes);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable() && !refused_) start();
    if (refused_) return;  // the memory is as usable as it was
    pieces_.push_back({static_cast<uint8_t*>(memory), 0, size_bytes});
  }
  changed_.notify_all();
}

void HugePages::start() {
  try {
    thread_ = start_io_thread("the thread that puts tables on huge pages", [this] { work(); });
  } catch (const Error&) {
    refused_ = true;
  }
}

void HugePages::forget(const void* memory) {
  std::unique_lock lock(mutex_);
  std::erase_if(pieces_, [&](const Piece& piece) { return piece.begin == memory; });
  changed_.wait(lock, [&] { return touched_ == nullptr || touched_ != memory; });
}

void HugePages::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return pieces_.empty() && touched_ == nullptr; });
}

void HugePages::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !pieces_.empty(); });
    if (stopping_) return;
    Piece& piece = pieces_.front();
    uint8_t* const begin = piece.begin + piece.done;
    size_t step = piece.size_bytes - piece.done;
    // Up to where a page ends, so that none is left out between two steps.
    if (step > kStepBytes) step = kStepBytes - reinterpret_cast<uintptr_t>(begin) % kPageBytes;
    touched_ = piece.begin;
    piece.done += step;
    if (piece.done == piece.size_bytes) pieces_.pop_front();
    lock.unlock();
    prefer_(begin, step);
    lock.lock();
    touched_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace cpudist::client
