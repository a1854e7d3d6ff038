// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One parameter set on one server: its tables and blocks, who takes part in its rounds, and the
// requests that wait. docs/architecture.md, "Rounds" and "Updates on arrival", is what this
// implements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "core/changed_rows.h"
#include "core/messages.h"
#include "core/peers.h"
#include "core/round.h"
#include "core/update_pool.h"

namespace cpudist::core {

inline constexpr size_t kPoolBytes = size_t{256} << 20;

// What the parameter sets of a server share. Outlives them.
struct ServerShared {
  explicit ServerShared(ServerOptions given)
      : options(std::move(given)),
        peers(options, counters),
        updates(options.threads),
        pushes_memory(std::make_shared<MemoryCap>(options.memory_cap_bytes)),
        pushes_pool(std::make_shared<BufferPool>(
            std::min<uint64_t>(options.memory_cap_bytes, kPoolBytes))) {}

  const ServerOptions options;
  ServerCounters counters;
  Peers peers;
  UpdatePool updates;
  // With a cap: what received pushes hold, from their header to their update.
  const std::shared_ptr<MemoryCap> pushes_memory;
  const std::shared_ptr<BufferPool> pushes_pool;
  std::shared_ptr<BufferPool> pool = std::make_shared<BufferPool>(kPoolBytes);
};

// A payload that is not what its kind says: its sender's connection is closed, nothing is recorded.
class MalformedFrame : public Error {
 public:
  explicit MalformedFrame(const Error& error) : Error(error.code(), error.what()) {}
};

template <typename Decode>
auto decode_frame(Decode&& decode) {
  try {
    return decode();
  } catch (const Error& error) {
    throw MalformedFrame(error);
  }
}

inline std::span<const uint8_t> bytes_of(const Buffer& payload) {
  return {payload.data(), payload.size()};
}

// Throws kInvalidArgument for a decoded layout that does not fit this group of servers.
void check_layout(const ParamSetLayout& layout, const ServerOptions& options);
// The first item in which two layouts differ: "table 0, rows: 10 against 20".
std::string describe_difference(const ParamSetLayout& first, const ParamSetLayout& second);

// Thread safety: every public member locks for itself. Members that take a ticket answer it, now or
// later, or throw Error, which the caller records as the answer (kOverloaded: rejects with it), or
// MalformedFrame.
class ParamSet {
 public:
  // `opener` sent `layout_bytes` first; `active` are the trainers that take part: not those that
  // have said goodbye.
  ParamSet(uint32_t id, Buffer layout_bytes, uint32_t opener, const std::vector<uint32_t>& active,
           ServerShared& shared);
  ~ParamSet();

  void open(const Ticket& ticket, const Buffer& layout_bytes, Outbox& outbox);
  void store(const Ticket& ticket, const Buffer& payload, Outbox& outbox);
  void ready(const Ticket& ticket, Outbox& outbox);
  void push(const Ticket& ticket, Buffer payload, Outbox& outbox);
  // For a push that was dropped for lack of memory: throws kOverloaded, or kInvalidArgument if it
  // would be sent again for ever.
  [[noreturn]] void refuse_push(uint64_t size_bytes) const;
  void commit(const Ticket& ticket, const Commit& commit, Outbox& outbox);
  void leave(const Ticket& ticket, Outbox& outbox);
  void join(const Ticket& ticket, const Join& join, Outbox& outbox);
  void close(const Ticket& ticket, Outbox& outbox);

  Buffer pull_rows(const Buffer& payload) const;
  Buffer pull_dense() const;
  Buffer fetch(const Buffer& payload) const;

