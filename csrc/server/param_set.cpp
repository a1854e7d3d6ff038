// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one class

#include "server/param_set.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "server/layout/layout_checks.h"
#include "server/replies.h"
#include "server/snapshot/input.h"
#include "server/update/finite.h"
#include "wire/codec/codec.h"
#include "wire/malformed.h"

namespace cpudist::server {

using wire::decode_frame;

ParamSet::ParamSet(uint32_t id, Buffer layout_bytes, uint32_t opener,
                   const std::vector<uint32_t>& active, ServerShared& shared, const Modes& modes)
    : layout_bytes_(std::move(layout_bytes)),
      opener_(opener),
      state_(id, decode_frame([&] { return wire::decode_layout(layout_bytes_.bytes()); }), shared) {
  check_layout(state_.layout, shared.options);
  make_store();
  const std::set<uint32_t> members(active.begin(), active.end());
  for (uint32_t rank = 0; rank < shared.options.trainer_count; ++rank) {
    if (!members.contains(rank)) closed_.insert(rank);
  }
  state_.replies = modes.make_replies(state_, members);
  policy_ = modes.make_policy(state_, members);
}

ParamSet::~ParamSet() { state_.shared.snapshots.forget(state_.id); }

void ParamSet::make_store() {
  const ServerShared& shared = state_.shared;
  const ServerOptions& options = shared.options;
  const wire::ParamSetLayout& layout = state_.layout;
  const auto made = [&](const auto& ahead, const auto& count) {
    return table::make_store(layout, options.shard_id, options.server_count, ahead, count);
  };
  if (shared.memory.limited()) {
    shared.memory.check_layout(state_.id, planned_bytes(made(nullptr, nullptr)),
                               gradients_bytes(layout, options));
  }
  state_.store = made(shared.ahead, shared.memory.count());
  for (const auto& table : state_.store.tables) {
    state_.gone.push_back(table->evicts() ? std::make_shared<GoneKeys>(shared.memory.count())
                                          : nullptr);
  }
}

// ---- who has it ----

void ParamSet::open(const Ticket& ticket, const Buffer& layout_bytes, Outbox& outbox) {
  const auto layout = decode_frame([&] { return wire::decode_layout(layout_bytes.bytes()); });
  const std::unique_lock lock(mutex_);
  check_same_layout(ticket, layout, layout_bytes, outbox);
  if (!state_.shared.sequencer.is_current(ticket)) return;
  policy_->check_open(ticket.rank);
  if (closed_.contains(ticket.rank) || !opened_.insert(ticket.rank).second) {
    throw Error(ErrorCode::kProtocol, "trainer " + std::to_string(ticket.rank) +
                                          " opened parameter set " + std::to_string(state_.id) +
                                          " twice");
  }
  keep_seeds(ticket, layout);
  answer_round(ticket, outbox);
}

bool ParamSet::is_same_layout(const wire::ParamSetLayout& other, const Buffer& layout_bytes) const {
  const auto equals = [this](const Buffer& bytes) {
    return bytes.size() == layout_bytes_.size() &&
           std::memcmp(bytes.data(), layout_bytes_.data(), bytes.size()) == 0;
  };
  if (equals(layout_bytes)) return true;
  if (layout_bytes.size() != layout_bytes_.size()) return false;
  if (other.tables.size() != state_.layout.tables.size()) return false;
  wire::ParamSetLayout seeded = other;
  for (size_t i = 0; i < seeded.tables.size(); ++i) {
    if (seeded.tables[i].remote != state_.layout.tables[i].remote) return false;
    seeded.tables[i].seed = state_.layout.tables[i].seed;
  }
  return equals(encode(seeded));
}

void ParamSet::keep_seeds(const Ticket& ticket, const wire::ParamSetLayout& layout) {
  if (ticket.rank != 0 || has_seeds_) return;
  has_seeds_ = true;
  for (size_t i = 0; i < layout.tables.size(); ++i) {
    state_.store.tables[i]->set_seed(layout.tables[i].seed);
  }
}

void ParamSet::check_same_layout(const Ticket& ticket, const wire::ParamSetLayout& other,
                                 const Buffer& layout_bytes, Outbox& outbox) {
  if (is_same_layout(other, layout_bytes)) return;
  const Error mismatch(ErrorCode::kConfigMismatch,
                       "parameter set " + std::to_string(state_.id) + ": " +
                           describe_difference(state_.layout, other) + " (trainer " +
                           std::to_string(opener_) + " against trainer " +
                           std::to_string(ticket.rank) +
                           "); all trainers must build the same model and optimizer, by the same "
                           "strategy");
  // Nobody is to wait for the one that differs.
  if (!state_.ready || needs_everyone()) {
    state_.broken = mismatch;
    policy_->fail_waiting(mismatch, outbox);
    fail_ready(mismatch, outbox);
    cut_.fail(mismatch, outbox);
  }
  throw mismatch;
}

void ParamSet::fail_ready(const Error& error, Outbox& outbox) {
  for (const auto& [rank, waiting] : waiting_ready_) {
    state_.shared.sequencer.finish(waiting, error, outbox);
  }
  waiting_ready_.clear();
}

void ParamSet::require_open(uint32_t rank) const {
  if (opened_.contains(rank) && !closed_.contains(rank)) return;
  throw Error(ErrorCode::kInvalidArgument, "trainer " + std::to_string(rank) +
                                               " has not opened parameter set " +
                                               std::to_string(state_.id) + ", or has closed it");
}

void ParamSet::require_whole() const {
  if (state_.broken) throw Error(*state_.broken);
  if (!half_loaded_.empty()) throw Error(half_loaded_.begin()->second);
}

void ParamSet::require_ready() const {
  require_whole();
  if (state_.ready) return;
  throw Error(ErrorCode::kInvalidArgument,
              "parameter set " + std::to_string(state_.id) +
                  " is not ready: trainer 0 has not stored all its values yet");
}

void ParamSet::close(const Ticket& ticket, Outbox& outbox) {
  {
    const std::unique_lock lock(mutex_);
    require_open(ticket.rank);
  }
  mark_closed(ticket.rank, outbox);
  state_.shared.sequencer.finish(ticket, encode(wire::RoundReply{round_of(ticket.rank), true}),
                                 outbox);
}

void ParamSet::mark_closed(uint32_t rank, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  closed_.insert(rank);
  state_.replies->forget(rank);
  policy_->forget(rank);
  take_out(rank, outbox);
  cut_.try_now(mutex_, outbox);
  if (rank != 0 || state_.ready) return;
  fail_ready(Error(ErrorCode::kClosed, "trainer 0 closed parameter set " +
                                           std::to_string(state_.id) + " before it was ready"),
             outbox);
}

bool ParamSet::unused(const std::vector<uint32_t>& remaining) const {
  const std::shared_lock lock(mutex_);
  return std::all_of(remaining.begin(), remaining.end(),
                     [this](uint32_t rank) { return closed_.contains(rank); });
}

void ParamSet::leave(const Ticket& ticket, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  take_out(ticket.rank, outbox);
  cut_.try_now(mutex_, outbox);
  policy_->forget(ticket.rank);
  answer_round(ticket, outbox);
}

void ParamSet::remove_member(uint32_t rank, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  take_out(rank, outbox);
  cut_.try_now(mutex_, outbox);
}

void ParamSet::take_out(uint32_t rank, Outbox& outbox) {
  parts_.forget(rank);
  state_.replies->remove_member(rank);
  state_.markers.take_out(rank);
  policy_->take_out(rank, outbox);
}

void ParamSet::join(const Ticket& ticket, const wire::Join& join, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  if (!state_.shared.sequencer.is_current(ticket)) return;
  state_.replies->add_member(ticket.rank);
  state_.markers.join(ticket.rank);
  policy_->join(ticket, join, outbox);
  if (join.step == wire::JoinStep::kCurrent && !needs_everyone()) {
    state_.markers.add(ticket.rank);
  }
}

void ParamSet::reset_members(const std::vector<uint32_t>& ranks) {
  const std::unique_lock lock(mutex_);
  std::set<uint32_t> members;
  for (const uint32_t rank : ranks) {
    if (closed_.contains(rank)) continue;
    members.insert(rank);
    state_.replies->add_member(rank);
    state_.markers.add(rank);
  }
  dropped_.clear();  // what was loaded is all there
  policy_->add_members(members);
}

void ParamSet::lose(uint32_t rank, const Error& error, Outbox& outbox) {
  if (needs_everyone()) {
    fail_waiting(error, outbox);
    return;
  }
  drop(rank, outbox);
  const std::unique_lock lock(mutex_);
  if (rank == 0 && !state_.ready) fail_ready(error, outbox);
}

void ParamSet::fail_waiting(const Error& error, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  policy_->fail_waiting(error, outbox);
  fail_ready(error, outbox);
  cut_.fail(error, outbox);
}

void ParamSet::drop(uint32_t rank, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  waiting_ready_.erase(rank);
  opened_.erase(rank);
  closed_.erase(rank);
  parts_.forget(rank);
  state_.replies->forget(rank);
  state_.markers.drop(rank);
  policy_->drop(rank, outbox);
  cut_.try_now(mutex_, outbox);
}

std::vector<uint32_t> ParamSet::waiting_for(wire::FrameKind kind, uint32_t rank) const {
  const std::shared_lock lock(mutex_);
  if (kind == wire::FrameKind::kReady) return {0};
  if (kind == wire::FrameKind::kCut) return state_.markers.missing();
  return policy_->waiting_for(kind, rank);
}

// ---- stored values ----

void ParamSet::check_storer(const Ticket& ticket) {
  if (ticket.rank == 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              "only trainer 0 stores values, not trainer " + std::to_string(ticket.rank));
}

void ParamSet::store(const Ticket& ticket, const Buffer& payload, Outbox& outbox) {
  check_storer(ticket);
  const wire::StoreView view =
      decode_frame([&] { return wire::decode_store(payload.bytes(), state_.layout); });
  const auto apply = [&] {
    for (const wire::BlockValues& values : view.blocks) {
      state_.store.blocks[values.block]->store(values, state_.version.round);
    }
    for (const wire::TableRows& rows : view.tables) state_.store.tables[rows.table]->store(rows);
  };
  const auto check = [&] {
    check_store(view);
    check_room(view);
  };
  store_values(ticket, payload.size(), check, apply, outbox);
}

void ParamSet::store_run(const Ticket& ticket, const Buffer& payload, Outbox& outbox) {
  check_storer(ticket);
  const wire::RunView run =
      decode_frame([&] { return wire::decode_run(payload.bytes(), state_.layout); });
  table::Table& table = *state_.store.tables[run.ref.table];
  const auto check = [&] {
    table.check(run);
    if (has_to_fit(table)) check_room(table, table.absent(run.ref));
  };
  store_values(ticket, payload.size(), check, [&] { table.store(run); }, outbox);
}

// The rows of other tables have been promised their memory since the set was opened.
bool ParamSet::has_to_fit(const table::Table& table) const {
  return state_.shared.memory.limited() && table.spec().remote;
}

void ParamSet::check_room(const wire::StoreView& view) const {
  for (const wire::TableRows& rows : view.tables) {
    const table::Table& table = *state_.store.tables[rows.table];
    if (has_to_fit(table)) check_room(table, table.absent(rows.keys));
  }
}

void ParamSet::check_room(const table::Table& table, const std::vector<int64_t>& absent) const {
  const RowGrowth growth{
      .table = table.spec().name, .rows = absent.size(), .bytes = table.growth_bytes(absent)};
  // What it counts until then is given back at once: nothing else grows while values are stored.
  static_cast<void>(state_.shared.memory.reserve(growth));
}

void ParamSet::store_values(const Ticket& ticket, uint64_t size_bytes,
                            const std::function<void()>& check, const std::function<void()>& apply,
                            Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  check();
  policy_->values_stored();
  state_.shared.snapshots.forget_bases(state_.id);
  state_.forget_gone();
  try {
    apply();
  } catch (const std::bad_alloc& error) {
    static_cast<void>(state_.break_off(error));  // half of it is stored
    throw;
  }
  stored_bytes_ += size_bytes;
  answer_round(ticket, outbox);
}

void ParamSet::check_store(const wire::StoreView& view) const {
  for (const wire::BlockValues& values : view.blocks) {
    const table::DenseBlock* block = state_.store.blocks[values.block].get();
    if (block != nullptr) continue;
    const wire::BlockSpec& spec = state_.layout.blocks[values.block];
    throw Error(ErrorCode::kInvalidArgument, "block " + spec.name + " belongs to server " +
                                                 std::to_string(spec.shard) + ", not to server " +
                                                 std::to_string(state_.shared.options.shard_id));
  }
  for (const wire::BlockValues& values : view.blocks) {
    state_.store.blocks[values.block]->check(values);
  }
  for (const wire::TableRows& rows : view.tables) state_.store.tables[rows.table]->check(rows);
}

// ---- values of a snapshot ----

void ParamSet::load(const Ticket& ticket, const Buffer& payload, Outbox& outbox) {
  check_storer(ticket);
  const wire::Load load =
      decode_frame([&] { return wire::decode_load(payload.bytes(), state_.layout); });
  if (load.kind != wire::LoadKind::kVersion) {
    load_rows(ticket, load, payload.size(), outbox);
    return;
  }
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  check_load(load, {});
  policy_->values_stored();
  state_.shared.snapshots.forget_bases(state_.id);
  state_.forget_gone();
  state_.set_version(load.version);
  policy_->set_round(load.version.round);
  parts_.clear();
  answer_round(ticket, outbox);
}

void ParamSet::load_rows(const Ticket& ticket, const wire::Load& load, uint64_t size_bytes,
                         Outbox& outbox) {
  const SnapshotWriter& snapshots = state_.shared.snapshots;
  table::Table& table = *state_.store.tables[load.table];
  try {
    // Others read values meanwhile.
    const LoadedRows rows(snapshots.files(), snapshots.directory(), load, table.shape());
    const auto apply = [&] {
      if (load.kind == wire::LoadKind::kReplace) {
        table.clear();
        table.set_seed(load.seed);
        half_loaded_.erase(load.table);
        dropped_.insert(load.table);
      }
      table::RowColumns columns = rows.columns();
      columns.later = static_cast<uint32_t>(state_.version.round - load.version.round);
      table.load(columns);
    };
    store_values(ticket, size_bytes, [&] { check_load(load, rows.columns()); }, apply, outbox);
  } catch (const std::exception& error) {
    note_failed_load(load, error);
    throw;
  }
}

void ParamSet::check_load(const wire::Load& load, const table::RowColumns& rows) const {
  if (policy_->has_pushes()) {
    throw Error(ErrorCode::kInvalidArgument,
                "a snapshot is loaded into parameter set " + std::to_string(state_.id) +
                    " while pushes of trainers wait: load it on all of them, between two steps");
  }
  if (load.kind != wire::LoadKind::kVersion) state_.store.tables[load.table]->check(rows);
}

void ParamSet::note_failed_load(const wire::Load& load, const std::exception& cause) {
  const std::unique_lock lock(mutex_);
  if (!dropped_.contains(load.table)) return;
  half_loaded_.insert_or_assign(
      load.table,
      Error(ErrorCode::kSnapshot, "table " + state_.layout.tables[load.table].name +
                                      ": its rows were dropped, and not all of snapshot " +
                                      load.snapshot + " could be loaded: " + cause.what() +
                                      ". Load a whole snapshot before anything else"));
}

void ParamSet::ready(const Ticket& ticket, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  require_whole();
  if (!state_.shared.sequencer.is_current(ticket)) return;
  if (state_.ready) {
    start(ticket, outbox);
    return;
  }
  if (ticket.rank != 0) {
    if (closed_.contains(0)) {
      throw Error(ErrorCode::kClosed,
                  "trainer 0, whose model gives the initial values, has closed "
                  "parameter set " +
                      std::to_string(state_.id) + " or shut down before it was ready");
    }
    if (const auto lost = state_.shared.peers.find_lost({0})) throw *lost;
    waiting_ready_[ticket.rank] = ticket;
    return;
  }
  check_blocks_stored();
  state_.ready = true;
  start(ticket, outbox);
  for (const auto& [rank, waiting] : waiting_ready_) {
    try {
      start(waiting, outbox);
    } catch (const Error& error) {
      state_.shared.sequencer.finish(waiting, error, outbox);
    }
  }
  waiting_ready_.clear();
}

void ParamSet::check_blocks_stored() const {
  for (const auto& block : state_.store.blocks) {
    if (block == nullptr || block->stored()) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "block " + block->spec().name + " was not stored before ready");
  }
}

