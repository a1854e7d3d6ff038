// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows of batches to come: asked for while the present batch is computed, one request per server
// and batch, and there when a lookup wants them.
//
// In rounds the rows go into the weight at the end of a step, in the thread of the step: the
// trainer tells with its push which rows it holds, and the answer brings those that the round has
// updated. On arrival they stay in the answers until a lookup wants them, and are as old as they
// are.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "client/links/link.h"
#include "wire/messages.h"

namespace cpudist::client {

struct SetState;
class Session;
class TableCache;

// Ids of a batch to come, of one table. A table may be named more than once.
struct ComingIds {
  uint32_t table = 0;
  const void* ids = nullptr;
  uint64_t count = 0;
  bool are_int32 = false;
};
// Calls `action` with the ids as what they are.
template <typename Action>
void with_ids(const ComingIds& ids, Action&& action) {
  const auto n = static_cast<size_t>(ids.count);
  if (ids.are_int32) {
    action(std::span(static_cast<const int32_t*>(ids.ids), n));
  } else {
    action(std::span(static_cast<const int64_t*>(ids.ids), n));
  }
}
// Distinct keys of one table, those of a server together.
struct ServedKeys {
  std::vector<int64_t> keys;
  std::vector<size_t> offsets;  // per server, and the end
  std::span<const int64_t> of(uint32_t server) const {
    return std::span(keys).subspan(offsets[server], offsets[server + 1] - offsets[server]);
  }
};

class Prefetcher {
 public:
  // Batches that may be outstanding; the oldest goes when there is one more.
  static constexpr size_t kMostBatches = 16;

  // Both outlive it; `pool` is where what the replies bring is decoded to.
  Prefetcher(SetState& set, Session& session, wire::Pool pool);

  // ---- any thread ----
  // Asks for the rows of a batch to come. Returns its number, or 0 if rows of remote tables that
  // are on their way or held would take more than the budget. Throws kRowOutOfRange before anything
  // is sent, and what sending throws.
  uint64_t request(std::span<const ComingIds> ids, bool managed, uint64_t* rows);
  // The batch of this number is the next one to be computed: it goes with the next step.
  void use(uint64_t number);
  // Before a lookup, with the mutex of its table held: rows that are on their way are held then.
  template <typename Id>
  void resolve(uint32_t table, std::span<const Id> ids);
  // A lookup has used rows that were held since the last round.
  void note_hits() const;
  // Values were written, or this trainer takes no part any more. Without locks of tables.
  void drop_all();

  // ---- the thread of a step ----
  // What a push is to tell `server`; null for nothing. The keys to be filled in are those of
  // held(table).
  void prepare();
  const wire::HoldRefs* holds(uint32_t server) const;
  const ServedKeys& held(uint32_t table) const { return held_[table]; }
  // A round was applied: `replies` have the rows of it that are held. Makes all rows stale but
  // these. Returns how many were brought anew.
  uint64_t finish_round(std::span<const RequestPtr> replies);
  // A push on arrival was queued and all rows are stale.
  void finish_push();

 private:
  struct Part {  // of one table
    uint32_t table = 0;
    std::vector<int64_t> marked;  // to be asked for, until they are
    ServedKeys all;
    ServedKeys pulled;               // those that were asked for
    std::vector<const float*> rows;  // per server, once they have come
    // Under the mutex of the table: lookups in other threads write them.
    bool placed = false;  // in the weight, for this step
    bool used = false;
  };
  struct Batch {
    uint64_t number = 0;
    bool managed = false;  // use() tells when it is computed
    bool told = false;     // its rows were told with the push under way
    uint64_t steps = 0;    // that have passed
    std::vector<Part> parts;
    std::atomic<bool> due{false};  // it goes with this step
    // Of the replies; they are waited for with it held.
    std::mutex mutex;
    std::vector<RequestPtr> requests;
    bool arrived = false;
    bool failed = false;
    std::vector<wire::Version> versions;  // per server
    Part* find(uint32_t table);
  };
  using BatchPtr = std::shared_ptr<Batch>;
  using IdsByTable = std::map<uint32_t, std::vector<const ComingIds*>>;

  std::vector<BatchPtr> batches() const;
  uint64_t remote_bytes(const Batch& batch) const;  // of what was asked for
  void remove(const BatchPtr& batch);
  bool ask(Batch& batch, const IdsByTable& by_table);
  void unmark(const Batch& batch) noexcept;
  void send(Batch& batch);
  // Waits for the replies. False if that has failed before.
  bool take_replies(Batch& batch);
  void place(Batch& batch, Part& part, bool wanted);
  bool used_up(const Batch& batch) const;
  // Whether a lookup has used rows of it since the last step.
  bool in_use(const Batch& batch) const;
  static bool has_failed(Batch& batch);
  bool all_placed(const Batch& batch) const;
  // All that was asked for has come and is decoded.
  bool has_come(Batch& batch);
  void gather_held();
  uint64_t keep_rows(std::span<const RequestPtr> replies);  // finish_round()
  uint64_t next_number() const;
  void note_version(uint32_t server, wire::Version version);
  uint64_t since(uint32_t server) const;
  bool place_all(Batch& batch);

  SetState& set_;
  Session& session_;
  const wire::Pool pool_;
  mutable std::mutex mutex_;  // of what follows; taken after a table's
  std::deque<BatchPtr> batches_;
  uint64_t next_number_ = 1;
  // Per server, of the last round: all that is held is at least as new.
  std::map<uint32_t, wire::Version> versions_;
  // ---- of the push under way ----
  std::vector<ServedKeys> held_;       // by table
  std::vector<wire::HoldRefs> holds_;  // by server
  std::vector<uint64_t> used_;
};

}  // namespace cpudist::client
