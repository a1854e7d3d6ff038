// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Runs an LLVMFuzzerTestOneInput target without libFuzzer: replays a corpus, then mutates it. The
// inputs follow from the seed. Inputs that reach code no input reached before are kept and mutated
// further; g++'s -fsanitize-coverage=trace-pc tells which those are. What kills the process is
// written to a file first.

#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "mutator.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" void __sanitizer_set_death_callback(void (*callback)());
// The sanitizer is a library: it finds what the program shows. Undefined behaviour is a trap.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "handle_abort=1:handle_sigill=1:malloc_context_size=0:quarantine_size_mb=8";
}
extern "C" char __executable_start;

namespace {

constexpr size_t kPlaces = 1 << 16;
constexpr int kHangSeconds = 20;

struct State {
  uint8_t reached[kPlaces] = {};
  uint64_t new_places = 0;
  uint64_t inputs = 0;
  uint64_t inputs_at_alarm = 0;
  cpudist::fuzz::Input current;
  std::string crash_path;
};

State state;

// Async-signal-safe: open, write, close.
void save_current() {
  FILE* file = std::fopen(state.crash_path.c_str(), "wb");
  if (file == nullptr) return;
  std::fwrite(state.current.data(), 1, state.current.size(), file);
  std::fclose(file);
  std::fprintf(stderr, "input %llu written to %s\n", static_cast<unsigned long long>(state.inputs),
               state.crash_path.c_str());
}

void on_alarm(int) {
  if (state.inputs == state.inputs_at_alarm) {
    std::fprintf(stderr, "an input took more than %d s\n", kHangSeconds);
    std::abort();
  }
  state.inputs_at_alarm = state.inputs;
}

void watch() {
  __sanitizer_set_death_callback(&save_current);
  signal(SIGALRM, &on_alarm);
  itimerval timer{{kHangSeconds, 0}, {kHangSeconds, 0}};
  setitimer(ITIMER_REAL, &timer, nullptr);
}

// True if the input reached code that none before it did.
bool run(const cpudist::fuzz::Input& input) {
  const uint64_t before = state.new_places;
  // A copy of exactly its size, whose ends the sanitizer guards.
  std::vector<uint8_t> exact(input.begin(), input.end());
  ++state.inputs;
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
  return state.new_places != before;
}

std::vector<cpudist::fuzz::Input> read_corpus(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<cpudist::fuzz::Input> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

struct Options {
  std::string corpus;
  uint64_t inputs = ~0ull;
  double seconds = 1e18;
  uint64_t seed = 1;
};

[[noreturn]] void usage(const char* program) {
  std::fprintf(stderr, "usage: %s [--inputs N] [--seconds S] [--seed K] CORPUS | INPUT_FILE\n",
               program);
  std::exit(2);
}

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name.rfind("--", 0) != 0) {
      if (!options.corpus.empty()) usage(argv[0]);
      options.corpus = name;
      continue;
    }
    if (i + 1 == argc) usage(argv[0]);
    char* end = nullptr;
    const char* text = argv[++i];
    if (name == "--inputs") {
      options.inputs = std::strtoull(text, &end, 10);
    } else if (name == "--seconds") {
      options.seconds = std::strtod(text, &end);
    } else if (name == "--seed") {
      options.seed = std::strtoull(text, &end, 10);
    } else {
      usage(argv[0]);
    }
    if (end == text || *end != '\0') usage(argv[0]);
  }
  if (options.corpus.empty()) usage(argv[0]);
  return options;
}

int replay_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  state.current.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  run(state.current);
  std::printf("%s passed\n", path.c_str());
  return 0;
}

}  // namespace

// Called at every basic block of the instrumented code.
extern "C" void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0)) -
                     reinterpret_cast<uintptr_t>(&__executable_start);
  uint8_t& reached = state.reached[(place ^ (place >> 16)) % kPlaces];
  state.new_places += reached == 0;
  reached = 1;
}

int main(int argc, char** argv) {
  const Options options = read_options(argc, argv);
  state.crash_path = std::string(argv[0]) + ".crash-" + std::to_string(getpid());
  watch();
  if (!std::filesystem::is_directory(options.corpus)) return replay_file(options.corpus);

  std::vector<cpudist::fuzz::Input> pool = read_corpus(options.corpus);
  if (pool.empty()) {
    std::fprintf(stderr, "the corpus %s is empty\n", options.corpus.c_str());
    return 2;
  }
  for (const auto& input : pool) {
    state.current = input;
    run(input);
  }
  const size_t replayed = pool.size();
  const auto began = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  };
  cpudist::fuzz::Mutator mutator(options.seed);
  while (state.inputs < options.inputs &&
         (state.inputs % 256 != 0 || elapsed() < options.seconds)) {
    mutator.mutate(pool, state.current);
    if (run(state.current)) pool.push_back(state.current);
  }
  const double seconds = elapsed();
  std::printf("%s: %llu inputs, seed %llu, %.1f s, %.0f inputs/s, %zu replayed, %zu kept\n",
              std::filesystem::path(argv[0]).filename().c_str(),
              static_cast<unsigned long long>(state.inputs),
              static_cast<unsigned long long>(options.seed), seconds,
              static_cast<double>(state.inputs) / std::max(seconds, 1e-3), replayed,
              pool.size() - replayed);
  return 0;
}
