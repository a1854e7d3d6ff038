// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What concerns all parameter sets of a client at once.
#include "client/client.h"

#include <string>
#include <utility>

#include "client/modes.h"

namespace cpudist::client {

namespace {

bool agree(const Shared& shared, const wire::BarrierReply& first,
           const wire::BarrierReply& second) {
  if (first.rounds.size() != second.rounds.size()) return false;
  for (size_t i = 0; i < first.rounds.size(); ++i) {
    const auto& [id, round] = first.rounds[i];
    if (id != second.rounds[i].first) return false;
    const auto set = shared.find(id);
    const bool counted = !set || set->counts_rounds();
    // A trainer that died may have reached only some servers.
    if (counted && round != second.rounds[i].second) return false;
  }
  return true;
}

}  // namespace

Client::Client(ClientOptions options, const ConnectorFactory& make_connector)
    : shared_(std::move(options), make_connector) {}

Client::~Client() {
  shared_.session.disconnect();
  for (const auto& set : shared_.sets()) set->stop_background();
  shared_.release_closed();
}

void Client::connect() { shared_.session.connect(); }

std::shared_ptr<ParamSet> Client::open(const wire::ParamSetLayout& layout,
                                       const CacheLimits& limits) {
  const Shared::Lock lock = shared_.sequence();
  for (const auto& config : layout.configs) {
    if (const char* what = kernels::find_config_error(config)) {
      throw Error(ErrorCode::kInvalidArgument, std::string("open: ") + what);
    }
  }
  auto set = std::make_shared<ParamSet>(shared_, next_set_, layout, membership_of(layout), limits);
  ++next_set_;
  shared_.run_all(
      wire::FrameKind::kOpen, set->id(), [set] { return encode(set->state()->layout); },
      [&shared = shared_, set](std::span<const RequestPtr> replies) {
        set->accept_open(replies);
        shared.add(set);
      });
  return set;
}

void Client::barrier() {
  for (const auto& set : shared_.sets()) set->drain_background();
  const Shared::Lock lock = shared_.sequence();
  shared_.run_all(
      wire::FrameKind::kBarrier, wire::kNoParamSet, [] { return Buffer(); },
      [&shared = shared_](std::span<const RequestPtr> replies) {
        // All trainers have left, so the servers agree unless a round is half applied.
        const auto answer_of = [](const RequestPtr& request) {
          return wire::decode_barrier_reply(request->reply.payload.bytes());
        };
        const wire::BarrierReply reply = answer_of(replies.front());
        for (const RequestPtr& other : replies) {
          if (agree(shared, reply, answer_of(other))) continue;
          throw Error(ErrorCode::kProtocol,
                      "barrier: servers " + std::to_string(replies.front()->server) + " and " +
                          std::to_string(other->server) + " disagree about the round");
        }
        for (const auto& [id, round] : reply.rounds) {
          if (const auto set = shared.find(id)) set->accept_barrier(round);
        }
      });
}

void Client::goodbye() {
  for (const auto& set : shared_.sets()) set->drain_background();
  Session& session = shared_.session;
  // A step that was interrupted may wait for trainers that never come. Death is not goodbye: if it
  // is still in flight after a while, the servers are left without one.
  const Shared::Lock lock = shared_.sequence_last();
  if (std::exchange(said_goodbye_, true)) return;
  try {
    session.drain(session.options().liveness_ms);
    shared_.run_all(
        wire::FrameKind::kGoodbye, wire::kNoParamSet, [] { return Buffer(); },
        [](std::span<const RequestPtr>) {});
  } catch (const Error& error) {
    session.disconnect();
    // A server that got the goodbye may be gone before its answer is here; this trainer has
    // nothing more to ask of it.
    const bool lost =
        error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kCountedLost;
    if (!lost) throw;
    return;
  }
  session.disconnect();
}

void Client::check() const { shared_.session.check(); }

void Client::abort(const std::string& reason) { shared_.session.abort(reason); }

ClientStats Client::stats() const {
  ClientStats stats;
  shared_.add_stats(&stats);
  return stats;
}

std::vector<TableTraffic> Client::table_traffic() const {
  std::vector<TableTraffic> found;
  for (const auto& set : shared_.sets()) {
    for (const auto& table : set->state()->tables) {
      found.push_back({set->id(), table->spec().name, table->bytes_sent, table->bytes_received});
    }
  }
  return found;
}

}  // namespace cpudist::client