void ParamSet::start(const Ticket& ticket, Outbox& outbox) {
  policy_->start(ticket.rank);
  state_.markers.add(ticket.rank);
  state_.replies->follow(ticket.rank);
  answer_round(ticket, outbox);
}

// ---- pushes ----

void ParamSet::decode_push_into(Push* push) const {
  const ServerShared& shared = state_.shared;
  const uint64_t coded_bytes = push->payload.size();
  uint64_t plain_bytes = 0;
  const auto allocate = [&](uint64_t size_bytes) {
    plain_bytes = size_bytes;
    if (!shared.memory.limited()) return Buffer(size_bytes, shared.memory.pool());
    return shared.memory.take(size_bytes, coded_bytes);  // which wait for these
  };
  try {
    wire::Decoded decoded = wire::decode_sections(wire::SectionKind::kPush, push->payload.bytes(),
                                                  state_.layout, allocate);
    push->payload = std::move(decoded.payload);
    push->coding = decoded.coding;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kOverloaded) refuse(plain_bytes);
    throw wire::MalformedFrame(error);
  }
}

void ParamSet::push(const Ticket& ticket, Buffer payload, bool coded, Outbox& outbox) {
  try {
    take_push(ticket, std::move(payload), coded, outbox);
  } catch (const Error& error) {
    give_up(ticket, error, outbox);
    throw;
  }
}

