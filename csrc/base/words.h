// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What is said of peers, and of waits for them, in words.
#pragma once

#include <chrono>
#include <cstdint>
#include <set>
#include <string>

#include "base/clock.h"
#include "base/errors.h"

namespace cpudist {

inline double seconds_between(TimePoint from, TimePoint to) {
  return std::chrono::duration<double>(to - from).count();
}

inline std::string in_seconds(uint64_t ms) {
  return ms % 1000 == 0 ? std::to_string(ms / 1000) + " s" : std::to_string(ms) + " ms";
}

inline std::string list_trainers(const std::set<uint32_t>& ranks) {
  if (ranks.empty()) return "other trainers";
  std::string text = ranks.size() == 1 ? "trainer" : "trainers";
  const char* separator = " ";
  for (const uint32_t rank : ranks) {
    text += separator + std::to_string(rank);
    separator = ", ";
  }
  return text;
}

inline std::string wait_text(const std::string& what, std::chrono::milliseconds waited,
                             const std::set<uint32_t>& ranks, const std::string& servers,
                             uint64_t stored_bytes) {
  std::string text = what + ": waited " +
                     in_seconds(static_cast<uint64_t>(waited.count()) / 1000 * 1000) + " for " +
                     list_trainers(ranks) + " at " + servers;
  if (stored_bytes > 0) {
    text += "; trainer 0 has sent " + std::to_string(stored_bytes >> 20) + " MiB of values so far";
  }
  return text;
}

inline std::string shard_text(uint32_t shard, uint32_t servers, uint32_t trainers,
                              uint64_t run_id) {
  return "shard " + std::to_string(shard) + " of " + std::to_string(servers) + " for " +
         std::to_string(trainers) + " trainers in run " + std::to_string(run_id);
}

// `trouble`: of the second connection, empty without one.
inline std::string silence_text(uint64_t liveness_ms, const std::string& trouble) {
  return "silent for " + std::to_string(liveness_ms) + " ms (CPUDIST_LIVENESS_MS)" +
         (trouble.empty() ? "" : ", and so is a second connection: " + trouble);
}

inline Error no_answer(const std::string& what, uint64_t deadline_ms) {
  return Error(ErrorCode::kTimeout, what + ": no answer within " + in_seconds(deadline_ms) +
                                        " (CPUDIST_RPC_DEADLINE_MS)");
}

inline Error too_late(const std::string& waited, uint64_t deadline_ms) {
  return Error(ErrorCode::kTimeout, waited + "; the deadline is " + in_seconds(deadline_ms) +
                                        " (CPUDIST_ROUND_DEADLINE_MS)");
}

// `lost`: it was there; else it could not be reached.
inline Error loss_of(const std::string& server, bool lost, uint64_t connect_deadline_ms,
                     const std::string& why) {
  if (lost) return Error(ErrorCode::kPeerLost, server + " was lost: " + why);
  return Error(ErrorCode::kAddress, server + " could not be reached within " +
                                        std::to_string(connect_deadline_ms) + " ms: " + why);
}

}  // namespace cpudist
