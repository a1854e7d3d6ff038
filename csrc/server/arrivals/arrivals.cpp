// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/arrivals/arrivals.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "server/layout/layout_checks.h"
#include "server/replies.h"
#include "wire/codec/values.h"

namespace cpudist::server {

Arrivals::Arrivals(ParamState& state)
    : state_(state),
      update_(state.store, state.shared.updates, state.shared.memory.row_memory()),
      compensator_(make_compensator(state.layout)) {}

uint64_t Arrivals::round_of(uint32_t) const { return state_.version.round; }

std::vector<uint32_t> Arrivals::waiting_for(wire::FrameKind, uint32_t) const {
  std::vector<uint32_t> ranks;
  uint64_t oldest = wire::kAnyStaleness;
  for (const auto& [rank, read] : readers_) {
    if (waiting_.contains(rank) || read > oldest) continue;
    if (read < oldest) ranks.clear();
    oldest = read;
    ranks.push_back(rank);
  }
  return ranks;
}

// ---- who takes part ----

void Arrivals::start(uint32_t rank) {
  if (!bounded()) return;
  // Nobody's gradient may be held for ever: as many readers as the bound has room for.
  const size_t others = readers_.size() + excused_.size();
  if (!read_of(rank) && others > state_.layout.max_staleness) {
    throw Error(ErrorCode::kConfigMismatch,
                "parameter set " + std::to_string(state_.id) +
                    " has max_staleness = " + std::to_string(state_.layout.max_staleness) +
                    ", which " + std::to_string(others) + " trainers use up; trainer " +
                    std::to_string(rank) + " needs a larger one");
  }
  readers_[rank] = state_.version.round;
  excused_.erase(rank);
}

void Arrivals::join(const Ticket& ticket, const wire::Join&, Outbox& outbox) {
  start(ticket.rank);
  state_.answer_round(ticket, state_.version.round, outbox);
}

void Arrivals::take_out(uint32_t rank, Outbox& outbox) {
  readers_.erase(rank);
  excused_.erase(rank);
  apply_due(outbox);
}

void Arrivals::forget(uint32_t rank) {
  if (compensator_) compensator_->forget(rank);
}

void Arrivals::drop(uint32_t rank, Outbox& outbox) {
  forget(rank);
  readers_.erase(rank);
  excused_.erase(rank);
  waiting_.erase(rank);
  apply_due(outbox);  // it may have held others
}

void Arrivals::excuse(uint32_t rank, Outbox& outbox) {
  const auto reader = readers_.find(rank);
  if (reader == readers_.end()) return;
  excused_[rank] = reader->second;
  readers_.erase(reader);
  apply_due(outbox);
}

void Arrivals::fail_waiting(const Error& error, Outbox& outbox) {
  fail_waiting(payload_of(error), outbox);
}

void Arrivals::fail_waiting(const SharedPayload& error, Outbox& outbox) {
  for (const auto& [rank, push] : waiting_) {
    state_.shared.sequencer.finish(push.ticket, wire::FrameKind::kError, Answer(error), outbox);
  }
  waiting_.clear();
}

// ---- updates ----

void Arrivals::check_push(const Ticket& ticket, const wire::PushHeader& header) const {
  if (waiting_.contains(ticket.rank)) {
    throw Error(ErrorCode::kProtocol,
                "push of trainer " + std::to_string(ticket.rank) + " while its last one waits");
  }
  check_configs(state_.layout, header);
  state_.replies->check_push(header);
}

// Gradients are due `max_staleness` updates after their values were read. As long as the k-th of
// them, by due date, has room for the k before it, all can be applied in time; a push is held when
// applying it now would take that room from an earlier one. The earliest never is. Those who are
// excused keep their room, but nobody waits for them.
bool Arrivals::is_due(uint32_t rank) const {
  if (!bounded()) return true;
  const auto own = read_of(rank);
  if (!own) return true;                           // it has left: nobody vouches for what it read
  std::vector<std::pair<uint64_t, bool>> earlier;  // and whether it is waited for
  for (const auto& [reader, read] : readers_) {
    if (read < *own) earlier.emplace_back(read, true);
  }
  for (const auto& [reader, read] : excused_) {
    if (read < *own) earlier.emplace_back(read, false);
  }
  std::sort(earlier.begin(), earlier.end());
  for (size_t k = 0; k < earlier.size(); ++k) {
    // state_.version.round + 1 + k <= read + max_staleness, without an overflow.
    const uint64_t age = state_.version.round + 1 + k - earlier[k].first;
    if (earlier[k].second && age > state_.layout.max_staleness) return false;
  }
  return true;
}

std::optional<uint64_t> Arrivals::read_of(uint32_t rank) const {
  const auto reader = readers_.find(rank);
  if (reader != readers_.end()) return reader->second;
  const auto excused = excused_.find(rank);
  return excused == excused_.end() ? std::nullopt : std::optional(excused->second);
}

void Arrivals::push(Push push, Outbox& outbox) {
  push.held.clear();  // only in rounds does a reply bring rows
  const uint32_t rank = push.ticket.rank;
  waiting_.emplace(rank, std::move(push));
  try {
    apply_due(outbox);
  } catch (...) {  // there was no memory to see who is due
    waiting_.erase(rank);
    throw;
  }
}

void Arrivals::commit(const Ticket& ticket, const Buffer&, Outbox&) {
  throw Error(ErrorCode::kProtocol, "commit of trainer " + std::to_string(ticket.rank) +
                                        " in a set that is updated on arrival");
}

void Arrivals::apply_due(Outbox& outbox) {
  while (!state_.broken) {
    const auto read_at = [this](uint32_t rank) { return read_of(rank).value_or(0); };
    auto next = waiting_.end();
    for (auto entry = waiting_.begin(); entry != waiting_.end(); ++entry) {
      if (!is_due(entry->first)) continue;
      if (next == waiting_.end() || read_at(entry->first) < read_at(next->first)) next = entry;
    }
    if (next == waiting_.end()) return;
    apply(next->first, outbox);
  }
}

void Arrivals::apply(uint32_t rank, Outbox& outbox) {
  Pushes one;
  one.insert(waiting_.extract(rank));
  Push& push = one.begin()->second;
  push.pending.release();
  if (!prepare(one, outbox)) return;
  try {
    update_.apply(one, state_.version.round, compensator_.get());
    state_.count_update(one);
    if (read_of(rank)) readers_[rank] = state_.version.round;
    excused_.erase(rank);
    state_.sweep(one, [this](const auto& table, auto rows) { rows_freed(table, rows); });
    state_.replies->note(one);
    const auto blocks =
        push.view.header.want_dense ? state_.every_block() : std::vector<uint32_t>();
    const Answer answer = compensator_ ? compensated_answer(push, blocks)
                                       : state_.replies->answers(one, blocks).at(rank);
    state_.shared.sequencer.finish(push.ticket, wire::FrameKind::kReply, answer, outbox);
  } catch (const std::exception& error) {
    const SharedPayload broken = state_.break_off(error);
    state_.shared.sequencer.finish(push.ticket, wire::FrameKind::kError, Answer(broken), outbox);
    fail_waiting(broken, outbox);
  }
}

// All that may want memory before a value changes. False where the push cannot be applied: its
// sender is told, and may send it again where there was no memory.
bool Arrivals::prepare(Pushes& one, Outbox& outbox) {
  const auto& [rank, push] = *one.begin();
  Sequencer& sequencer = state_.shared.sequencer;
  try {
    if (!push.nonfinite.empty()) {
      sequencer.finish(push.ticket, Error(ErrorCode::kNonFinite, push.nonfinite), outbox);
      return false;
    }
    try {
      update_.prepare(one, compensator_ != nullptr);
      if (compensator_) compensator_->begin(rank, push.view, state_.store);
      return true;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kFull || error.code() == ErrorCode::kTableFull) {
        sequencer.finish(push.ticket, error, outbox);
      } else {
        sequencer.reject(push.ticket, state_.refusal(error), outbox);
      }
    }
  } catch (const std::bad_alloc& error) {
    sequencer.reject(push.ticket, state_.refusal(error), outbox);
  }
  return false;
}

