// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Asking for batches to come, and taking their rows in. Steps stand in client_prefetch_step.cpp.
#include "client/prefetch.h"

#include <algorithm>
#include <map>
#include <utility>

#include "client/param_set.h"
#include "client/session.h"

namespace cpudist::client {

namespace {

bool in_rounds(const ClientSet& set) { return set.layout.mode == wire::UpdateMode::kRounds; }

// In the order of keys where they are coded.
ServedKeys serve(TableCache& cache, const ClientSet& set, const Session& session,
                 std::span<const int64_t> keys) {
  ServedKeys served;
  served.keys.reserve(keys.size());
  served.offsets.push_back(0);
  cache.split().run(keys);
  for (uint32_t s = 0; s < set.server_count; ++s) {
    for (const uint32_t position : cache.split().positions(s)) {
      served.keys.push_back(keys[position]);
    }
    if (is_coded(set, session, s))
      wire::sort_keys(std::span(served.keys).subspan(served.offsets.back()));
    served.offsets.push_back(served.keys.size());
  }
  return served;
}

// Calls `action` with the ids as what they are.
template <typename Action>
void with_ids(const ComingIds& ids, Action&& action) {
  const auto count = static_cast<size_t>(ids.count);
  if (ids.are_int32) {
    action(std::span(static_cast<const int32_t*>(ids.ids), count));
  } else {
    action(std::span(static_cast<const int64_t*>(ids.ids), count));
  }
}

}  // namespace

Prefetcher::Part* Prefetcher::Batch::find(uint32_t table) {
  const auto found = std::find_if(parts.begin(), parts.end(),
                                  [&](const Part& part) { return part.table == table; });
  return found == parts.end() ? nullptr : &*found;
}

std::vector<Prefetcher::BatchPtr> Prefetcher::batches() const {
  const std::lock_guard lock(mutex_);
  return {batches_.begin(), batches_.end()};
}

// ---- asking -------------------------------------------------------------------------------------

uint64_t Prefetcher::request(ClientSet& set, Session& session, const wire::Pool& pool,
                             std::span<const ComingIds> ids, bool managed, uint64_t* rows) {
  std::map<uint32_t, std::vector<const ComingIds*>> by_table;
  for (const ComingIds& one : ids) {
    set.table(one.table);
    if (one.count > 0) by_table[one.table].push_back(&one);
  }
  const auto batch = std::make_shared<Batch>();
  batch->managed = managed;
  {
    // In the order in which a push takes them. Held until the requests are out: a lookup in another
    // thread that finds a row on its way finds the batch as well.
    std::vector<std::unique_lock<std::mutex>> locks;
    for (const auto& [table, several] : by_table) {
      locks.emplace_back(set.table(table).mutex);
      for (const ComingIds* one : several) {
        with_ids(*one, [&](auto span) { set.table(table).check_ids(span); });
      }
    }
    for (const auto& [table, several] : by_table) {
      TableCache& cache = set.table(table);
      std::vector<int64_t> all;
      std::vector<int64_t> pulled;
      for (const ComingIds* one : several) {
        with_ids(*one, [&](auto span) { cache.take_coming(span, !in_rounds(set), &all, &pulled); });
      }
      *rows += pulled.size();
      Part& part = batch->parts.emplace_back();
      part.table = table;
      part.all = serve(cache, set, session, all);
      part.pulled = serve(cache, set, session, pulled);
      part.rows.resize(set.server_count);
    }
    {
      const std::lock_guard lock(mutex_);
      batch->number = next_number_++;
    }
    try {
      send(set, session, pool, *batch);
    } catch (...) {
      for (const Part& part : batch->parts) set.table(part.table).drop(part.pulled.keys);
      session.give_up(batch->requests);
      throw;
    }
    if (!batch->parts.empty()) {
      const std::lock_guard lock(mutex_);
      batches_.push_back(batch);
    }
  }
  const auto outstanding = batches();
  if (outstanding.size() > kMostBatches) remove(set, session, outstanding.front());
  return batch->number;
}

void Prefetcher::send(ClientSet& set, Session& session, const wire::Pool& pool, Batch& batch) {
  const uint64_t step = set.step_of_pull() == 0 ? 0 : batch.number | wire::kPrefetchBit;
  for (const uint32_t s : session.send_order()) {
    std::vector<wire::TableRef> refs;
    std::vector<std::span<const int64_t>> keys;
    for (const Part& part : batch.parts) {
      const auto own = part.pulled.of(s);
      if (own.empty()) continue;
      refs.push_back(set.ref_of(part.table, own.size()));
      keys.push_back(own);
    }
    if (refs.empty()) continue;
    wire::FilledKeys filled = wire::layout_pull(refs, pool, step);
    for (size_t i = 0; i < keys.size(); ++i) {
      std::copy(keys[i].begin(), keys[i].end(), filled.keys[i]);
    }
    Outbound out = code_pull_for(set, session, s, std::move(filled.payload), false, pool);
    batch.pool = pool;
    batch.requests.push_back(
        session.send(s, wire::FrameKind::kPullRows, set.id, std::move(out.payload), out.coded));
  }
}

uint64_t Prefetcher::next_number() const {
  const std::lock_guard lock(mutex_);
  return next_number_;
}

void Prefetcher::note_version(uint32_t server, wire::Version version) {
  const std::lock_guard lock(mutex_);
  versions_[server] = version;
}

uint64_t Prefetcher::since(uint32_t server) const {
  const std::lock_guard lock(mutex_);
  const auto found = versions_.find(server);
  return found == versions_.end() ? 0 : found->second.round;
}

void Prefetcher::note_hits(ClientSet& set) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [server, version] : versions_) set.note_rows(server, version);
}

