// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/read/waiting.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <new>
#include <system_error>

namespace cpudist::data {

void throw_failure(const std::exception_ptr& cause, const std::string& who) {
  try {
    std::rethrow_exception(cause);
  } catch (const Error& error) {
    throw Error(error);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory,
                who +
                    " has no memory left; make batches, the number of threads or buffer_bytes "
                    "smaller, or give this process more memory");
  } catch (const std::exception& error) {
    throw Error(ErrorCode::kInternal, who + " failed: " + error.what());
  }
}

StopSignal::StopSignal() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (descriptor_ < 0) {
    throw Error(ErrorCode::kDataFile,
                "cannot make an eventfd for a reader: " + std::generic_category().message(errno) +
                    "; allow this process more open files (ulimit -n)");
  }
}

StopSignal::~StopSignal() { ::close(descriptor_); }

void StopSignal::raise() noexcept {
  raised_.store(true, std::memory_order_release);
  const uint64_t one = 1;
  // Fails only when the counter is full, and then it is readable all the same.
  [[maybe_unused]] const ssize_t written = ::write(descriptor_, &one, sizeof one);
}

void StopSignal::check() const {
  if (raised()) throw Error(ErrorCode::kClosed, "the reader has been stopped");
}

}  // namespace cpudist::data
