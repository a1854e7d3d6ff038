// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// long: one class, the life of a batch to come
// Asking for batches to come, taking their rows in, and what becomes of them at the end of a step:
// told to the servers with its push, kept over it, or gone.
#include "client/prefetch.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "client/push/coding.h"
#include "client/session.h"
#include "client/state.h"

namespace cpudist::client {

namespace {

bool in_rounds(const SetState& set) { return set.layout.mode == wire::UpdateMode::kRounds; }

// In the order of keys where they are coded.
ServedKeys serve(TableCache& cache, const SetState& set, const Session& session,
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

}  // namespace

Prefetcher::Prefetcher(SetState& set, Session& session, wire::Pool pool)
    : set_(set), session_(session), pool_(std::move(pool)) {}

Prefetcher::Part* Prefetcher::Batch::find(uint32_t table) {
  const auto found = std::find_if(parts.begin(), parts.end(),
                                  [&](const Part& part) { return part.table == table; });
  return found == parts.end() ? nullptr : &*found;
}

std::vector<Prefetcher::BatchPtr> Prefetcher::batches() const {
  const std::lock_guard lock(mutex_);
  return {batches_.begin(), batches_.end()};
}

uint64_t Prefetcher::remote_bytes(const Batch& batch) const {
  uint64_t size_bytes = 0;
  for (const Part& part : batch.parts) {
    const wire::TableSpec& spec = set_.layout.tables[part.table];
    if (spec.remote) size_bytes += part.pulled.keys.size() * spec.dim * sizeof(float);
  }
  return size_bytes;
}

// ---- asking -------------------------------------------------------------------------------------

uint64_t Prefetcher::request(std::span<const ComingIds> ids, bool managed, uint64_t* rows) {
  IdsByTable by_table;
  for (const ComingIds& one : ids) {
    set_.table(one.table);
    if (one.count > 0) by_table[one.table].push_back(&one);
  }
  const auto batch = std::make_shared<Batch>();
  batch->managed = managed;
  batch->parts.resize(by_table.size());
  {
    // In the order in which a push takes them. Held until the requests are out: a lookup in another
    // thread that finds a row on its way finds the batch as well.
    std::vector<std::unique_lock<std::mutex>> locks;
    for (const auto& [table, several] : by_table) {
      locks.emplace_back(set_.table(table).mutex);
      for (const ComingIds* one : several) {
        with_ids(*one, [&](auto span) { set_.table(table).check_ids(span); });
      }
    }
    try {
      if (!ask(*batch, by_table)) return 0;
      const std::lock_guard lock(mutex_);
      if (!batch->parts.empty()) batches_.push_back(batch);
    } catch (...) {
      unmark(*batch);
      session_.give_up(batch->requests);
      throw;
    }
    for (const Part& part : batch->parts) *rows += part.pulled.keys.size();
  }
  BatchPtr oldest;
  {
    const std::lock_guard lock(mutex_);
    if (batches_.size() > kMostBatches) oldest = batches_.front();
  }
  if (oldest) remove(oldest);
  return batch->number;
}

// With the mutexes of its tables held. False if its rows would take too much memory.
bool Prefetcher::ask(Batch& batch, const IdsByTable& by_table) {
  size_t at = 0;
  for (const auto& [table, several] : by_table) {
    TableCache& cache = set_.table(table);
    Part& part = batch.parts[at++];
    part.table = table;
    size_t most = 0;
    for (const ComingIds* one : several) most += static_cast<size_t>(one->count);
    part.marked.reserve(most);  // no row is marked that is not in it
    std::vector<int64_t> all;
    for (const ComingIds* one : several) {
      with_ids(*one,
               [&](auto span) { cache.take_coming(span, !in_rounds(set_), &all, &part.marked); });
    }
    part.all = serve(cache, set_, session_, all);
    part.pulled = serve(cache, set_, session_, part.marked);
    part.rows.resize(set_.server_count);
  }
  uint64_t coming_bytes = remote_bytes(batch);
  for (const BatchPtr& other : batches()) coming_bytes += remote_bytes(*other);
  if (coming_bytes > set_.cache_budget.limit_bytes) {
    unmark(batch);
    return false;
  }
  for (Part& part : batch.parts) part.marked = {};
  {
    const std::lock_guard lock(mutex_);
    batch.number = next_number_++;
  }
  send(batch);
  return true;
}

// What it has marked as being on its way is not.
void Prefetcher::unmark(const Batch& batch) noexcept {
  for (const Part& part : batch.parts) {
    TableCache& cache = set_.table(part.table);
    cache.drop(part.marked);
    cache.drop(part.pulled.keys);
  }
}

void Prefetcher::send(Batch& batch) {
  const uint64_t step = set_.step_of_pull() == 0 ? 0 : batch.number | wire::kPrefetchBit;
  for (const uint32_t s : session_.send_order()) {
    std::vector<wire::TableRef> refs;
    std::vector<std::span<const int64_t>> keys;
    for (const Part& part : batch.parts) {
      const auto own = part.pulled.of(s);
      if (own.empty()) continue;
      refs.push_back(set_.ref_of(part.table, own.size()));
      keys.push_back(own);
    }
    if (refs.empty()) continue;
    wire::FilledKeys filled = wire::layout_pull(refs, pool_, step);
    for (size_t i = 0; i < keys.size(); ++i) {
      std::copy(keys[i].begin(), keys[i].end(), filled.keys[i]);
    }
    Outbound out = code_pull_for(set_, session_, s, std::move(filled.payload), refs, false, pool_);
    batch.requests.push_back(
        session_.send(s, wire::FrameKind::kPullRows, set_.id, std::move(out.payload), out.coded));
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

void Prefetcher::note_hits() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [server, version] : versions_) set_.note_rows(server, version);
}

void Prefetcher::use(uint64_t number) {
  const std::lock_guard lock(mutex_);
  for (const BatchPtr& batch : batches_) {
    if (batch->number <= number) batch->due = true;
  }
}

void Prefetcher::remove(const BatchPtr& batch) {
  {
    const std::lock_guard lock(mutex_);
    std::erase(batches_, batch);
  }
  {
    const std::lock_guard batch_lock(batch->mutex);
    batch->failed = true;
    session_.give_up(batch->requests);
  }
  // Of rows that another batch holds as well the next lookup pulls those on its own.
  for (const Part& part : batch->parts) {
    TableCache& cache = set_.table(part.table);
    const std::lock_guard lock(cache.mutex);
    cache.drop(part.all.keys);
  }
}

void Prefetcher::drop_all() {
  while (true) {  // without memory of its own
    BatchPtr batch;
    {
      const std::lock_guard lock(mutex_);
      if (batches_.empty()) return;
      batch = batches_.front();
    }
    remove(batch);
  }
}

// ---- taking the rows in -------------------------------------------------------------------------

bool Prefetcher::take_replies(Batch& batch) {
  const std::lock_guard lock(batch.mutex);
  if (batch.failed) return false;
  if (batch.arrived) return true;
  try {
    session_.wait(batch.requests);
    batch.versions.assign(set_.server_count, wire::Version(wire::kAnyStaleness));
    for (const RequestPtr& request : batch.requests) {
      const uint32_t s = request->server;
      std::vector<wire::TableRef> refs;
      std::vector<Part*> parts;
      for (Part& part : batch.parts) {
        if (part.pulled.of(s).empty()) continue;
        refs.push_back(set_.ref_of(part.table, part.pulled.of(s).size()));
        parts.push_back(&part);
      }
      const auto rows = rows_of_reply(set_, refs, request.get(), pool_, &batch.versions[s]);
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
void Prefetcher::place(Batch& batch, Part& part, bool wanted) {
  TableCache& cache = set_.table(part.table);
  for (uint32_t s = 0; s < set_.server_count; ++s) {
    const auto keys = part.pulled.of(s);
    if (keys.empty()) continue;
    cache.place(keys, part.rows[s]);
    if (wanted) set_.note_rows(s, batch.versions[s]);
  }
  part.placed = true;
  part.used = part.used || wanted;
}

template <typename Id>
void Prefetcher::resolve(uint32_t table, std::span<const Id> ids) {
  const auto outstanding = batches();
  if (outstanding.empty()) return;
  TableCache& cache = set_.table(table);
  cache.check_ids(ids);
  if (cache.want(ids) == 0) return;
  try {
    for (const BatchPtr& batch : outstanding) {
      Part* part = batch->find(table);
      if (part == nullptr || part->placed || !cache.wants_any(part->pulled.keys)) continue;
      if (take_replies(*batch)) place(*batch, *part, true);
    }
  } catch (...) {
    cache.give_up_wanted(ids);
    throw;
  }
  cache.give_up_wanted(ids);  // their batch has failed
}

template void Prefetcher::resolve(uint32_t table, std::span<const int32_t> ids);
template void Prefetcher::resolve(uint32_t table, std::span<const int64_t> ids);

// ---- the end of a step --------------------------------------------------------------------------

bool Prefetcher::in_use(const Batch& batch) const {
  return std::any_of(batch.parts.begin(), batch.parts.end(), [&](const Part& part) {
    const std::lock_guard lock(set_.table(part.table).mutex);
    return part.used;
  });
}

bool Prefetcher::has_failed(Batch& batch) {
  const std::lock_guard lock(batch.mutex);
  return batch.failed;
}

bool Prefetcher::has_come(Batch& batch) {
  try {
    {
      const std::lock_guard lock(batch.mutex);
      if (!session_.answered(batch.requests)) return false;
    }
    return take_replies(batch);
  } catch (const std::exception&) {
    return false;
  }
}

bool Prefetcher::all_placed(const Batch& batch) const {
  return std::all_of(batch.parts.begin(), batch.parts.end(), [&](const Part& part) {
    const std::lock_guard lock(set_.table(part.table).mutex);
    return part.placed;
  });
}

// Every row was looked up in this step: it was the batch of this step, unless it has no row that
// the one before did not have.
bool Prefetcher::used_up(const Batch& batch) const {
  bool own_rows = batch.steps > 0;
  for (const Part& part : batch.parts) {
    own_rows = own_rows || !part.pulled.keys.empty();
    TableCache& cache = set_.table(part.table);
    const std::lock_guard lock(cache.mutex);
    if (!cache.all_current(part.all.keys)) return false;
  }
  return own_rows;
}

void Prefetcher::prepare() {
  used_.clear();
  const auto outstanding = batches();
  for (size_t i = outstanding.size(); i-- > 0;) {
    Batch& batch = *outstanding[i];
    batch.told = true;
    const bool later_is_due = i + 1 < outstanding.size() && outstanding[i + 1]->due;
    if (later_is_due || (!batch.managed && used_up(batch))) batch.due = true;
  }
  for (const BatchPtr& batch : outstanding) {
    if (in_use(*batch)) used_.push_back(batch->number);
  }
  gather_held();
}

void Prefetcher::gather_held() {
  held_.assign(set_.tables.size(), {});
  holds_.assign(set_.server_count, {});
  uint64_t kept_from = next_number();
  std::vector<std::vector<int64_t>> keys(set_.tables.size() * set_.server_count);
  for (const BatchPtr& batch : batches()) {
    if (batch->due) continue;
    kept_from = std::min(kept_from, batch->number);
    if (!in_rounds(set_)) continue;
    for (const Part& part : batch->parts) {
      TableCache& cache = set_.table(part.table);
      const std::lock_guard lock(cache.mutex);
      for (uint32_t s = 0; s < set_.server_count; ++s) {
        cache.unite(part.all.of(s), &keys[part.table * set_.server_count + s]);
      }
    }
  }
  for (uint32_t t = 0; t < set_.tables.size(); ++t) {
    held_[t].offsets.push_back(0);
    for (uint32_t s = 0; s < set_.server_count; ++s) {
      const auto& own = keys[t * set_.server_count + s];
      held_[t].keys.insert(held_[t].keys.end(), own.begin(), own.end());
      held_[t].offsets.push_back(held_[t].keys.size());
      if (!own.empty()) holds_[s].tables.push_back(set_.ref_of(t, own.size()));
    }
  }
  const bool compensated = set_.layout.compensation.kind != wire::Compensation::kNone;
  for (uint32_t s = 0; s < set_.server_count; ++s) {
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
bool Prefetcher::place_all(Batch& batch) {
  if (all_placed(batch)) return true;
  if (!has_come(batch)) return false;
  for (Part& part : batch.parts) {
    const std::lock_guard lock(set_.table(part.table).mutex);
    if (!part.placed) place(batch, part, false);
  }
  const std::lock_guard lock(batch.mutex);
  batch.requests.clear();
  return true;
}

uint64_t Prefetcher::finish_round(std::span<const RequestPtr> replies) {
  try {
    return keep_rows(replies);
  } catch (...) {
    // No row is taken for one of the round.
    drop_all();
    set_.invalidate_tables();
    throw;
  }
}

uint64_t Prefetcher::keep_rows(std::span<const RequestPtr> replies) {
  std::vector<BatchPtr> gone;
  std::vector<BatchPtr> kept;
  for (const BatchPtr& batch : batches()) {
    // Also of one that goes: later ones may have left it to ask for rows of theirs. One that was
    // asked for while the push was under way may be of before the round.
    const bool keep = place_all(*batch) && batch->told && !batch->due;
    (keep ? kept : gone).push_back(batch);
  }
  const auto each_part = [&](const auto& action) {
    for (const BatchPtr& batch : kept) {
      for (const Part& part : batch->parts) {
        TableCache& cache = set_.table(part.table);
        const std::lock_guard lock(cache.mutex);
        action(cache, part.all.keys);
      }
    }
  };
  each_part([](TableCache& cache, const auto& keys) { cache.keep(keys); });
  for (const BatchPtr& batch : gone) remove(batch);
  set_.invalidate_tables();
  uint64_t rows = 0;
  for (const RequestPtr& request : replies) {
    const Buffer& payload = request->reply.payload;
    const wire::DenseView view = wire::decode_dense(payload.bytes(), set_.layout);
    note_version(request->server, view.version);
    for (const wire::TableSection& section : view.tables) {
      TableCache& cache = set_.table(section.table);
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

void Prefetcher::finish_push() {
  for (const BatchPtr& batch : batches()) {
    // Rows that a step has used are older than its update; nobody would say when they go.
    const bool begun = !batch->managed && in_use(*batch);
    if (batch->due || has_failed(*batch) || begun) remove(batch);
  }
  for (const BatchPtr& batch : batches()) {
    ++batch->steps;
    for (Part& part : batch->parts) {
      TableCache& cache = set_.table(part.table);
      const std::lock_guard lock(cache.mutex);
      part.placed = part.used = false;
      cache.await(part.pulled.keys);
    }
  }
}

}  // namespace cpudist::client