void ParamSet::refuse_push(const Ticket& ticket, uint64_t size_bytes, Outbox& outbox) {
  try {
    refuse(size_bytes);
  } catch (const Error& error) {
    give_up(ticket, error, outbox);
    throw;
  }
}

// Nobody is to wait for a push that can never come.
void ParamSet::give_up(const Ticket& ticket, const Error& error, Outbox& outbox) {
  if (error.code() != ErrorCode::kFull) return;
  const std::unique_lock lock(mutex_);
  uint64_t freed = 0;
  for (const auto& table : state_.store.tables) freed += table->give_up_ahead();
  if (freed > 0) {
    throw Error(ErrorCode::kOverloaded,
                "server " + std::to_string(state_.shared.options.shard_id) + " gives up " +
                    std::to_string(freed) +
                    " bytes that it had made ahead of rows for a push under its "
                    "memory_cap_bytes; send the push again");
  }
  policy_->give_up(ticket.rank, error, outbox);
}

void ParamSet::check_finite(Push* push) const {
  ServerShared& shared = state_.shared;
  // What has no weight is not applied, whatever it is.
  if (shared.options.nonfinite == NonFinite::kApply || push->view.header.weight == 0.0) return;
  std::string found = describe_nonfinite(push->view, state_.layout);
  if (found.empty()) return;
  shared.counters.nonfinite.fetch_add(1);
  if (shared.options.nonfinite == NonFinite::kSkip && !state_.layout.exchanges_deltas) {
    push->view.header.weight = 0;
    push->view.header.samples = 0;
    push->view.blocks.clear();
    push->view.tables.clear();
    return;
  }
  push->nonfinite = "trainer " + std::to_string(push->ticket.rank) + " pushed " + found +
                    ". Server " + std::to_string(shared.options.shard_id) +
                    " applied nothing of it; other servers may have applied theirs. Look at the "
                    "loss and the learning rate, or clip gradients";
  if (!state_.layout.exchanges_deltas) push->nonfinite += "; Server(nonfinite=\"skip\") goes on";
}

