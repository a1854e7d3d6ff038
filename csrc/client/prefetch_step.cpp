// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Batches to come and the end of a step: told to the servers with its push, kept over it, or gone.
#include <algorithm>
#include <utility>

#include "client/param_set.h"
#include "client/prefetch.h"
#include "client/session.h"

namespace cpudist::client {

namespace {

bool arrives_in_rounds(const ClientSet& set) {
  return set.layout.mode == wire::UpdateMode::kRounds;
}

}  // namespace

bool Prefetcher::in_use(ClientSet& set, const Batch& batch) {
  return std::any_of(batch.parts.begin(), batch.parts.end(), [&](const Part& part) {
    const std::lock_guard lock(set.table(part.table).mutex);
    return part.used;
  });
}

bool Prefetcher::has_failed(Batch& batch) {
  const std::lock_guard lock(batch.mutex);
  return batch.failed;
}

bool Prefetcher::has_come(ClientSet& set, Session& session, Batch& batch) {
  try {
    {
      const std::lock_guard lock(batch.mutex);
      if (!session.answered(batch.requests)) return false;
    }
    return take_replies(set, session, batch);
  } catch (const Error&) {
    return false;
  }
}

bool Prefetcher::all_placed(ClientSet& set, const Batch& batch) {
  return std::all_of(batch.parts.begin(), batch.parts.end(), [&](const Part& part) {
    const std::lock_guard lock(set.table(part.table).mutex);
    return part.placed;
  });
}

// Every row was looked up in this step: it was the batch of this step, unless it has no row that
// the one before did not have.
bool Prefetcher::used_up(ClientSet& set, Batch& batch) {
  bool own_rows = batch.steps > 0;
  for (const Part& part : batch.parts) {
    own_rows = own_rows || !part.pulled.keys.empty();
    TableCache& cache = set.table(part.table);
    const std::lock_guard lock(cache.mutex);
    if (!cache.all_current(part.all.keys)) return false;
  }
  return own_rows;
}

void Prefetcher::prepare(ClientSet& set) {
  used_.clear();
  const auto outstanding = batches();
  for (size_t i = outstanding.size(); i-- > 0;) {
    Batch& batch = *outstanding[i];
    batch.told = true;
    const bool later_is_due = i + 1 < outstanding.size() && outstanding[i + 1]->due;
    if (later_is_due || (!batch.managed && used_up(set, batch))) batch.due = true;
  }
  for (const BatchPtr& batch : outstanding) {
    if (in_use(set, *batch)) used_.push_back(batch->number);
  }
  gather_held(set);
}

void Prefetcher::gather_held(ClientSet& set) {
  held_.assign(set.tables.size(), {});
  holds_.assign(set.server_count, {});
  uint64_t kept_from = next_number();
  std::vector<std::vector<int64_t>> keys(set.tables.size() * set.server_count);
  for (const BatchPtr& batch : batches()) {
    if (batch->due) continue;
    kept_from = std::min(kept_from, batch->number);
    if (!arrives_in_rounds(set)) continue;
    for (const Part& part : batch->parts) {
      TableCache& cache = set.table(part.table);
      const std::lock_guard lock(cache.mutex);
      for (uint32_t s = 0; s < set.server_count; ++s) {
        cache.unite(part.all.of(s), &keys[part.table * set.server_count + s]);
      }
    }
  }
  for (uint32_t t = 0; t < set.tables.size(); ++t) {
    held_[t].offsets.push_back(0);
    for (uint32_t s = 0; s < set.server_count; ++s) {
      const auto& own = keys[t * set.server_count + s];
      held_[t].keys.insert(held_[t].keys.end(), own.begin(), own.end());
      held_[t].offsets.push_back(held_[t].keys.size());
      if (!own.empty()) holds_[s].tables.push_back(set.ref_of(t, own.size()));
    }
  }
  const bool compensated = set.layout.compensation.kind != wire::Compensation::kNone;
  for (uint32_t s = 0; s < set.server_count; ++s) {
    holds_[s].since = since(s);
    if (!compensated) continue;
    holds_[s].kept_from = kept_from;
    holds_[s].used = used_;
  }
}

const wire::HoldRefs* Prefetcher::holds(uint32_t server) const {
  if (server >= holds_.size()) return nullptr;
  const wire::HoldRefs& holds = holds_[server];
  const bool nothing = holds.tables.empty() && holds.used.empty() && holds.kept_from <= 1;
  return nothing ? nullptr : &holds;
}

// In rounds: what has come for a batch goes into the weight. False if it has not all come.
bool Prefetcher::place_all(ClientSet& set, Session& session, Batch& batch) {
  if (all_placed(set, batch)) return true;
  if (!has_come(set, session, batch)) return false;
  for (Part& part : batch.parts) {
    const std::lock_guard lock(set.table(part.table).mutex);
    if (!part.placed) place(set, batch, part, false);
  }
  const std::lock_guard lock(batch.mutex);
  batch.requests.clear();
  return true;
}

uint64_t Prefetcher::finish_round(ClientSet& set, Session& session,
                                  std::span<const RequestPtr> replies) {
  std::vector<BatchPtr> gone;
  std::vector<BatchPtr> kept;
  for (const BatchPtr& batch : batches()) {
    // Also of one that goes: later ones may have left it to ask for rows of theirs. One that was
    // asked for while the push was under way may be of before the round.
    const bool keep = place_all(set, session, *batch) && batch->told && !batch->due;
    (keep ? kept : gone).push_back(batch);
  }
  const auto each_part = [&](const auto& action) {
    for (const BatchPtr& batch : kept) {
      for (const Part& part : batch->parts) {
        TableCache& cache = set.table(part.table);
        const std::lock_guard lock(cache.mutex);
        action(cache, part.all.keys);
      }
    }
  };
  each_part([](TableCache& cache, const auto& keys) { cache.keep(keys); });
  for (const BatchPtr& batch : gone) remove(set, session, batch);
  set.invalidate_tables();
  uint64_t rows = 0;
  for (const RequestPtr& request : replies) {
    const Buffer& payload = request->reply.payload;
    const wire::DenseView view = wire::decode_dense({payload.data(), payload.size()}, set.layout);
    note_version(request->server, view.version);
    for (const wire::TableSection& section : view.tables) {
      TableCache& cache = set.table(section.table);
      const std::lock_guard lock(cache.mutex);
      cache.overwrite(section.keys, section.rows.data());
      rows += section.keys.size();
    }
  }
  each_part([](TableCache& cache, const auto& keys) { cache.hold(keys); });
  for (const BatchPtr& batch : kept) {
    batch->told = false;
    ++batch->steps;
  }
  return rows;
}

void Prefetcher::finish_push(ClientSet& set, Session& session) {
  for (const BatchPtr& batch : batches()) {
    // Rows that a step has used are older than its update; nobody would say when they go.
    const bool begun = !batch->managed && in_use(set, *batch);
    if (batch->due || has_failed(*batch) || begun) remove(set, session, batch);
  }
  for (const BatchPtr& batch : batches()) {
    ++batch->steps;
    for (Part& part : batch->parts) {
      TableCache& cache = set.table(part.table);
      const std::lock_guard lock(cache.mutex);
      part.placed = part.used = false;
      cache.await(part.pulled.keys);
    }
  }
}

}  // namespace cpudist::client
