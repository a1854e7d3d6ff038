// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Runs the registered native tests. Arguments select tests whose name contains one of them; no
// match is a failure, so that a misspelt filter cannot pass. Prints "N passed, N failed". With
// `--jobs N` first, N processes share the tests: each takes the next that none has taken.

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "support/check.h"

#if defined(__SANITIZE_ADDRESS__)
// Undefined behaviour is a trap: told with its stack.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "handle_sigill=1";
}
#endif

namespace {

using cpudist::testing::TestCase;

constexpr int kMostJobs = 64;

// Shared by the processes.
struct Tally {
  std::atomic<size_t> next{0};
  std::atomic<size_t> running[kMostJobs] = {};  // by process, its test
  std::atomic<int> passed{0};
  std::atomic<int> failed{0};
};

bool selected(const std::string& name, const std::vector<std::string>& parts) {
  if (parts.empty()) return true;
  for (const std::string& part : parts) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

bool run_one(const TestCase& test) {
  try {
    test.body();
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED %s\n  %s\n", test.name.c_str(), error.what());
  } catch (...) {
    std::fprintf(stderr, "FAILED %s\n  an exception of unknown type\n", test.name.c_str());
  }
  return false;
}

void run_tests(const std::vector<const TestCase*>& tests, int job, Tally* tally) {
  for (size_t i = tally->next++; i < tests.size(); i = tally->next++) {
    tally->running[job] = i;
    ++(run_one(*tests[i]) ? tally->passed : tally->failed);
  }
}

// True if all processes ended as they should. They end with exit(): a sanitizer reports then.
bool run_in_processes(int jobs, const std::vector<const TestCase*>& tests, Tally* tally) {
  const pid_t parent = getpid();
  std::vector<pid_t> children;
  for (int i = 0; i < jobs; ++i) {
    const pid_t child = fork();
    if (child < 0) {
      std::perror("fork");
      return false;
    }
    children.push_back(child);
    if (child > 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) std::exit(1);
    run_tests(tests, i, tally);
    std::exit(0);
  }
  bool ended_well = true;
  for (int i = 0, status = 0; i < jobs; ++i) {
    const pid_t ended = wait(&status);
    if (ended > 0 && status == 0) continue;
    const auto job = std::find(children.begin(), children.end(), ended) - children.begin();
    const bool known = ended > 0 && job < jobs && !tests.empty();
    std::fprintf(stderr, "a process of tests ended with status %#x, its last test was %s\n", status,
                 known ? tests[tally->running[job]]->name.c_str() : "not known");
    ended_well = false;
  }
  return ended_well;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> parts(argv + 1, argv + argc);
  int jobs = 1;
  if (!parts.empty() && parts[0] == "--jobs") {
    jobs = parts.size() > 1 ? std::atoi(parts[1].c_str()) : 0;
    if (jobs < 1 || jobs > kMostJobs) {
      std::fprintf(stderr, "usage: %s [--jobs 1..%d] [NAME_PART...]\n", argv[0], kMostJobs);
      return 2;
    }
    parts.erase(parts.begin(), parts.begin() + 2);
  }
  std::vector<const TestCase*> tests;
  for (const TestCase& test : cpudist::testing::registry()) {
    if (selected(test.name, parts)) tests.push_back(&test);
  }
  void* memory =
      mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    return 1;
  }
  Tally* tally = new (memory) Tally;
  bool ended_well = true;
  if (jobs == 1) {
    run_tests(tests, 0, tally);
  } else {
    ended_well = run_in_processes(jobs, tests, tally);
  }
  std::printf("%d passed, %d failed\n", tally->passed.load(), tally->failed.load());
  return ended_well && tally->failed == 0 && tally->passed > 0 ? 0 : 1;
}
