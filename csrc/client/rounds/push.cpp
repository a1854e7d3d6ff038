// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/rounds/push.h"

#include <cmath>
#include <string>
#include <utility>

#include "client/push/coding.h"
#include "client/push/packing.h"

namespace cpudist::client {

RoundPush::RoundPush(Shared& shared, std::shared_ptr<SetState> set,
                     std::shared_ptr<Prefetcher> prefetcher, const StepPush& step,
                     std::vector<wire::Version> read)
    : shared_(shared),
      set_(std::move(set)),
      prefetcher_(std::move(prefetcher)),
      clips_norm_(step.clip_norm > 0.0),
      samples_(step.samples),
      read_(std::move(read)),
      step_(&step),
      weights_(step.weights),
      squared_norms_(step.clip_each ? set_->tensor_count() : 1) {}

std::vector<RequestPtr> RoundPush::send(size_t stage) {
  return stage == 0 ? send_push() : send_commit();
}

void RoundPush::receive(size_t stage, std::span<const RequestPtr> replies) {
  const auto of_push = replies.last(shared_.server_count());
  stage + 1 == stage_count() ? finish_round(of_push) : add_norms(of_push);
}

void RoundPush::detach() {
  detached_ = true;
  weights_ = {};
}

std::vector<RequestPtr> RoundPush::send_push() {
  const StepPush& step = *std::exchange(step_, nullptr);
  Session& session = shared_.session;
  set_->early.drop_refused(session);
  const bool ordered = orders_rows(*set_, session, clips_norm_);
  std::vector<Buffer> payloads =
      pack_push(*set_, step, shared_.pool, prefetcher_.get(), true, ordered);
  shared_.rows_pushed += packed_rows(*set_);
  // Parts stand before the push: where both have to go again they go first.
  std::vector<RequestPtr> requests = set_->early.take(set_->round);
  const size_t parts = requests.size();
  requests.resize(parts + payloads.size());
  if (set_->residues) set_->residues_dropped += set_->residues->begin();
  for (const uint32_t s : session.send_order()) {
    if (set_->residues) set_->residues->round(&payloads[s]);
    Outbound out =
        code_push(*set_, session, s, std::move(payloads[s]), set_->layout.push_dtype, shared_.pool);
    requests[parts + s] =
        session.send(s, wire::FrameKind::kPush, set_->id, std::move(out.payload), out.coded);
  }
  return requests;
}

void RoundPush::add_norms(std::span<const RequestPtr> replies) {
  // In shard order: every trainer computes the same bits.
  for (const RequestPtr& reply : replies) {
    const auto told = wire::decode_push_norm(reply->reply.payload.bytes(), squared_norms_.size());
    for (size_t i = 0; i < squared_norms_.size(); ++i) squared_norms_[i] += told.squared_norms[i];
  }
}

std::vector<RequestPtr> RoundPush::send_commit() {
  wire::Commit commit{set_->round, {}};
  for (const double squared : squared_norms_) commit.norms.push_back(std::sqrt(squared));
  return shared_.send_all(wire::FrameKind::kCommit, set_->id, [&] { return encode(commit); });
}

void RoundPush::finish_round(std::span<const RequestPtr> replies) {
  std::vector<wire::Version> versions;
  uint64_t cut_wanted = 0;  // the same for all of the group, whose replies are the same
  for (const RequestPtr& request : replies) {
    decode_reply(*set_, wire::SectionKind::kDense, request.get(), shared_.pool);
    versions.push_back(unpack_dense(*set_, request->reply, weights_, &cut_wanted));
  }
  set_->cut_wanted = cut_wanted;
  if (set_->layout.trainer_groups.empty()) {
    for (const wire::Version& version : versions) {
      if (version.round == versions.front().round) continue;
      throw Error(ErrorCode::kProtocol, "push: servers disagree about the round: " +
                                            std::to_string(versions.front().round) + " and " +
                                            std::to_string(version.round));
    }
    set_->round = versions.front().round;
  } else {
    // Versions count the updates of all groups, which come to each server in an order of its own.
    ++set_->round;
    shared_.count_round(read_, versions, samples_);
  }
  if (detached_) {
    set_->dense_stale = true;
    prefetcher_->drop_all();
  } else {
    for (uint32_t s = 0; s < versions.size(); ++s) set_->note_dense(s, versions[s]);
  }
  shared_.prefetch_refreshed += prefetcher_->finish_round(replies);
}

void check_whole(Shared& shared, SetState& set) {
  if (set.refused.empty()) return;
  // Until it is known whether the other servers took what one of them refused.
  shared.session.drain(shared.session.options().round_deadline_ms);
  const auto by_server = [](const RequestPtr& request) {
    return " server " + std::to_string(request->server);
  };
  std::string taken;
  std::string refused;
  for (const RequestPtr& request : set.refused) {
    (request->error ? refused : taken) += by_server(request);
  }
  if (taken.empty()) {
    set.refused.clear();
    return;
  }
  throw Error(ErrorCode::kClosed, "round " + std::to_string(set.round) + " was taken by" + taken +
                                      " but refused by" + refused +
                                      "; the servers no longer hold one model. Start again");
}

}  // namespace cpudist::client
