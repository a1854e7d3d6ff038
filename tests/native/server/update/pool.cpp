// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The helpers of a round: every task once, and an error when they cannot all be started.

#include "server/update/pool.h"

#include <sys/resource.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "base/errors.h"
#include "support/check.h"

namespace cpudist {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kLimitsMemory = false;  // a sanitizer ends the process when memory is short
#else
constexpr bool kLimitsMemory = true;
#endif

rlim_t address_space_bytes() {
  unsigned long pages = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  CHECK(file != nullptr);
  const int found = std::fscanf(file, "%lu", &pages);
  std::fclose(file);
  CHECK_EQ(found, 1);
  return rlim_t{pages} * 4096;
}

// Leaves room for the stacks of a few threads.
class FewThreads {
 public:
  FewThreads() {
    CHECK_EQ(getrlimit(RLIMIT_AS, &before_), 0);
    rlimit limit = before_;
    limit.rlim_cur = address_space_bytes() + (rlim_t{256} << 20);
    CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  }
  ~FewThreads() { setrlimit(RLIMIT_AS, &before_); }
  FewThreads(const FewThreads&) = delete;
  FewThreads& operator=(const FewThreads&) = delete;

 private:
  rlimit before_{};
};

}  // namespace

TEST(update_pool_runs_every_task_once) {
  server::UpdatePool pool(3);
  std::array<std::atomic<int>, 100> calls{};
  pool.run(calls.size(), [&](size_t i) { ++calls[i]; });
  for (const auto& count : calls) CHECK_EQ(count.load(), 1);
}

TEST(update_pool_goes_on_after_an_error_and_tells_the_first_one_alone_or_not) {
  for (const uint32_t threads : {1u, 4u}) {
    server::UpdatePool pool(threads);
    std::array<std::atomic<int>, 64> calls{};
    std::string text;
    try {
      pool.run(calls.size(), [&](size_t i) {
        ++calls[i];
        if (i % 20 == 7) throw std::runtime_error("task " + std::to_string(i));
      });
    } catch (const std::runtime_error& error) {
      text = error.what();
    }
    CHECK_EQ(text, "task 7");
    for (const auto& count : calls) CHECK_EQ(count.load(), 1);
    pool.run(calls.size(), [&](size_t i) { ++calls[i]; });  // the error is not told twice
    for (const auto& count : calls) CHECK_EQ(count.load(), 2);
  }
}

TEST(update_pool_that_cannot_start_its_helpers_is_an_error) {
  if (!kLimitsMemory) return;
  const FewThreads limit;
  std::string text;
  try {
    const server::UpdatePool pool(4096);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kInvalidArgument);
    text = error.what();
  }
  CHECK(text.find("CPUDIST_SERVER_THREADS") != std::string::npos);
}

}  // namespace cpudist
