// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Owns a file descriptor: of a file, a socket, a pipe or an event. And how many there may be.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

namespace cpudist {

class Descriptor {
 public:
  explicit Descriptor(int number = -1) noexcept : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  ~Descriptor() { reset(); }

  int get() const noexcept { return number_; }
  int release() noexcept { return std::exchange(number_, -1); }
  void reset(int number = -1) noexcept {
    if (number_ >= 0) ::close(number_);
    number_ = number;
  }

 private:
  int number_;
};

// How many this process may have; `unknown` where the system does not tell.
inline uint64_t descriptors_max(uint64_t unknown) {
  rlimit files{};
  return getrlimit(RLIMIT_NOFILE, &files) == 0 ? files.rlim_cur : unknown;
}

}  // namespace cpudist