void ParamSet::take_push(const Ticket& ticket, Buffer payload, bool coded, Outbox& outbox) {
  ServerShared& shared = state_.shared;
  Push push;
  push.ticket = ticket;
  push.payload = std::move(payload);
  if (coded) decode_push_into(&push);
  push.view = decode_frame([&] { return wire::decode_push(push.payload.bytes(), state_.layout); });
  // As if it had not come: its sender asks, and by then the part has come again.
  const auto found = parts_.complete(state_.layout, shared.options.shard_id, &push);
  if (found == PushParts::Found::kWait) return shared.sequencer.forget(ticket);
  if (found == PushParts::Found::kSendAgain) return shared.sequencer.ask_again(ticket, outbox);
  check_finite(&push);
  const wire::PushHeader& header = push.view.header;
  const uint64_t size_bytes = push.payload.size();
  uint64_t generation = 0;
  {
    // Rows are looked up while others push or pull; records never move.
    const std::shared_lock lock(mutex_);
    generation = state_.store.generation();
    check_push(ticket, header, size_bytes);
    for (const wire::DenseSection& section : push.view.blocks) {
      if (state_.store.blocks[section.block] != nullptr) continue;
      throw Error(
          ErrorCode::kInvalidArgument,
          "push: block " + state_.layout.blocks[section.block].name + " belongs to another server");
    }
    push.sections = locate_rows(push.view, state_.store);
    push.held = locate_held(push.view, state_.store);
  }
  const std::unique_lock lock(mutex_);
  check_push(ticket, header, size_bytes);
  if (!shared.sequencer.is_current(ticket)) return;
  if (generation != state_.store.generation()) {
    throw Error(ErrorCode::kInvalidArgument,
                "push of trainer " + std::to_string(ticket.rank) +
                    " while a snapshot is loaded: load it on all trainers, between two steps");
  }
  shared.counters.pushes.fetch_add(1);
  push.pending = CountedBytes(shared.counters.pending_bytes, size_bytes);
  parts_.taken(ticket.rank, header.round);
  policy_->push(std::move(push), outbox);
  if (state_.broken) cut_.fail(*state_.broken, outbox);
}

