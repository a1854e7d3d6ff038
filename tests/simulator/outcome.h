// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What came of seeds.
#pragma once

#include <cstdint>
#include <string>

namespace cpudist::simulator {

struct Counts {
  uint64_t seeds = 0;
  uint64_t steps = 0;      // that trainers have made
  uint64_t cuts = 0;       // that were asked for
  uint64_t committed = 0;  // and whose files were read and compared
  uint64_t faults = 0;     // that were made, beside those of links
  uint64_t processes = 0;  // of trainers, that were lost
  uint64_t lives = 0;      // of all servers, that were lost
  uint64_t restored = 0;   // by a snapshot, of these
  uint64_t frames = 0;     // that links have dropped, repeated, delayed, swapped or cut off
  uint64_t leaves = 0;
  uint64_t resent = 0;       // requests
  uint64_t unwritten = 0;    // cuts that were taken, and not written
  uint64_t exchanges = 0;    // of trainers that step by themselves, that were finished
  uint64_t refused = 0;      // processes of trainers that had a push refused: no memory for it
  uint64_t early_bytes = 0;  // of gradients that went before their push
  uint64_t fenced = 0;       // processes that came again when another had taken their place
  uint64_t silences = 0;     // faults that lasted for longer than any silence may be unnoticed
  uint64_t simulated_ms = 0;

  void add(const Counts& other) {
    seeds += other.seeds;
    steps += other.steps;
    cuts += other.cuts;
    committed += other.committed;
    faults += other.faults;
    processes += other.processes;
    lives += other.lives;
    restored += other.restored;
    frames += other.frames;
    leaves += other.leaves;
    resent += other.resent;
    unwritten += other.unwritten;
    exchanges += other.exchanges;
    refused += other.refused;
    early_bytes += other.early_bytes;
    fenced += other.fenced;
    silences += other.silences;
    simulated_ms += other.simulated_ms;
  }
};

struct Outcome {
  std::string wrong;    // empty: nothing
  uint64_t digest = 0;  // of all events
  uint64_t decisions = 0;
  Counts counts;
};

}  // namespace cpudist::simulator
