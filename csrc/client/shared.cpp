// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How sequenced operations run and resume.
#include "client/shared.h"

#include <utility>

#include "client/param_set.h"
#include "kernels/hash.h"

namespace cpudist::client {

namespace {

constexpr size_t kPoolBytes = 256ull << 20;

class OneStage final : public Operation {
 public:
  OneStage(Shared::Send send, Shared::Receive receive)
      : send_(std::move(send)), receive_(std::move(receive)) {}

 private:
  std::vector<RequestPtr> send(size_t) override { return send_(); }
  void receive(size_t, std::span<const RequestPtr> replies) override { receive_(replies); }

  Shared::Send send_;
  Shared::Receive receive_;
};

}  // namespace

Shared::Shared(ClientOptions options, const ConnectorFactory& make_connector)
    : session(std::move(options), make_connector),
      pool(std::make_shared<BufferPool>(kPoolBytes)),
      owners(kernels::kBucketCount) {
  for (uint32_t b = 0; b < owners.size(); ++b) {
    owners[b] = static_cast<uint16_t>(wire::owner_of_bucket(b, server_count()));
  }
}

Shared::Lock Shared::sequence() {
  Lock lock(sequenced_);
  finish_unfinished();
  return lock;
}

Shared::Lock Shared::sequence_last() {
  Lock lock(sequenced_);
  unfinished_.reset();
  has_unfinished_ = false;
  return lock;
}

void Shared::settle() {
  if (!has_unfinished_) return;
  static_cast<void>(sequence());
}

void Shared::finish_unfinished() {
  if (!unfinished_) return;
  const auto operation = std::exchange(unfinished_, nullptr);
  has_unfinished_ = false;
  drive(operation);
}

void Shared::drive(const std::shared_ptr<Operation>& operation) {
  bool taking_in = false;
  try {
    while (operation->stage_ < operation->stage_count()) {
      if (!operation->sent_) {
        // An operation that failed on one server may still be parked on another.
        session.drain(session.options().round_deadline_ms);
        operation->in_flight_ = operation->send(operation->stage_);
        operation->sent_ = true;
      }
      session.wait(operation->in_flight_);
      taking_in = true;
      operation->receive(operation->stage_, operation->in_flight_);
      taking_in = false;
      operation->in_flight_.clear();
      operation->sent_ = false;
      ++operation->stage_;
    }
  } catch (...) {  // of whatever class: memory may be short, and a signal's handler is foreign
    // The answers may have come while a signal was handled: they are taken in by the next call.
    if (operation->sent_ && !taking_in && !session.refused(operation->in_flight_)) {
      operation->detach();
      unfinished_ = operation;
      has_unfinished_ = true;
    }
    throw;
  }
}

void Shared::run(Send send, Receive receive) {
  drive(std::make_shared<OneStage>(std::move(send), std::move(receive)));
}

std::vector<RequestPtr> Shared::send_all(wire::FrameKind kind, uint32_t param_set,
                                         const std::function<Buffer()>& payload) {
  std::vector<RequestPtr> requests(server_count());
  for (const uint32_t s : session.send_order()) {
    requests[s] = session.send(s, kind, param_set, payload());
  }
  return requests;
}

void Shared::run_all(wire::FrameKind kind, uint32_t param_set, std::function<Buffer()> payload,
                     Receive receive) {
  run([this, kind, param_set,
       payload = std::move(payload)] { return send_all(kind, param_set, payload); },
      std::move(receive));
}

void Shared::add(const std::shared_ptr<ParamSet>& set) {
  const std::lock_guard lock(mutex_);
  sets_.emplace(set->id(), set);
}

void Shared::remove(uint32_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(id);
  if (found == sets_.end()) return;
  closed_.push_back(std::move(found->second));
  sets_.erase(found);
}

void Shared::release_closed() {
  std::vector<std::shared_ptr<ParamSet>> closed;
  {
    const std::lock_guard lock(mutex_);
    std::swap(closed, closed_);
  }
  for (const auto& set : closed) set->stop_background();
}

std::shared_ptr<ParamSet> Shared::find(uint32_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(id);
  return found == sets_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<ParamSet>> Shared::sets() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<ParamSet>> open;
  for (const auto& [id, set] : sets_) open.push_back(set);
  return open;
}

void Shared::count_closed(const ClientStats& stats) {
  const std::lock_guard lock(mutex_);
  closed_stats_.wait_s += stats.wait_s;
  closed_stats_.cache_dropped += stats.cache_dropped;
  closed_stats_.residues_dropped += stats.residues_dropped;
  closed_stats_.early_bytes += stats.early_bytes;
  closed_stats_.early_changed_bytes += stats.early_changed_bytes;
  closed_stats_.staleness.add(stats.staleness);
}

void Shared::count_round(std::span<const wire::Version> read,
                         std::span<const wire::Version> applied, uint64_t samples) {
  const std::lock_guard lock(mutex_);
  group_staleness_.count(read, applied, samples);
}

void Shared::add_stats(ClientStats* stats) const {
  session.add_stats(stats);
  stats->rows_pulled = rows_pulled;
  stats->rows_pushed = rows_pushed;
  stats->rows_prefetched = rows_prefetched;
  stats->prefetch_hits = prefetch_hits;
  stats->prefetch_refreshed = prefetch_refreshed;
  const auto open = sets();
  {
    const std::lock_guard lock(mutex_);
    stats->wait_s += closed_stats_.wait_s;
    stats->cache_dropped += closed_stats_.cache_dropped;
    stats->residues_dropped += closed_stats_.residues_dropped;
    stats->early_bytes += closed_stats_.early_bytes;
    stats->early_changed_bytes += closed_stats_.early_changed_bytes;
    stats->staleness.add(closed_stats_.staleness);
    stats->staleness.add(group_staleness_);
  }
  for (const auto& set : open) set->add_stats(stats);
}

}  // namespace cpudist::client