void ParamSet::check_push(const Ticket& ticket, const wire::PushHeader& header,
                          uint64_t size_bytes) const {
  require_open(ticket.rank);
  require_ready();
  policy_->check_push(ticket, header);
  const ServerMemory& memory = state_.shared.memory;
  if (memory.fits(size_bytes)) return;
  // What the others wait for takes no more than its time.
  if (memory.ever_fits(size_bytes) && policy_->is_due(ticket.rank)) return;
  refuse(size_bytes);
}

void ParamSet::refuse(uint64_t size_bytes) const {
  state_.shared.memory.refuse(size_bytes, policy_->sends_again());
}

void ParamSet::commit(const Ticket& ticket, const Buffer& payload, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  require_whole();
  policy_->commit(ticket, payload, outbox);
  if (state_.broken) cut_.fail(*state_.broken, outbox);
}

// ---- cuts ----

void ParamSet::check_marker(const Ticket& ticket) const {
  require_open(ticket.rank);
  require_ready();
  if (!needs_everyone()) return;
  // Marked lost before those who wait are told: one of the two is seen.
  if (const auto lost = state_.shared.peers.find_lost()) throw *lost;
}

void ParamSet::cut(const Ticket& ticket, const Buffer& payload, Outbox& outbox) {
  const wire::Cut cut = SetCut::decode(payload);
  if (cut.step == wire::CutStep::kAbandon) {
    wire::CutReply reply;
    {
      const std::unique_lock lock(mutex_);
      require_open(ticket.rank);
      reply = cut_.abandon(ticket.rank, cut.number, outbox);
    }
    state_.shared.snapshots.abandon(state_.id, cut.number);
    state_.shared.sequencer.finish(ticket, encode(reply), outbox);
    return;
  }
  wire::CutReply last;
  {
    const std::shared_lock lock(mutex_);
    last = cut_.last();
  }
  const std::string writing = cut_.still_writing(last);
  const std::unique_lock lock(mutex_);
  check_marker(ticket);
  if (!state_.shared.sequencer.is_current(ticket)) return;
  // It may be waiting for others on another server, whatever this one says.
  if (cut.step == wire::CutStep::kMark) policy_->excuse(ticket.rank, outbox);
  if (cut_.take(ticket, cut, writing, outbox)) cut_.try_now(mutex_, outbox);
}

