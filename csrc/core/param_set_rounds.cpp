// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Pushes and commits of a parameter set. The thread that completes a round applies it.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "core/param_set.h"

namespace cpudist::core {
void ParamSet::push(const Ticket& ticket, Buffer payload, Outbox& outbox) {
  RoundPush push;
  push.ticket = ticket;
  push.payload = std::move(payload);
  push.view = decode_frame([&] { return decode_push(bytes_of(push.payload), layout_); });
  const PushHeader& header = push.view.header;
  const uint64_t size_bytes = push.payload.size();
  {
    // Rows are looked up while others push or pull; records never move.
    const std::shared_lock lock(mutex_);
    check_push(ticket, header, size_bytes);
    for (const DenseSection& section : push.view.blocks) {
      if (store_.blocks[section.block] != nullptr) continue;
      throw Error(ErrorCode::kInvalidArgument, "push: block " + layout_.blocks[section.block].name +
                                                   " belongs to another server");
    }
    push.sections = locate_rows(push.view, store_);
  }
  const std::unique_lock lock(mutex_);
  check_push(ticket, header, size_bytes);
  if (!shared_.peers.is_current(ticket)) return;
  const bool early = !on_arrival() && joining_.contains(ticket.rank);  // its round is the next one
  (early ? early_ : pushes_).emplace(ticket.rank, std::move(push));
  shared_.counters.pushes.fetch_add(1);
  shared_.counters.pending_bytes.fetch_add(size_bytes);
  if (!early) try_complete(outbox);
}

void ParamSet::check_push(const Ticket& ticket, const PushHeader& header,
                          uint64_t size_bytes) const {
  require_open(ticket.rank);
  require_ready();
  const auto joining = joining_.find(ticket.rank);
  const bool early = joining != joining_.end() && joining->second == header.round;
  if (on_arrival()) {
    if (pushes_.contains(ticket.rank)) {
      throw Error(ErrorCode::kProtocol,
                  "push of trainer " + std::to_string(ticket.rank) + " while its last one waits");
    }
  } else if (!early && !members_.contains(ticket.rank)) {
    throw Error(ErrorCode::kProtocol, "push of trainer " + std::to_string(ticket.rank) +
                                          ", which is not a member of round " +
                                          std::to_string(round_));
  }
  if (!on_arrival() && !early && (header.round != round_ || pushes_.contains(ticket.rank))) {
    throw Error(ErrorCode::kProtocol,
                "push of trainer " + std::to_string(ticket.rank) + " for round " +
                    std::to_string(header.round) + ", but the current one is " +
                    std::to_string(round_) +
                    (pushes_.contains(ticket.rank) ? ", already pushed" : ""));
  }
  check_configs(header);
  if (!on_arrival()) require_not_lost();
  const uint64_t waiting = shared_.counters.pending_bytes.load();
  const uint64_t cap = shared_.options.memory_cap_bytes;
  if (cap == 0 || (size_bytes <= cap && waiting <= cap - size_bytes)) return;
  // What the others wait for takes no more than its time.
  if (on_arrival() && size_bytes <= cap && may_apply(ticket.rank)) return;
  refuse_push(size_bytes);
}

void ParamSet::refuse_push(uint64_t size_bytes) const {
  const uint64_t cap = shared_.options.memory_cap_bytes;
  const std::string limit = "memory_cap_bytes = " + std::to_string(cap) +
                            "; set CPUDIST_SERVER_MEMORY_CAP_BYTES higher, or to 0";
  const std::string server = "server " + std::to_string(shared_.options.shard_id);
  // The queue of a trainer sends again what is refused as overload.
  if (on_arrival() && size_bytes > cap) {
    throw Error(ErrorCode::kInvalidArgument,
                "a push of " + std::to_string(size_bytes) + " bytes never fits on " + server +
                    ": it exceeds " + limit + ", or merge fewer steps");
  }
  const uint64_t held =
      std::max(shared_.counters.pending_bytes.load(), shared_.pushes_memory->used_bytes());
  throw Error(ErrorCode::kOverloaded,
              "pushes that come in or wait hold " + std::to_string(held) + " bytes on " + server +
                  "; with " + std::to_string(size_bytes) + " more they exceed " + limit);
}

void ParamSet::check_configs(const PushHeader& header) const {
  for (size_t group = 0; group < header.configs.size(); ++group) {
    const kernels::OptimizerConfig& opened = layout_.configs[group];
    const kernels::OptimizerConfig& now = header.configs[group];
    const std::string where = "push: parameter group " + std::to_string(group) + ", ";
    if (now.kind != opened.kind ||
        kernels::state_elements(now, 4, 4) != kernels::state_elements(opened, 4, 4)) {
      throw Error(ErrorCode::kConfigMismatch,
                  where + describe_difference(opened, now) +
                      " (opened against pushed): the optimizer's state cannot change its shape");
    }
  }
}

bool ParamSet::complete() const {
  return holders_.empty() && !pushes_.empty() && missing().empty();
}

void ParamSet::try_complete(Outbox& outbox) {
  if (on_arrival()) {
    apply_arrivals(outbox);
    return;
  }
  if (phase_ == Phase::kCommit) {
    if (!holders_.empty() || waiting_commits_.empty()) return;
    apply_commit(waiting_commits_.begin()->second.total_norm, outbox);
    return;
  }
  if (!complete()) return;
  if (const auto mismatch = find_mismatch(pushes_)) {
    fail_round(
        Error(ErrorCode::kConfigMismatch, "round " + std::to_string(round_) + ": " + *mismatch),
        outbox);
    return;
  }
  try {
    if (pushes_.begin()->second.view.header.clip_norm > 0.0) {
      begin_commit(outbox);
      return;
    }
    if (!RoundUpdate::is_void(pushes_)) update_.apply(pushes_, round_);
    end_round(outbox);
  } catch (const std::exception& error) {
    break_set(error, outbox);
  }
}

void ParamSet::begin_commit(Outbox& outbox) {
  const double squared_norm = RoundUpdate::is_void(pushes_) ? 0.0 : update_.merge(pushes_);
  phase_ = Phase::kCommit;
  for (const auto& [rank, push] : pushes_) {
    shared_.peers.finish(push.ticket, encode(PushNorm{round_, squared_norm}), outbox);
  }
}

void ParamSet::commit(const Ticket& ticket, const Commit& commit, Outbox& outbox) {
  const std::unique_lock lock(mutex_);
  require_open(ticket.rank);
  require_whole();
  const std::string who = "commit of trainer " + std::to_string(ticket.rank);
  const auto check_norm = [&](double expected) {
    if (commit.total_norm == expected || (std::isnan(commit.total_norm) && std::isnan(expected))) {
      return;
    }
    throw Error(ErrorCode::kProtocol, who + ": norm " + std::to_string(commit.total_norm) +
                                          ", another trainer's is " + std::to_string(expected));
  };
  if (commit.round + 1 == round_ && committed_.reply != nullptr &&
      committed_.round == commit.round && committed_.ranks.contains(ticket.rank)) {
    check_norm(committed_.total_norm);
    committed_.ranks.erase(ticket.rank);
    shared_.peers.finish(ticket, FrameKind::kReply, committed_.reply, outbox);
    return;
  }
  if (phase_ != Phase::kCommit || commit.round != round_ || !pushes_.contains(ticket.rank)) {
    throw Error(ErrorCode::kProtocol, who + " for round " + std::to_string(commit.round) +
                                          ", which waits for none: the current one is " +
                                          std::to_string(round_));
  }
  if (!waiting_commits_.empty()) check_norm(waiting_commits_.begin()->second.total_norm);
  if (!shared_.peers.is_current(ticket)) return;
  waiting_commits_[ticket.rank] = {ticket, commit.total_norm};
  try_complete(outbox);
}

void ParamSet::apply_commit(double total_norm, Outbox& outbox) {
  try {
    if (!RoundUpdate::is_void(pushes_)) update_.apply_merged(pushes_, total_norm, round_);
  } catch (const std::exception& error) {
    break_set(error, outbox);
    return;
  }
  committed_ = {};
  committed_.round = round_;
  committed_.total_norm = total_norm;
  for (const auto& [rank, push] : pushes_) committed_.ranks.insert(rank);
  end_round(outbox);
}

void ParamSet::end_round(Outbox& outbox) {
  const bool nothing = RoundUpdate::is_void(pushes_);
  ++round_;
  for (const auto& [rank, push] : pushes_) samples_ += push.view.header.samples;
  shared_.counters.rounds.fetch_add(1);
  const SharedPayload reply =
      dense_reply(nothing ? std::vector<uint32_t>{} : update_.touched_blocks());
  if (phase_ == Phase::kCommit) {
    committed_.reply = reply;
    for (const auto& [rank, waiting] : waiting_commits_) {
      committed_.ranks.erase(rank);
      shared_.peers.finish(waiting.ticket, FrameKind::kReply, reply, outbox);
    }
    waiting_commits_.clear();
  } else {
    for (const auto& [rank, push] : pushes_) {
      shared_.peers.finish(push.ticket, FrameKind::kReply, reply, outbox);
    }
  }
  clear_pushes();
  phase_ = Phase::kCollect;
  promote();
  advance_if_empty();
  try_complete(outbox);  // with the early pushes of those who have just become members
}

void ParamSet::break_set(const std::exception& cause, Outbox& outbox) {
  broken_ = Error(ErrorCode::kInternal,
                  "applying round " + std::to_string(round_) + " failed half way on server " +
                      std::to_string(shared_.options.shard_id) + ": " + cause.what() +
                      "; its values cannot be used any more. Start again");
  for (const auto& [rank, waiting] : waiting_commits_) {
    shared_.peers.finish(waiting.ticket, *broken_, outbox);
  }
  waiting_commits_.clear();
  phase_ = Phase::kCollect;
  fail_round(*broken_, outbox);
}

void ParamSet::fail_round(const Error& error, Outbox& outbox) {
  for (const auto& [rank, push] : pushes_) shared_.peers.finish(push.ticket, error, outbox);
  clear_pushes();
}

void ParamSet::clear_pushes() {
  uint64_t size_bytes = 0;
  for (const auto& [rank, push] : pushes_) size_bytes += push.payload.size();
  shared_.counters.pending_bytes.fetch_sub(size_bytes);
  pushes_.clear();
}

SharedPayload ParamSet::dense_reply(const std::vector<uint32_t>& blocks) const {
  std::vector<BlockRef> refs;
  refs.reserve(blocks.size());
  for (const uint32_t block : blocks) {
    BlockRef ref;
    ref.block = block;
    ref.size_bytes = store_.blocks[block]->weight().size();
    refs.push_back(ref);
  }
  FilledPush reply = layout_dense(version(), refs, shared_.pool);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto weight = store_.blocks[blocks[i]]->weight();
    if (!weight.empty()) std::memcpy(reply.blocks[i], weight.data(), weight.size());
  }
  return std::make_shared<const Buffer>(std::move(reply.payload));
}

}  // namespace cpudist::core
