// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Puts weights of tables on huge pages beside what the trainer does: gigabytes take seconds, and
// nobody needs to wait for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "base/wait.h"

namespace cpudist::client {

// Thread safety: all members. The thread is started by the first large piece of memory.
class HugePages {
 public:
  // What puts memory on huge pages: changes no value and cannot fail.
  using Prefer = std::function<void(void* memory, size_t size_bytes)>;

  HugePages();  // the system
  explicit HugePages(Prefer prefer) : prefer_(std::move(prefer)) {}
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  // The memory stays until it is forgotten.
  void prefer(void* memory, size_t size_bytes);
  // Returns when it is not touched any more; within milliseconds.
  void forget(const void* memory);
  // Until nothing is left to be done.
  void wait();

 private:
  struct Piece {
    uint8_t* begin;  // what prefer() was given
    size_t done;
    size_t size_bytes;
  };
  void work();
  void start();

  const Prefer prefer_;
  std::mutex mutex_;
  ConditionVariable changed_;
  std::deque<Piece> pieces_;          // to be worked on, one after the other
  const uint8_t* touched_ = nullptr;  // the piece that is being worked on
  bool stopping_ = false;
  bool refused_ = false;
  std::thread thread_;
};

}  // namespace cpudist::client