void ParamSet::take_marker_back(uint32_t rank, uint64_t number, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  cut_.take_back(rank, number, outbox);
}

void ParamSet::give_up_cut(TimePoint now, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  cut_.give_up(now, outbox);
}

std::vector<uint32_t> ParamSet::taking_part() const {
  const std::shared_lock lock(mutex_);
  return state_.markers.members();
}

// ---- reading, and tables as wholes ----

Buffer ParamSet::pull_rows(const wire::FrameHeader& request, const Buffer& payload) const {
  uint64_t step = 0;
  wire::Decoded decoded;
  const auto wanted = decode_frame([&] {
    if (!request.coded) return wire::decode_pull(payload.bytes(), state_.layout, &step);
    decoded = wire::decode_coded_pull(payload.bytes(), state_.layout,
                                      wire::allocate_from(state_.shared.memory.pool()));
    return wire::decode_pull(decoded.payload.bytes(), state_.layout, &step);
  });
  const wire::Coding coding{decoded.coding.reply, decoded.coding.reply};
  const std::shared_lock lock(mutex_);
  require_ready();
  require_averages(step);
  std::vector<wire::TableRef> refs;
  refs.reserve(wanted.size());
  for (const wire::PullTable& pull : wanted) {
    wire::TableRef ref;
    ref.table = pull.table;
    ref.row_count = pull.keys.size();
    ref.dim = state_.layout.tables[pull.table].dim;
    refs.push_back(ref);
  }
  const bool in_place = request.coded && coding.values == wire::WireDType::kFloat32;
  wire::FilledRows reply =
      in_place ? wire::layout_coded_rows(coding, state_.version, refs, state_.shared.memory.pool())
               : wire::layout_rows(state_.version, refs, state_.shared.memory.pool());
  for (size_t i = 0; i < wanted.size(); ++i) {
    const table::Table& table = *state_.store.tables[wanted[i].table];
    if (step == wire::kAverages) {
      table.gather_averages(wanted[i].keys, state_.version.round, reply.rows[i]);
      continue;
    }
    table.gather(wanted[i].keys, reply.rows[i]);
    policy_->note_rows(request, step, wanted[i], coding.values, reply.rows[i]);
  }
  if (in_place || !request.coded) return std::move(reply.payload);
  return code_rows(reply.payload.bytes(), refs, coding, state_.shared.memory.pool());
}

