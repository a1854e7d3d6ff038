// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data/shuffle/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/threads.h"
#include "data/shuffle/impl.h"
#include "kernels/hash.h"
#include "wire/primitives.h"

namespace cpudist::data {

using std::chrono::milliseconds;
using wire::FrameKind;

namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;
constexpr auto kWaitSlice = milliseconds(50);  // between two questions for a signal

uint64_t record_hash(const uint64_t* record) {
  uint64_t hash = kGolden;
  for (size_t i = 0; i < record_words(record); ++i) hash = kernels::mix64(hash ^ record[i]) + i;
  return hash;
}

}  // namespace

uint32_t destination(uint64_t seed, uint64_t key, uint32_t trainers) {
  // The upper half of a product is uniform once the few products that would make some values one
  // more frequent are drawn again (Lemire 2019).
  uint64_t random = kernels::mix64(key ^ kernels::mix64(seed + kGolden));
  const uint64_t surplus = -uint64_t{trainers} % trainers;
  for (;;) {
    const auto product = static_cast<unsigned __int128>(random) * trainers;
    if (static_cast<uint64_t>(product) >= surplus) return static_cast<uint32_t>(product >> 64);
    random = kernels::mix64(random + kGolden);
  }
}

void ShuffleTotals::add(const uint64_t* record) {
  ++records;
  words += record_words(record);
  checksum += record_hash(record);
}

void ShuffleTotals::add(const ShuffleTotals& other) {
  records += other.records;
  words += other.words;
  checksum += other.checksum;
}

ShuffleExchange::ShuffleExchange(Schema schema, ShuffleOptions options, ShuffleSink sink)
    : impl_(std::make_unique<Impl>(std::move(schema), std::move(options), std::move(sink))) {}

ShuffleExchange::~ShuffleExchange() = default;

transport::ConnectionHandler* ShuffleExchange::handler() { return impl_.get(); }

void ShuffleExchange::connect(std::vector<std::vector<std::string>> addresses,
                              std::unique_ptr<transport::Listener> listener,
                              std::shared_ptr<transport::Connector> connector) {
  impl_->listener = std::move(listener);
  impl_->connector = std::move(connector);
  impl_->connect(std::move(addresses));
}

void ShuffleExchange::send(uint32_t to, std::span<const uint64_t> records) {
  impl_->send(to, records);
}

ShuffleTotals ShuffleExchange::finish() { return impl_->finish(); }

ShuffleTotals ShuffleExchange::sent() const {
  ShuffleTotals totals = impl_->kept;
  for (const Impl::Peer& peer : impl_->peers) totals.add(peer.sent);
  return totals;
}

void ShuffleExchange::close() { impl_->close(); }

ShuffleExchange::Impl::Impl(Schema schema_in, ShuffleOptions options_in, ShuffleSink sink_in)
    : schema(std::move(schema_in)),
      options(std::move(options_in)),
      sink(std::move(sink_in)),
      peers(options.trainers) {
  if (options.rank >= options.trainers) {
    throw Error(ErrorCode::kInvalidArgument, "shuffle: rank " + std::to_string(options.rank) +
                                                 " of " + std::to_string(options.trainers) +
                                                 " trainers");
  }
}

void ShuffleExchange::Impl::connect(std::vector<std::vector<std::string>> addresses) {
  if (options.trainers == 1) return;
  if (addresses.size() != options.trainers || listener == nullptr || connector == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "shuffle: expected a listener, a connector and the addresses of " +
                    std::to_string(options.trainers) + " trainers, found " +
                    std::to_string(addresses.size()));
  }
  std::unique_lock lock(mutex);
  const TimePoint now = Clock::now();
  for (uint32_t rank = 0; rank < options.trainers; ++rank) {
    Outgoing& out = peers[rank].out;
    out.addresses = std::move(addresses[rank]);
    out.give_up = now + milliseconds(options.connect_deadline_ms);
    out.try_next = now;
  }
  monitor_thread = start_io_thread("the thread of a global shuffle", [this] { monitor(); });
  wait(lock, "connect", [this] {
    for (uint32_t rank = 0; rank < options.trainers; ++rank) {
      if (is_peer(rank) && !peers[rank].out.ever_open) return false;
    }
    return true;
  });
}

// Waits until the condition holds; a failure of any kind ends it.
template <typename Condition>
void ShuffleExchange::Impl::wait(std::unique_lock<std::mutex>& lock, const char* what,
                                 const Condition& condition) {
  const TimePoint deadline = Clock::now() + milliseconds(options.round_deadline_ms);
  for (;;) {
    if (failure) throw Error(*failure);
    if (closed) throw Error(ErrorCode::kClosed, "shuffle: it was closed");
    if (condition()) return;
    if (Clock::now() >= deadline) {
      throw Error(ErrorCode::kTimeout, std::string("shuffle: ") + what + " waited " +
                                           std::to_string(options.round_deadline_ms) +
                                           " ms (CPUDIST_ROUND_DEADLINE_MS) for" + waited_for());
    }
    changed.wait_for(lock, kWaitSlice);
    if (!options.interrupted) continue;
    lock.unlock();
    const bool interrupted = options.interrupted();
    lock.lock();
    if (interrupted) {
      throw Error(ErrorCode::kInterrupted,
                  std::string("shuffle: ") + what + " was interrupted by a signal");
    }
  }
}

