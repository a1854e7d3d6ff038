// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The public face of a server, its liveness thread, and the requests that concern all parameter
// sets: barrier, goodbye, loss, stop.

#include "server/server.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/threads.h"
#include "server/server_impl.h"

namespace cpudist::server {
namespace {

ServerOptions checked(ServerOptions options) {
  const auto refuse = [](const char* text) { throw Error(ErrorCode::kInvalidArgument, text); };
  if (options.trainer_count == 0) refuse("a server needs at least one trainer");
  if (options.trainer_count > 0xffffu) refuse("more than 65535 trainers");
  if (options.shard_id >= options.server_count) refuse("shard_id must be below server_count");
  if (options.server_count > 0xffffu) refuse("more than 65535 servers");
  if (options.threads == 0) refuse("a server needs at least one thread");
  if (options.liveness_ms == 0) refuse("liveness_ms must be positive");
  return options;
}

}  // namespace

Server::Impl::Impl(ServerOptions options) : shared(checked(std::move(options))) {
  watcher_ = start_thread("the liveness thread of a server", [this] { watch(); });
}

Server::Impl::~Impl() {
  stop({});
  watcher_.join();
}

void Server::Impl::watch() {
  while (const auto loss = shared.peers.wait_for_loss()) {
    Outbox outbox(shared.options.run_id, shared.options.shard_id);
    lose(loss->rank, loss->error, outbox);
    if (loss->connection) outbox.close(loss->connection, loss->error.what());
    outbox.flush();
  }
}

void Server::Impl::fail_waiting(const Error& error, Outbox& outbox) {
  const std::unique_lock lock(registry_mutex_);
  for (const auto& [id, set] : sets_) set->fail_waiting(error, outbox);
  for (const auto& [rank, ticket] : barrier_) shared.sequencer.finish(ticket, error, outbox);
  barrier_.clear();
}

void Server::Impl::lose(uint32_t rank, const Error& error, Outbox& outbox) {
  const std::unique_lock lock(registry_mutex_);
  // It may be back as a newer incarnation already, which has dropped what the older one left.
  const bool back = !shared.peers.is_lost(rank);
  for (const auto& [id, set] : sets_) {
    if (back && !set->in_rounds()) continue;
    set->lose(rank, error, outbox);
  }
  if (goes_on_without_lost()) {
    if (!back) barrier_.erase(rank);
    try_end_barrier(outbox);
    return;
  }
  for (const auto& [waiting, ticket] : barrier_) shared.sequencer.finish(ticket, error, outbox);
  barrier_.clear();
}

bool Server::Impl::goes_on_without_lost() const {
  return shared.options.elastic && std::none_of(sets_.begin(), sets_.end(), [](const auto& entry) {
           return entry.second->in_rounds();
         });
}

void Server::Impl::stop(const std::string& reason) {
  Outbox outbox(shared.options.run_id, shared.options.shard_id);
  shared.peers.stop(reason, outbox);
  fail_waiting(shared.peers.stopped_error(), outbox);
  outbox.flush();
}

void Server::Impl::barrier(const Ticket& ticket, Outbox& outbox) {
  const std::unique_lock lock(registry_mutex_);
  for (const auto& [id, set] : sets_) set->remove_member(ticket.rank, outbox);
  // Marked lost before the registry is locked to answer those who wait: one of the two is seen.
  const auto lost = shared.peers.find_lost();
  if (lost && !goes_on_without_lost()) throw *lost;
  if (!shared.sequencer.is_current(ticket)) return;
  barrier_[ticket.rank] = ticket;
  try_end_barrier(outbox);
}

void Server::Impl::try_end_barrier(Outbox& outbox) {
  if (barrier_.empty()) return;
  const std::vector<uint32_t> active = shared.peers.active();
  for (const uint32_t rank : active) {
    if (!barrier_.contains(rank)) return;
  }
  for (const auto& [id, set] : sets_) set->reset_members(active);
  for (const auto& [rank, ticket] : barrier_) {
    wire::BarrierReply reply;
    for (const auto& [id, set] : sets_) reply.rounds.emplace_back(id, set->round_of(rank));
    shared.sequencer.finish(ticket, encode(reply), outbox);
  }
  barrier_.clear();
}

void Server::Impl::goodbye(const Ticket& ticket, Outbox& outbox) {
  const std::unique_lock lock(registry_mutex_);
  shared.peers.say_goodbye(ticket.rank);
  for (const auto& [id, set] : sets_) set->mark_closed(ticket.rank, outbox);
  drop_unused();
  try_end_barrier(outbox);
  shared.sequencer.finish(ticket, encode(wire::RoundReply{0}), outbox);
}

void Server::Impl::drop_unused() {
  const std::vector<uint32_t> remaining = shared.peers.remaining();
  std::erase_if(sets_, [&](const auto& entry) { return entry.second->unused(remaining); });
}

ServerStats Server::Impl::stats() const {
  ServerStats stats;
  stats.rounds = shared.counters.rounds.load();
  stats.pushes = shared.counters.pushes.load();
  stats.duplicates = shared.counters.duplicates.load();
  stats.pending_bytes = shared.counters.pending_bytes.load();
  stats.refused = shared.counters.refused.load();
  shared.peers.add_traffic(&stats);
  const std::shared_lock lock(registry_mutex_);
  for (const auto& [id, set] : sets_) set->add_stats(&stats);
  return stats;
}

Server::Server(ServerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}

Server::~Server() = default;

void Server::on_open(const std::shared_ptr<transport::Connection>& connection) {
  impl_->shared.peers.opened(connection);
}

void Server::on_frame(const std::shared_ptr<transport::Connection>& connection, wire::Frame frame) {
  impl_->on_frame(connection, std::move(frame));
}

Buffer Server::payload_memory(const wire::FrameHeader& header,
                              const std::shared_ptr<BufferPool>& pool) {
  const ServerShared& shared = impl_->shared;
  if (shared.options.memory_cap_bytes == 0 || header.kind != wire::FrameKind::kPush) {
    return transport::ConnectionHandler::payload_memory(header, pool);
  }
  auto reservation =
      shared.pushes_memory->reserve(header.length, shared.counters.pending_bytes.load());
  if (!reservation) return Buffer();
  return Buffer(static_cast<size_t>(header.length), shared.pushes_pool, std::move(*reservation));
}

void Server::on_close(const std::shared_ptr<transport::Connection>& connection,
                      const std::string& reason) {
  static_cast<void>(reason);  // the message of a loss says what follows from it
  impl_->shared.peers.closed(connection);
}

bool Server::wait_done(TimePoint deadline) { return impl_->shared.peers.wait_done(deadline); }

void Server::stop(const std::string& reason) { impl_->stop(reason); }

ServerStats Server::stats() const { return impl_->stats(); }

}  // namespace cpudist::server