void ParamSet::require_averages(uint64_t step) const {
  if (step != wire::kAverages || state_.layout.average_decay > 0) return;
  throw Error(ErrorCode::kProtocol, "parameter set " + std::to_string(state_.id) +
                                        " keeps no averages, which were asked for");
}

Buffer ParamSet::pull_dense(const wire::FrameHeader& request, const Buffer& payload) const {
  wire::Coding coding;
  const uint64_t step = decode_frame([&] {
    if (!request.coded) return wire::decode_pull_dense(payload.bytes());
    return wire::decode_coded_pull_dense(payload.bytes(), &coding);
  });
  coding.values = coding.reply;
  const std::shared_lock lock(mutex_);
  require_ready();
  require_averages(step);
  Buffer reply =
      step == wire::kAverages ? state_.dense_averages() : state_.dense_values(state_.every_block());
  if (step != wire::kAverages) policy_->note_dense(request, step, coding.values, &reply);
  if (!request.coded) return reply;
  return code_sections(wire::SectionKind::kDense, reply.bytes(), state_.layout, coding,
                       state_.shared.memory.pool());
}

Buffer ParamSet::fetch(const Buffer& payload) const {
  const auto request = decode_frame([&] { return wire::decode_fetch(payload.bytes()); });
  const std::shared_lock lock(mutex_);
  require_ready();
  return state_.fetch(request);
}