// ---- delay compensation ----

// What is kept of a reply is what its receiver reads.
Answer Arrivals::compensated_answer(const Push& push, const std::vector<uint32_t>& blocks) {
  Buffer values = state_.dense_values(blocks);
  if (push.coding) round_dense(&values, push.coding->reply);
  const auto reply = std::make_shared<const Buffer>(std::move(values));
  compensator_->end();
  if (!blocks.empty()) {
    compensator_->note_dense_reply(push.ticket.rank, state_.version.round, *reply);
  }
  ParamState::CodedForms forms;
  return state_.form_of(reply, wire::SectionKind::kDense, push, &forms);
}

void Arrivals::round_dense(Buffer* plain, wire::WireDType dtype) const {
  if (dtype == wire::WireDType::kFloat32) return;
  const wire::DenseView view = wire::decode_dense(plain->bytes(), state_.layout);
  for (const wire::DenseSection& section : view.blocks) {
    const wire::BlockSpec& spec = state_.layout.blocks[section.block];
    if (spec.dtype == wire::DType::kFloat64) continue;
    uint8_t* values = plain->data() + (section.values.data() - plain->data());
    round_block(dtype, reinterpret_cast<float*>(values), spec.elements);
  }
}

void Arrivals::values_stored() {
  if (compensator_) compensator_->forget_all();  // what moved is not what gradients moved
}

void Arrivals::rows_freed(const table::Table& table, std::span<const table::Freed> rows) {
  if (compensator_) compensator_->forget_rows(table, rows);
}

// Who reads has read none of what was loaded, and begins anew with it.
void Arrivals::set_round(uint64_t round) {
  for (auto& [rank, read] : readers_) read = round;
}

void Arrivals::note_rows(const wire::FrameHeader& request, uint64_t step,
                         const wire::PullTable& pull, wire::WireDType dtype, float* rows) const {
  if (!compensator_) return;
  round_rows(dtype, rows, pull.keys.size(), state_.layout.tables[pull.table].dim);
  compensator_->note_rows(request.rank, step, request.request_id, pull, rows);
}

void Arrivals::note_dense(const wire::FrameHeader& request, uint64_t step, wire::WireDType dtype,
                          Buffer* values) const {
  if (!compensator_) return;
  round_dense(values, dtype);
  compensator_->note_dense_pull(request.rank, step, request.request_id, state_.version.round,
                                *values);
}

void Arrivals::add_stats(ServerStats* stats) const {
  if (compensator_) stats->backup_bytes += compensator_->size_bytes();
}

}  // namespace cpudist::server