std::string ShuffleExchange::Impl::waited_for() const {
  std::string text;
  for (uint32_t rank = 0; rank < options.trainers; ++rank) {
    if (!is_peer(rank) || settled(peers[rank])) continue;
    text += (text.empty() ? " " : ", ") + describe(rank);
    text += peers[rank].in.ended ? "" : ", which has not sent all of its records";
  }
  return text;
}

void ShuffleExchange::Impl::send(uint32_t to, std::span<const uint64_t> records) {
  if (to >= options.trainers) {
    throw Error(ErrorCode::kInvalidArgument, "shuffle: there is no trainer " + std::to_string(to) +
                                                 " among " + std::to_string(options.trainers));
  }
  size_t count = 0;
  ShuffleTotals& totals = is_peer(to) ? peers[to].sent : kept;
  for (size_t at = 0; at < records.size(); ++count) {
    const uint64_t* record = records.data() + at;
    at += record_words(record);
    totals.add(record);
    if (is_peer(to)) append(peers[to], record, record_words(record) * sizeof(uint64_t));
  }
  if (!is_peer(to) && count > 0) sink(to, records, count);
}

void ShuffleExchange::Impl::append(Peer& peer, const uint64_t* record, size_t size_bytes) {
  if (peer.filled_bytes + size_bytes > peer.filling.size()) {
    flush(peer);
    peer.filling = Buffer(std::max(kShuffleFrameBytes, size_bytes));
  }
  std::memcpy(peer.filling.data() + peer.filled_bytes, record, size_bytes);
  peer.filled_bytes += size_bytes;
}

void ShuffleExchange::Impl::flush(Peer& peer) {
  if (peer.filled_bytes == 0) return;
  peer.filling.shrink(peer.filled_bytes);
  peer.filled_bytes = 0;
  push(peer, wire::FrameKind::kShuffle, std::exchange(peer.filling, Buffer()));
}

void ShuffleExchange::Impl::push(Peer& peer, wire::FrameKind kind, Buffer payload) {
  std::unique_lock lock(mutex);
  Outgoing& out = peer.out;
  wait(lock, "send", [&] { return out.pending.size() < kShuffleWindow; });
  lock.unlock();
  const std::lock_guard order(peer.sending);
  lock.lock();
  const uint64_t sequence = ++out.last_sequence;
  if (kind == wire::FrameKind::kShuffleEnd) out.end_sequence = sequence;
  if (kind == wire::FrameKind::kShuffleDone) out.done_sequence = sequence;
  Buffer copy = payload.share();
  out.pending.push_back({kind, sequence, std::move(payload)});
  out.sent = Clock::now();
  // What is not sent now is sent when the link is open again.
  const ConnectionPtr connection = out.open && !out.resend ? out.connection : nullptr;
  lock.unlock();
  if (connection) connection->send(wire::Frame{header(kind, sequence), std::move(copy)});
}

ShuffleTotals ShuffleExchange::Impl::finish() {
  const auto each_peer = [this](const auto& action) {
    for (uint32_t rank = 0; rank < options.trainers; ++rank) {
      if (is_peer(rank)) action(peers[rank]);
    }
  };
  each_peer([this](Peer& peer) {
    flush(peer);
    wire::Writer totals;
    totals.u64(peer.sent.records);
    totals.u64(peer.sent.words);
    totals.u64(peer.sent.checksum);
    push(peer, wire::FrameKind::kShuffleEnd, totals.finish());
  });
  const auto wait_for_all = [&](const auto& holds) {
    std::unique_lock lock(mutex);
    wait(lock, "finish", [&] {
      bool all = true;
      each_peer([&](const Peer& peer) { all &= holds(peer); });
      return all;
    });
  };
  wait_for_all([](const Peer& peer) {
    return peer.in.ended && peer.out.acknowledged >= peer.out.end_sequence;
  });
  // A trainer that has heard this from everybody has nobody left who needs it.
  each_peer([this](Peer& peer) { push(peer, wire::FrameKind::kShuffleDone, Buffer()); });
  wait_for_all([this](const Peer& peer) { return settled(peer); });
  ShuffleTotals all = kept;
  each_peer([&](Peer& peer) {
    const std::lock_guard order(peer.taking);
    all.add(peer.received);
  });
  const std::lock_guard lock(mutex);
  finished = true;
  return all;
}

void ShuffleExchange::Impl::close() {
  std::vector<ConnectionPtr> told;
  std::string why = "it was closed before its end";
  {
    const std::lock_guard lock(mutex);
    if (std::exchange(closed, true)) return;
    if (failure) why = failure->what();
    stopping = true;
    for (const Peer& peer : peers) {
      if (!finished && peer.out.connection) told.push_back(peer.out.connection);
    }
    work.notify_all();
    changed.notify_all();
  }
  if (monitor_thread.joinable()) monitor_thread.join();
  for (const ConnectionPtr& connection : told) {
    const wire::ErrorReply reply{ErrorCode::kPeerLost, why};
    connection->send(wire::Frame{header(wire::FrameKind::kError), wire::encode(reply)});
  }
  if (connector) connector->stop();
  if (listener) listener->stop();
  const std::lock_guard lock(mutex);
  for (Peer& peer : peers) {
    peer.out.connection.reset();
    peer.in.connection.reset();
  }
}

}  // namespace cpudist::data
