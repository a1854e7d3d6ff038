// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Sequenced operations: how they run and resume, opening and closing, the step.
#include "client/client.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "client/client_impl.h"
#include "kernels/hash.h"

namespace cpudist::client {

namespace {

constexpr size_t kPoolBytes = 256ull << 20;

}  // namespace

Client::Impl::Impl(ClientOptions options, const ConnectorFactory& make_connector)
    : session(std::move(options), make_connector),
      pool(std::make_shared<BufferPool>(kPoolBytes)),
      owners(kernels::kBucketCount) {
  for (uint32_t b = 0; b < owners.size(); ++b) {
    owners[b] = static_cast<uint16_t>(wire::owner_of_bucket(b, server_count()));
  }
}

ClientSetPtr Client::Impl::find(uint32_t param_set) {
  const std::lock_guard lock(sets_mutex);
  const auto found = sets.find(param_set);
  if (found == sets.end()) {
    throw Error(ErrorCode::kClosed,
                "parameter set " + std::to_string(param_set) + " is not open on this client");
  }
  return found->second;
}

void Client::Impl::drive(const OperationPtr& operation) {
  bool taking_in = false;
  try {
    while (operation->next < operation->stages.size()) {
      const Operation::Stage& stage = operation->stages[operation->next];
      if (!operation->sent) {
        // An operation that failed on one server may still be parked on another.
        session.drain(session.options().round_deadline_ms);
        operation->in_flight = stage.send();
        operation->sent = true;
      }
      session.wait(operation->in_flight);
      taking_in = true;
      stage.receive(operation->in_flight);
      taking_in = false;
      operation->in_flight.clear();
      operation->sent = false;
      ++operation->next;
    }
  } catch (const Error&) {
    // The answers may have come while a signal was handled: they are taken in by the next call.
    if (operation->sent && !taking_in && !session.refused(operation->in_flight)) {
      operation->detached = true;
      unfinished = operation;
      has_unfinished = true;
    }
    throw;
  }
}

void Client::Impl::finish_unfinished() {
  if (!unfinished) return;
  const OperationPtr operation = std::exchange(unfinished, nullptr);
  has_unfinished = false;
  drive(operation);
}

std::vector<RequestPtr> Client::Impl::send_all(wire::FrameKind kind, uint32_t param_set,
                                               const std::function<Buffer()>& payload) {
  std::vector<RequestPtr> requests(server_count());
  for (const uint32_t s : session.send_order()) {
    requests[s] = session.send(s, kind, param_set, payload());
  }
  return requests;
}

void Client::Impl::run_all(wire::FrameKind kind, uint32_t param_set,
                           const std::function<Buffer()>& payload,
                           std::function<void(std::span<const RequestPtr>)> receive) {
  const auto operation = std::make_shared<Operation>();
  operation->stages.push_back(
      {[=, this] { return send_all(kind, param_set, payload); }, std::move(receive)});
  drive(operation);
}

void Client::Impl::finish_round(ClientSet& set, const RoundInFlight& round,
                                std::span<const RequestPtr> replies) {
  std::vector<wire::Version> versions;
  for (const RequestPtr& request : replies) {
    decode_reply(set, request.get(), pool);
    const auto targets = round.detached ? std::span<void* const>() : round.weights;
    versions.push_back(unpack_dense(set, request->reply, targets));
  }
  if (set.layout.trainer_groups.empty()) {
    for (const wire::Version& version : versions) {
      if (version.round == versions.front().round) continue;
      throw Error(ErrorCode::kProtocol, "push: servers disagree about the round: " +
                                            std::to_string(versions.front().round) + " and " +
                                            std::to_string(version.round));
    }
    set.round = versions.front().round;
  } else {
    // Versions count the updates of all groups, which come to each server in an order of its own.
    ++set.round;
    const std::lock_guard lock(sets_mutex);
    group_staleness.count(round.read, versions, round.samples);
  }
  if (round.detached) {
    set.dense_stale = true;
    set.prefetcher.drop_all(set, session);
  } else {
    for (uint32_t s = 0; s < versions.size(); ++s) set.note_dense(s, versions[s]);
  }
  prefetch_refreshed += set.prefetcher.finish_round(set, session, replies);
}

void Client::Impl::check_whole(ClientSet& set) {
  if (set.refused.empty()) return;
  // Until it is known whether the other servers took what one of them refused.
  session.drain(session.options().round_deadline_ms);
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

uint64_t agreed_round(const ClientSet& set, std::span<const RequestPtr> replies) {
  uint64_t agreed = 0;
  if (set.layout.mode == wire::UpdateMode::kOnArrival) return agreed;
  for (size_t i = 0; i < replies.size(); ++i) {
    const uint64_t round = wire::decode_round_reply(payload_of(replies[i])).round;
    if (i > 0 && round != agreed) {
      throw Error(ErrorCode::kProtocol,
                  std::string(name_of(replies[i]->header.kind)) +
                      ": servers disagree about the round: " + std::to_string(agreed) + " and " +
                      std::to_string(round));
    }
    agreed = round;
  }
  return agreed;
}

Client::Client(ClientOptions options, const ConnectorFactory& make_connector)
    : impl_(std::make_unique<Impl>(std::move(options), make_connector)) {}

Client::~Client() {
  impl_->session.disconnect();
  impl_->stop_queues();
}

void Client::connect() { impl_->session.connect(); }

uint32_t Client::open(const wire::ParamSetLayout& layout) {
  const std::lock_guard lock(impl_->sequenced_mutex);
  impl_->finish_unfinished();
  for (const auto& config : layout.configs) {
    if (const char* what = kernels::find_config_error(config)) {
      throw Error(ErrorCode::kInvalidArgument, std::string("open: ") + what);
    }
  }
  const auto set =
      std::make_shared<ClientSet>(impl_->next_set, layout, impl_->owners, impl_->server_count());
  ++impl_->next_set;
  Impl* impl = impl_.get();
  impl->run_all(
      wire::FrameKind::kOpen, set->id, [set] { return encode(set->layout); },
      [impl, set](std::span<const RequestPtr> replies) {
        set->round = agreed_round(*set, replies);
        set->ready = std::all_of(replies.begin(), replies.end(), [](const RequestPtr& reply) {
          return wire::decode_round_reply(payload_of(reply)).ready;
        });
        const std::lock_guard sets_lock(impl->sets_mutex);
        impl->sets.emplace(set->id, set);
      });
  return set->id;
}

bool Client::holds_values(uint32_t param_set) const { return impl_->find(param_set)->ready; }

void Client::ready(uint32_t param_set) {
  const std::lock_guard lock(impl_->sequenced_mutex);
  impl_->finish_unfinished();
  const ClientSetPtr set = impl_->find(param_set);
  impl_->run_all(
      wire::FrameKind::kReady, param_set, [] { return Buffer(); },
      [impl = impl_.get(), set](std::span<const RequestPtr> replies) {
        set->round = agreed_round(*set, replies);
        set->member = true;
        impl->forget_rows(*set);
      });
}

void Client::Impl::forget_rows(ClientSet& set) {
  set.prefetcher.drop_all(set, session);
  set.invalidate_tables();
}

uint64_t Client::push(uint32_t param_set, const StepPush& step) {
  const std::lock_guard lock(impl_->sequenced_mutex);
  Impl* impl = impl_.get();
  impl->finish_unfinished();
  const ClientSetPtr set = impl->find(param_set);
  impl->check_whole(*set);
  if (set->dense_stale) {
    throw Error(ErrorCode::kInvalidArgument,
                "step: an earlier step was interrupted and its round was applied since; this "
                "gradient was computed on values from before it. Call opt.flush(), then compute "
                "the gradient again");
  }
  prepare_push(*set, step);
  set->prefetcher.prepare(*set);
  RoundInFlight round;
  round.weights = step.weights;
  round.samples = step.samples;
  round.read = set->take_read();
  if (!set->member) impl->join(set);

  const auto operation = std::make_shared<Operation>();
  const std::weak_ptr<Operation> self = operation;
  const auto take_in = [impl, set, self, round](std::span<const RequestPtr> replies) mutable {
    const OperationPtr running = self.lock();
    round.detached = !running || running->detached;
    impl->finish_round(*set, round, replies);
  };
  const auto squared_norm = std::make_shared<double>(0.0);
  const bool two_phases = step.clip_norm > 0.0;
  const auto send_push = [impl, set, &step] {
    const bool ordered = orders_rows(*set, impl->session, step.clip_norm > 0.0);
    std::vector<Buffer> payloads = pack_push(*set, step, impl->pool, true, ordered);
    impl->rows_pushed += packed_rows(*set);
    std::vector<RequestPtr> requests(payloads.size());
    for (const uint32_t s : impl->session.send_order()) {
      if (set->residues) set->residues->round(&payloads[s]);
      Outbound out = code_push(*set, impl->session, s, std::move(payloads[s]),
                               set->layout.push_dtype, impl->pool);
      requests[s] =
          impl->session.send(s, wire::FrameKind::kPush, set->id, std::move(out.payload), out.coded);
    }
    return requests;
  };
  const auto add_norms = [squared_norm](std::span<const RequestPtr> replies) {
    // In shard order: every trainer computes the same bits.
    for (const RequestPtr& reply : replies) {
      *squared_norm += wire::decode_push_norm(payload_of(reply)).squared_norm;
    }
  };
  const auto send_commit = [impl, set, squared_norm] {
    const wire::Commit commit{set->round, std::sqrt(*squared_norm)};
    return impl->send_all(wire::FrameKind::kCommit, set->id, [commit] { return encode(commit); });
  };
  if (two_phases) {
    operation->stages = {{send_push, add_norms}, {send_commit, take_in}};
  } else {
    operation->stages = {{send_push, take_in}};
  }
  try {
    impl->drive(operation);
  } catch (const Error&) {
    if (impl->session.refused(operation->in_flight)) set->refused = operation->in_flight;
    throw;
  }
  return set->dense_version(0).round - 1;
}

void Client::close(uint32_t param_set) {
  drain(param_set);
  Impl* impl = impl_.get();
  ClientSetPtr set;
  {
    const std::lock_guard lock(impl->sequenced_mutex);
    impl->finish_unfinished();
    set = impl->find(param_set);
    set->prefetcher.drop_all(*set, impl->session);
    impl->run_all(
        wire::FrameKind::kClose, param_set, [] { return Buffer(); },
        [impl, param_set](std::span<const RequestPtr>) {
          const std::lock_guard sets_lock(impl->sets_mutex);
          impl->sets.erase(param_set);
        });
  }
  impl->stop_queue(*set);
}

void Client::goodbye() {
  impl_->drain_queues();
  const std::lock_guard lock(impl_->sequenced_mutex);
  if (std::exchange(impl_->said_goodbye, true)) return;
  try {
    // A step that was interrupted may wait for trainers that never come. Death is not goodbye: if
    // it is still in flight after a while, the servers are left without one.
    impl_->unfinished.reset();
    impl_->has_unfinished = false;
    impl_->session.drain(impl_->session.options().liveness_ms);
    impl_->run_all(
        wire::FrameKind::kGoodbye, wire::kNoParamSet, [] { return Buffer(); },
        [](std::span<const RequestPtr>) {});
  } catch (const Error& error) {
    impl_->session.disconnect();
    // A server that got the goodbye may be gone before its answer is here; this trainer has
    // nothing more to ask of it.
    if (error.code() != ErrorCode::kPeerLost) throw;
    return;
  }
  impl_->session.disconnect();
}

void Client::check() const { impl_->session.check(); }

void Client::abort(const std::string& reason) { impl_->session.abort(reason); }

ClientStats Client::stats() const {
  ClientStats stats;
  impl_->session.add_stats(&stats);
  stats.rows_pulled = impl_->rows_pulled;
  stats.rows_pushed = impl_->rows_pushed;
  stats.rows_prefetched = impl_->rows_prefetched;
  stats.prefetch_hits = impl_->prefetch_hits;
  stats.prefetch_refreshed = impl_->prefetch_refreshed;
  impl_->add_queue_stats(&stats);
  return stats;
}

}  // namespace cpudist::client