void Prefetcher::use(uint64_t number) {
  const std::lock_guard lock(mutex_);
  for (const BatchPtr& batch : batches_) {
    if (batch->number <= number) batch->due = true;
  }
}

void Prefetcher::remove(ClientSet& set, Session& session, const BatchPtr& batch) {
  {
    const std::lock_guard lock(mutex_);
    std::erase(batches_, batch);
  }
  {
    const std::lock_guard batch_lock(batch->mutex);
    batch->failed = true;
    session.give_up(batch->requests);
  }
  // Of rows that another batch holds as well the next lookup pulls those on its own.
  for (const Part& part : batch->parts) {
    TableCache& cache = set.table(part.table);
    const std::lock_guard lock(cache.mutex);
    cache.drop(part.all.keys);
  }
}

void Prefetcher::drop_all(ClientSet& set, Session& session) {
  for (const BatchPtr& batch : batches()) remove(set, session, batch);
}

// ---- taking the rows in -------------------------------------------------------------------------

bool Prefetcher::take_replies(ClientSet& set, Session& session, Batch& batch) {
  const std::lock_guard lock(batch.mutex);
  if (batch.failed) return false;
  if (batch.arrived) return true;
  try {
    session.wait(batch.requests);
    batch.versions.assign(set.server_count, wire::Version(wire::kAnyStaleness));
    for (const RequestPtr& request : batch.requests) {
      const uint32_t s = request->server;
      std::vector<wire::TableRef> refs;
      std::vector<Part*> parts;
      for (Part& part : batch.parts) {
        if (part.pulled.of(s).empty()) continue;
        refs.push_back(set.ref_of(part.table, part.pulled.of(s).size()));
        parts.push_back(&part);
      }
      const auto rows = rows_of_reply(refs, request.get(), batch.pool, &batch.versions[s]);
      for (size_t i = 0; i < parts.size(); ++i) parts[i]->rows[s] = rows[i].data();
    }
  } catch (...) {
    batch.failed = true;  // whoever still wants its rows pulls them
    throw;
  }
  batch.arrived = true;
  return true;
}

// The table's mutex is held, and the replies have come.
void Prefetcher::place(ClientSet& set, Batch& batch, Part& part, bool wanted) {
  TableCache& cache = set.table(part.table);
  for (uint32_t s = 0; s < set.server_count; ++s) {
    const auto keys = part.pulled.of(s);
    if (keys.empty()) continue;
    cache.place(keys, part.rows[s]);
    if (wanted) set.note_rows(s, batch.versions[s]);
  }
  part.placed = true;
  part.used = part.used || wanted;
}

template <typename Id>
void Prefetcher::resolve(ClientSet& set, Session& session, uint32_t table,
                         std::span<const Id> ids) {
  const auto outstanding = batches();
  if (outstanding.empty()) return;
  TableCache& cache = set.table(table);
  cache.check_ids(ids);
  if (cache.want(ids) == 0) return;
  try {
    for (const BatchPtr& batch : outstanding) {
      Part* part = batch->find(table);
      if (part == nullptr || part->placed || !cache.wants_any(part->pulled.keys)) continue;
      if (take_replies(set, session, *batch)) place(set, *batch, *part, true);
    }
  } catch (...) {
    cache.give_up_wanted(ids);
    throw;
  }
  cache.give_up_wanted(ids);  // their batch has failed
}

template void Prefetcher::resolve(ClientSet& set, Session& session, uint32_t table,
                                  std::span<const int32_t> ids);
template void Prefetcher::resolve(ClientSet& set, Session& session, uint32_t table,
                                  std::span<const int64_t> ids);

}  // namespace cpudist::client
