// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Runs simulations of seeds in several processes and says which of them went wrong, or one of them
// aloud. `bash scripts/simulate.sh --help` says how.

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "simulator/world.h"

namespace {

using cpudist::simulator::Counts;
using cpudist::simulator::Outcome;
using cpudist::simulator::World;
using SteadyClock = std::chrono::steady_clock;

constexpr uint64_t kMostJobs = 64;
// A seed takes milliseconds; one that takes so long waits for itself.
constexpr unsigned kSeedSeconds = 120;

struct Options {
  uint64_t from = 1;
  uint64_t seeds = 1000;
  uint64_t seconds = 0;  // 0: no limit
  uint64_t jobs = 1;
  uint64_t failures = 10;  // the run ends after so many
  bool one = false;        // aloud
};

// Shared by the processes.
struct Tally {
  std::atomic<uint64_t> next{0};
  std::atomic<uint64_t> failed{0};
  std::atomic<uint64_t> running[kMostJobs] = {};
  Counts counts[kMostJobs];
};

[[noreturn]] void usage(const char* program) {
  std::fprintf(stderr,
               "usage: %s [--seeds N] [--from N] [--seconds S] [--jobs J] [--failures F]\n"
               "       %s --seed N\n",
               program, program);
  std::exit(2);
}

uint64_t number_of(const char* text, const char* program) {
  char* end = nullptr;
  const uint64_t value = std::strtoull(text, &end, 10);
  if (end == text || *end != '\0') usage(program);
  return value;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) usage(argv[0]);
    const std::string name = argv[i];
    const uint64_t value = number_of(argv[i + 1], argv[0]);
    if (name == "--seeds") {
      options.seeds = value;
    } else if (name == "--from") {
      options.from = value;
    } else if (name == "--seconds") {
      options.seconds = value;
    } else if (name == "--jobs" && value >= 1 && value <= kMostJobs) {
      options.jobs = value;
    } else if (name == "--failures" && value >= 1) {
      options.failures = value;
    } else if (name == "--seed") {
      options.one = true;
      options.from = value;
    } else {
      usage(argv[0]);
    }
  }
  return options;
}

// In one write: several processes say such lines.
void tell(uint64_t seed, const std::string& what) {
  const std::string line = "seed " + std::to_string(seed) + ": " + what + "\n";
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fflush(stdout);
}

Outcome simulate(uint64_t seed, bool aloud) {
  World world(cpudist::simulator::plan_of(seed), aloud);
  world.schedule.when_stuck([seed](const std::string& text) {
    tell(seed, text);
    _exit(3);
  });
  return world.run();
}

int replay(uint64_t seed) {
  const Outcome outcome = simulate(seed, true);
  std::printf("events %016lx, %lu decisions\n", static_cast<unsigned long>(outcome.digest),
              static_cast<unsigned long>(outcome.decisions));
  if (outcome.wrong.empty()) {
    std::printf("seed %lu: nothing is wrong\n", static_cast<unsigned long>(seed));
    return 0;
  }
  tell(seed, outcome.wrong);
  return 1;
}

void work(const Options& options, uint64_t job, SteadyClock::time_point ends, Tally* tally) {
  while (tally->failed < options.failures && SteadyClock::now() < ends) {
    const uint64_t number = tally->next++;
    if (number >= options.seeds) return;
    const uint64_t seed = options.from + number;
    tally->running[job] = seed;
    alarm(kSeedSeconds);
    const Outcome outcome = simulate(seed, false);
    alarm(0);
    tally->counts[job].add(outcome.counts);
    if (outcome.wrong.empty()) continue;
    ++tally->failed;
    tell(seed, outcome.wrong);
  }
}

pid_t start(const Options& options, uint64_t job, SteadyClock::time_point ends, Tally* tally) {
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) {
    std::perror("fork");
    std::exit(2);
  }
  if (child > 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(2);
  work(options, job, ends, tally);
  _exit(0);
}

// A process that ends in the middle of a seed is that seed's failure; another one goes on.
void run_all(const Options& options, SteadyClock::time_point ends, Tally* tally) {
  std::vector<pid_t> children;
  for (uint64_t job = 0; job < options.jobs; ++job) {
    children.push_back(start(options, job, ends, tally));
  }
  for (size_t left = children.size(); left > 0;) {
    int status = 0;
    const pid_t ended = wait(&status);
    const auto found = std::find(children.begin(), children.end(), ended);
    if (found == children.end()) continue;
    if (status == 0) {
      --left;
      continue;
    }
    const auto job = static_cast<uint64_t>(found - children.begin());
    ++tally->failed;
    if (WIFSIGNALED(status)) {
      const int number = WTERMSIG(status);
      tell(tally->running[job], std::string("the program ended: ") + strsignal(number) +
                                    (number == SIGALRM ? ", it waits for itself" : ""));
    }
    *found = start(options, job, ends, tally);
  }
}

void print(const Tally& tally, double seconds) {
  Counts all;
  for (const Counts& counts : tally.counts) all.add(counts);
  const auto number = [](uint64_t value) { return static_cast<unsigned long>(value); };
  std::printf(
      "%lu steps, %lu faults, %lu of them long silences, %lu frames lost, repeated, late or "
      "swapped\n"
      "%lu requests sent again\n"
      "%lu trainers' processes lost, %lu lives of servers, %lu of them restored from a snapshot\n"
      "%lu processes that came again were fenced\n"
      "%lu cuts asked for, %lu not written, %lu committed and compared, %lu leaves\n"
      "%lu exchanges of deltas, %lu trainers' processes refused memory\n"
      "%lu bytes of gradients sent before their push\n"
      "%.0f simulated seconds in %.1f s\n",
      number(all.steps), number(all.faults), number(all.silences), number(all.frames),
      number(all.resent), number(all.processes), number(all.lives), number(all.restored),
      number(all.fenced), number(all.cuts), number(all.unwritten), number(all.committed),
      number(all.leaves), number(all.exchanges), number(all.refused), number(all.early_bytes),
      static_cast<double>(all.simulated_ms) / 1000, seconds);
  std::printf("%lu passed, %lu failed\n",
              number(all.seeds - std::min(all.seeds, tally.failed.load())), number(tally.failed));
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  if (options.one) return replay(options.from);
  void* memory =
      mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    return 2;
  }
  Tally* tally = new (memory) Tally;
  const SteadyClock::time_point began = SteadyClock::now();
  const auto ends = options.seconds == 0 ? SteadyClock::time_point::max()
                                         : began + std::chrono::seconds(options.seconds);
  run_all(options, ends, tally);
  print(*tally, std::chrono::duration<double>(SteadyClock::now() - began).count());
  return tally->failed == 0 ? 0 : 1;
}
