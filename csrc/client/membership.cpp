// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Joining and leaving rounds, and the barrier; docs/mechanisms.md, Rounds.
#include "client/client_impl.h"

namespace cpudist::client {

void Client::Impl::join(const ClientSetPtr& set) {
  if (set->layout.mode == wire::UpdateMode::kOnArrival) {
    run_all(
        wire::FrameKind::kJoin, set->id,
        [] { return encode(wire::Join{wire::JoinStep::kMember, 0}); },
        [set](std::span<const RequestPtr>) { set->member = true; });
    return;
  }
  const auto operation = std::make_shared<Operation>();
  const auto to_server_0 = [this, set](wire::JoinStep step) {
    return std::vector<RequestPtr>{
        session.send(0, wire::FrameKind::kJoin, set->id, encode(wire::Join{step, set->round}))};
  };
  operation->stages.push_back(
      {[=] { return to_server_0(wire::JoinStep::kHold); },
       [set](std::span<const RequestPtr> replies) { set->round = agreed_round(*set, replies); }});
  const auto register_at_others = [this, set] {
    std::vector<RequestPtr> requests;
    for (uint32_t s = 1; s < server_count(); ++s) {
      requests.push_back(session.send(s, wire::FrameKind::kJoin, set->id,
                                      encode(wire::Join{wire::JoinStep::kMember, set->round})));
    }
    return requests;
  };
  operation->stages.push_back({register_at_others, [](std::span<const RequestPtr>) {}});
  operation->stages.push_back({[=] { return to_server_0(wire::JoinStep::kRelease); },
                               [set](std::span<const RequestPtr>) { set->member = true; }});
  drive(operation);
}

void Client::leave(uint32_t param_set) {
  drain(param_set);
  const std::lock_guard lock(impl_->sequenced_mutex);
  impl_->finish_unfinished();
  const ClientSetPtr set = impl_->find(param_set);
  if (!set->member) return;
  set->prefetcher.drop_all(*set, impl_->session);
  impl_->run_all(
      wire::FrameKind::kLeave, param_set, [] { return Buffer(); },
      [set](std::span<const RequestPtr>) { set->member = false; });
}

bool Client::is_member(uint32_t param_set) const { return impl_->find(param_set)->member; }

bool Client::Impl::agree(const wire::BarrierReply& first, const wire::BarrierReply& second) {
  const std::lock_guard lock(sets_mutex);
  if (first.rounds.size() != second.rounds.size()) return false;
  for (size_t i = 0; i < first.rounds.size(); ++i) {
    const auto& [id, round] = first.rounds[i];
    if (id != second.rounds[i].first) return false;
    const auto found = sets.find(id);
    const bool on_arrival =
        found != sets.end() && found->second->layout.mode == wire::UpdateMode::kOnArrival;
    // A trainer that died may have reached only some servers.
    if (!on_arrival && round != second.rounds[i].second) return false;
  }
  return true;
}

void Client::barrier() {
  impl_->drain_queues();
  const std::lock_guard lock(impl_->sequenced_mutex);
  Impl* impl = impl_.get();
  impl->finish_unfinished();
  impl->run_all(
      wire::FrameKind::kBarrier, wire::kNoParamSet, [] { return Buffer(); },
      [impl](std::span<const RequestPtr> replies) {
        // All trainers have left, so the servers agree unless a round is half applied.
        const wire::BarrierReply reply = wire::decode_barrier_reply(payload_of(replies.front()));
        for (const RequestPtr& other : replies) {
          if (impl->agree(reply, wire::decode_barrier_reply(payload_of(other)))) continue;
          throw Error(ErrorCode::kProtocol,
                      "barrier: servers " + std::to_string(replies.front()->server) + " and " +
                          std::to_string(other->server) + " disagree about the round");
        }
        const std::lock_guard sets_lock(impl->sets_mutex);
        for (const auto& [id, round] : reply.rounds) {
          const auto found = impl->sets.find(id);
          if (found == impl->sets.end()) continue;
          found->second->round = round;
          // What was read before may be older than a bound on staleness allows: join() comes first.
          found->second->member = found->second->layout.max_staleness == wire::kAnyStaleness;
          impl->forget_rows(*found->second);
        }
      });
}

}  // namespace cpudist::client