  // A barrier or a goodbye: leave without an answer.
  void remove_member(uint32_t rank, Outbox& outbox);
  // The end of a barrier: `ranks`, less those that have closed this set, take part again.
  void reset_members(const std::vector<uint32_t>& ranks);
  // True when each of the trainers that may still come has closed it.
  bool unused(const std::vector<uint32_t>& remaining) const;
  void mark_closed(uint32_t rank, Outbox& outbox);
  // A trainer is lost: answers everything that waits for it. On arrival the others go on without.
  void lose(uint32_t rank, const Error& error, Outbox& outbox);
  // Answers everything that waits.
  void fail_waiting(const Error& error, Outbox& outbox);
  // Forgets what an older incarnation of `rank` left waiting.
  void drop(uint32_t rank, Outbox& outbox);
  // Whom a waiting request waits for.
  std::vector<uint32_t> waiting_for(FrameKind kind) const;
  uint64_t round() const;
  bool in_rounds() const { return !on_arrival(); }
  void add_stats(ServerStats* stats) const;

 private:
  enum class Phase { kCollect, kCommit };
  struct WaitingCommit {
    Ticket ticket;
    double total_norm = 0;
  };
  struct Committed {  // the last two-phase round, for the commits that come after the first
    uint64_t round = 0;
    double total_norm = 0;
    std::set<uint32_t> ranks;
    SharedPayload reply;
  };

  // All of these are called with mutex_ held exclusively.
  void refuse_all(const Error& error, Outbox& outbox);
  void require_open(uint32_t rank) const;
  void require_ready() const;
  void require_not_lost() const;
  void require_whole() const;
  void check_push(const Ticket& ticket, const PushHeader& header, uint64_t size_bytes) const;
  void check_configs(const PushHeader& header) const;
  void take_out(uint32_t rank, Outbox& outbox);
  void advance_if_empty();
  void promote();
  bool complete() const;
  void try_complete(Outbox& outbox);
  void begin_commit(Outbox& outbox);
  void apply_commit(double total_norm, Outbox& outbox);
  void end_round(Outbox& outbox);
  void fail_round(const Error& error, Outbox& outbox);
  void break_set(const std::exception& cause, Outbox& outbox);
  void clear_pushes();
  SharedPayload dense_reply(const std::vector<uint32_t>& blocks) const;
  std::vector<uint32_t> missing() const;
  void answer_round(const Ticket& ticket, uint64_t round, Outbox& outbox);
  Version version() const { return {round_, samples_}; }
  // ---- updates on arrival ----
  bool on_arrival() const { return layout_.mode == UpdateMode::kOnArrival; }
  bool bounded() const { return layout_.max_staleness != kAnyStaleness; }
  void add_reader(uint32_t rank);
  bool may_apply(uint32_t rank) const;
  void apply_arrivals(Outbox& outbox);
  void apply_arrival(uint32_t rank, Outbox& outbox);
  std::vector<uint32_t> oldest_readers() const;
  // ---- deltas ----
  void follow(uint32_t rank);  // a trainer that has all values as of now
  void note_changes(uint32_t rank, const RoundPush& push);
  SharedPayload changes_reply(uint32_t rank);

  const uint32_t id_;
  const Buffer layout_bytes_;
  const ParamSetLayout layout_;
  const uint32_t opener_;
  ServerShared& shared_;

  mutable std::shared_mutex mutex_;
  ParamStore store_;
  RoundUpdate update_;
  bool ready_ = false;
  uint64_t round_ = 0;    // updates so far
  uint64_t samples_ = 0;  // behind them
  Phase phase_ = Phase::kCollect;
  std::set<uint32_t> opened_;
  std::set<uint32_t> closed_;
  std::set<uint32_t> members_;
  std::map<uint32_t, uint64_t> joining_;  // rank -> the round from which it is a member
  std::set<uint32_t> holders_;            // joining trainers that keep the round from being applied
  RoundPushes pushes_;
  // With a bound on staleness: rank -> update after which it read the values of its next gradient.
  std::map<uint32_t, uint64_t> readers_;
  ChangedRows changed_rows_;  // of sets that exchange deltas
  uint64_t steps_ = 0;        // of the trainers, behind the deltas
  RoundPushes early_;         // of joining trainers, for the round they join at
  std::map<uint32_t, Ticket> waiting_ready_;
  std::map<uint32_t, WaitingCommit> waiting_commits_;
  Committed committed_;
  // An update failed half way, or trainers opened it with different layouts: nobody can use it.
  std::optional<Error> broken_;
};

}  // namespace cpudist::core