Buffer ParamSet::fetch_run(const Buffer& payload) const {
  const auto request =
      decode_frame([&] { return wire::decode_fetch_run(payload.bytes(), state_.layout); });
  const std::shared_lock lock(mutex_);
  require_ready();
  return state_.fetch_run(request);
}

Buffer ParamSet::table_counts(const Buffer& payload) const {
  const auto query = decode_frame([&] { return wire::decode_table_query(payload.bytes()); });
  const std::shared_lock lock(mutex_);
  require_ready();
  return encode(state_.table_counts(query));
}

void ParamSet::add_stats(ServerStats* stats) const {
  const std::shared_lock lock(mutex_);
  stats->marks_bytes += state_.replies->size_bytes();
  policy_->add_stats(stats);
  for (const auto& table : state_.store.tables) {
    stats->rows += table->row_count();
    stats->table_bytes += table->size_bytes();
  }
  for (const auto& block : state_.store.blocks) {
    if (block != nullptr) stats->dense_bytes += block->size_bytes();
  }
}

void ParamSet::add_table_stats(std::vector<TableStats>* tables) const {
  const std::shared_lock lock(mutex_);
  for (const auto& table : state_.store.tables) {
    tables->push_back({state_.id, table->spec().name, table->spec().remote, table->row_count(),
                       table->size_bytes(), table->made_count(), table->admission().dropped_rows(),
                       table->evicted_count(), table->unknown_reads(), table->pushed_rows()});
  }
}

void ParamSet::shrink(const Ticket& ticket, const Buffer& payload, Outbox& outbox) {
  // Looking at them takes a few milliseconds, freeing them some tens.
  constexpr uint64_t kRecords = uint64_t{1} << 18;
  constexpr uint64_t kFreed = uint64_t{1} << 16;
  const auto query = decode_frame([&] { return wire::decode_table_query(payload.bytes()); });
  const auto freeing = [this](const auto& table, auto rows) { policy_->rows_freed(table, rows); };
  wire::Shrunk shrunk;
  uint64_t left = std::numeric_limits<uint64_t>::max();  // of the records that there are now
  while (left > 0) {
    state_.shared.snapshots.wait_for_room();
    const std::unique_lock lock(mutex_);
    require_open(ticket.rank);
    require_ready();
    if (!state_.shared.sequencer.is_current(ticket)) return;
    table::Table& table = state_.table_of(query);
    left = table.evicts() ? std::min(left, table.record_count()) : 0;
    if (left == 0) break;
    const table::Swept swept = state_.sweep(table, std::min(left, kRecords), kFreed, freeing);
    shrunk.evicted += swept.freed.size();
    left -= std::min(left, swept.records);
  }
  state_.shared.sequencer.finish(ticket, encode(shrunk), outbox);
}

}  // namespace cpudist::server
