// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data/shuffle/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/hash.h"
#include "wire/control.h"
#include "wire/primitives.h"

namespace cpudist::data {

using std::chrono::milliseconds;
using wire::FrameKind;

namespace {

constexpr size_t kFrameBytes = 1 << 20;
constexpr size_t kWindow = 4;  // unacknowledged frames per destination
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;
constexpr auto kWaitSlice = milliseconds(50);  // between two questions for a signal

std::span<const uint8_t> bytes_of(const wire::Frame& frame) {
  return {frame.payload.data(), frame.payload.size()};
}

wire::FrameHeader header_of(const ShuffleOptions& options, FrameKind kind = FrameKind::kError) {
  wire::FrameHeader made;
  made.kind = kind;
  made.run_id = options.run_id;
  made.epoch = options.epoch;
  made.role = wire::Role::kTrainer;
  made.rank = static_cast<uint16_t>(options.rank);
  made.param_set = wire::kNoParamSet;
  return made;
}

transport::PeerLinksOptions links_of(const ShuffleOptions& options) {
  transport::PeerLinksOptions made;
  made.rank = options.rank;
  made.peers = options.trainers;
  made.connect_deadline_ms = options.connect_deadline_ms;
  made.liveness_ms = options.liveness_ms;
  made.resend_ms = options.resend_ms;
  made.header = header_of(options);
  made.acknowledgement = FrameKind::kShuffleAck;
  made.name = "shuffle";
  made.misfit = "what is no shuffle of these slots";
  return made;
}

uint64_t record_hash(const uint64_t* record) {
  uint64_t hash = kGolden;
  for (size_t i = 0; i < record_words(record); ++i) hash = kernels::mix64(hash ^ record[i]) + i;
  return hash;
}

}  // namespace

uint32_t destination(uint64_t seed, uint64_t key, uint32_t trainers) {
  // The upper half of a product is uniform once the few products that would
  // make some values one more frequent are drawn again (Lemire 2019).
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
    : schema_(std::move(schema)),
      options_(std::move(options)),
      sink_(std::move(sink)),
      peers_(options_.trainers),
      links_(links_of(options_), this) {
  if (options_.rank >= options_.trainers) {
    throw Error(ErrorCode::kInvalidArgument, "shuffle: rank " + std::to_string(options_.rank) +
                                                 " of " + std::to_string(options_.trainers) +
                                                 " trainers");
  }
}

void ShuffleExchange::connect(std::vector<std::vector<std::string>> addresses,
                              std::unique_ptr<transport::Listener> listener,
                              std::shared_ptr<transport::Connector> connector) {
  if (options_.trainers == 1) return;
  if (addresses.size() != options_.trainers || listener == nullptr || connector == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "shuffle: expected a listener, a connector and the addresses of " +
                    std::to_string(options_.trainers) + " trainers, found " +
                    std::to_string(addresses.size()));
  }
  links_.connect(std::move(addresses), std::move(listener), std::move(connector));
  wait_for_all("connect", [this](uint32_t rank) { return links_.state(rank).ever_open; });
}

// -- the thread that shuffles

// Waits until the condition holds; a failure of any kind ends it.
template <typename Condition>
void ShuffleExchange::wait(const char* what, const Condition& condition) {
  const TimePoint deadline = Clock::now() + milliseconds(options_.round_deadline_ms);
  const auto holds = [&] {
    if (condition()) return true;
    if (Clock::now() < deadline) return false;
    throw Error(ErrorCode::kTimeout, std::string("shuffle: ") + what + " waited " +
                                         std::to_string(options_.round_deadline_ms) +
                                         " ms (CPUDIST_ROUND_DEADLINE_MS) for" + waited_for());
  };
  while (!links_.wait(kWaitSlice, holds)) {
    if (options_.interrupted && options_.interrupted()) {
      throw Error(ErrorCode::kInterrupted,
                  std::string("shuffle: ") + what + " was interrupted by a signal");
    }
  }
}

template <typename Condition>
void ShuffleExchange::wait_for_all(const char* what, const Condition& condition) {
  wait(what, [&] {
    for (uint32_t rank = 0; rank < options_.trainers; ++rank) {
      if (is_peer(rank) && !condition(rank)) return false;
    }
    return true;
  });
}

std::string ShuffleExchange::waited_for() const {
  std::string text;
  for (uint32_t rank = 0; rank < options_.trainers; ++rank) {
    if (!is_peer(rank) || links_.settled(rank)) continue;
    text += (text.empty() ? " " : ", ") + links_.describe(rank);
    text += peers_[rank].ended ? "" : ", which has not sent all of its records";
  }
  return text;
}

void ShuffleExchange::send(uint32_t to, std::span<const uint64_t> records) {
  if (to >= options_.trainers) {
    throw Error(ErrorCode::kInvalidArgument, "shuffle: there is no trainer " + std::to_string(to) +
                                                 " among " + std::to_string(options_.trainers));
  }
  size_t count = 0;
  ShuffleTotals& totals = is_peer(to) ? peers_[to].sent : kept_;
  for (size_t at = 0; at < records.size(); ++count) {
    const uint64_t* record = records.data() + at;
    at += record_words(record);
    totals.add(record);
    if (is_peer(to)) append(to, record, record_words(record) * sizeof(uint64_t));
  }
  if (!is_peer(to) && count > 0) sink_(to, records, count);
}

void ShuffleExchange::append(uint32_t to, const uint64_t* record, size_t size_bytes) {
  Peer& peer = peers_[to];
  if (peer.filled_bytes + size_bytes > peer.filling.size()) {
    flush(to);
    peer.filling = Buffer(std::max(kFrameBytes, size_bytes));
  }
  std::memcpy(peer.filling.data() + peer.filled_bytes, record, size_bytes);
  peer.filled_bytes += size_bytes;
}

void ShuffleExchange::flush(uint32_t to) {
  Peer& peer = peers_[to];
  if (peer.filled_bytes == 0) return;
  peer.filling.shrink(peer.filled_bytes);
  peer.filled_bytes = 0;
  push(to, FrameKind::kShuffle, std::exchange(peer.filling, Buffer()));
}

uint64_t ShuffleExchange::push(uint32_t to, FrameKind kind, Buffer payload) {
  wait("send", [&] { return links_.state(to).pending < kWindow; });
  return links_.push(to, kind, std::move(payload));
}

ShuffleTotals ShuffleExchange::finish() {
  for (uint32_t rank = 0; rank < options_.trainers; ++rank) {
    if (!is_peer(rank)) continue;
    flush(rank);
    Peer& peer = peers_[rank];
    wire::Writer totals;
    totals.u64(peer.sent.records);
    totals.u64(peer.sent.words);
    totals.u64(peer.sent.checksum);
    peer.end_sequence = push(rank, FrameKind::kShuffleEnd, totals.finish());
  }
  wait_for_all("finish", [this](uint32_t rank) {
    const Peer& peer = peers_[rank];
    return peer.ended && links_.state(rank).acknowledged >= peer.end_sequence;
  });
  // A trainer that has heard this from everybody has nobody left who needs it.
  for (uint32_t rank = 0; rank < options_.trainers; ++rank) {
    if (is_peer(rank)) {
      peers_[rank].done_sequence = push(rank, FrameKind::kShuffleDone, Buffer());
    }
  }
  wait_for_all("finish", [this](uint32_t rank) { return links_.settled(rank); });
  finished_ = true;
  ShuffleTotals all = kept_;
  for (const Peer& peer : peers_) all.add(peer.received);
  return all;
}

ShuffleTotals ShuffleExchange::sent() const {
  ShuffleTotals totals = kept_;
  for (const Peer& peer : peers_) totals.add(peer.sent);
  return totals;
}

// -- what the links ask

// Both know that nothing is due, or the peer, which has everything, went
// without a word that arrived.
bool ShuffleExchange::settled(uint32_t rank, const transport::LinkState& link) const {
  const Peer& peer = peers_[rank];
  if (peer.done_sequence == 0 || !peer.ended) return false;
  if (peer.done) return link.broken || link.acknowledged >= peer.done_sequence;
  return link.broken && link.unreachable;
}

wire::Frame ShuffleExchange::hello(uint32_t to, uint64_t taken) const {
  wire::Hello message;
  message.trainer_count = options_.trainers;
  message.shard_id = to;
  message.last_sequence = taken;
  message.host = options_.host;
  return {header_of(options_, FrameKind::kHello), wire::encode(message)};
}

transport::PeerLinksUser::Greeting ShuffleExchange::greeted(const wire::Frame& hello) const {
  const wire::Hello message = wire::decode_hello(bytes_of(hello));
  const wire::FrameHeader& from = hello.header;
  std::string wrong;
  if (from.run_id != options_.run_id) wrong = "run id";
  if (from.epoch != options_.epoch) wrong = "epoch of the shuffle";
  if (message.trainer_count != options_.trainers) wrong = "number of trainers";
  if (message.shard_id != options_.rank) wrong = "rank of the trainer at this address";
  if (from.rank >= options_.trainers || !is_peer(from.rank)) wrong = "rank of the sender";
  if (!wrong.empty()) {
    throw Error(ErrorCode::kConfigMismatch,
                "the " + wrong + " of the hello is not that of trainer " +
                    std::to_string(options_.rank) +
                    "; all trainers must shuffle the same data set at once");
  }
  return {from.rank, message.last_sequence, message.host};
}

transport::PeerLinksUser::Greeting ShuffleExchange::answered(const wire::Frame& hello) const {
  const wire::Hello message = wire::decode_hello(bytes_of(hello));
  return {message.shard_id, message.last_sequence, message.host};
}

wire::Frame ShuffleExchange::refusal(const Error& error) const {
  const wire::ErrorReply reply{error.code(), error.what()};
  return {header_of(options_, FrameKind::kError), wire::encode(reply)};
}

Error ShuffleExchange::refused(const wire::Frame& refusal) const {
  const wire::ErrorReply reply = wire::decode_error(bytes_of(refusal));
  return {reply.code, reply.message};
}

void ShuffleExchange::take(uint32_t rank, const wire::Frame& frame) {
  Peer& peer = peers_[rank];
  // What the totals of the end were compared with stays as it is.
  if (peer.ended && frame.header.kind != FrameKind::kShuffleDone) {
    throw Error(ErrorCode::kProtocol, "records after the end of its records");
  }
  switch (frame.header.kind) {
    case FrameKind::kShuffle:
      return take_records(rank, frame);
    case FrameKind::kShuffleEnd:
      take_end(rank, frame);
      peer.ended = true;
      return;
    case FrameKind::kShuffleDone:
      peer.done = true;
      return;
    default:
      throw Error(ErrorCode::kProtocol, "a frame of another kind");
  }
}

void ShuffleExchange::take_records(uint32_t rank, const wire::Frame& frame) {
  const size_t size = frame.payload.size();
  if (size == 0 || size % sizeof(uint64_t) != 0) {
    throw Error(ErrorCode::kProtocol,
                "a frame of " + std::to_string(size) + " bytes; records are 8-byte words");
  }
  // Payloads are aligned to 64 bytes.
  const auto* first = reinterpret_cast<const uint64_t*>(frame.payload.data());
  const std::span<const uint64_t> words(first, size / sizeof(uint64_t));
  const size_t records = check_records(schema_, words);
  for (size_t at = 0; at < words.size(); at += record_words(first + at)) {
    peers_[rank].received.add(first + at);
  }
  sink_(rank, words, records);
}

void ShuffleExchange::take_end(uint32_t rank, const wire::Frame& frame) {
  wire::Reader reader(bytes_of(frame));
  ShuffleTotals totals;
  totals.records = reader.u64();
  totals.words = reader.u64();
  totals.checksum = reader.u64();
  reader.expect_end();
  const ShuffleTotals& found = peers_[rank].received;
  if (totals == found) return;
  throw Error(ErrorCode::kProtocol, "expected " + std::to_string(totals.records) +
                                        " records, checksum " + std::to_string(totals.checksum) +
                                        ", found " + std::to_string(found.records) + ", checksum " +
                                        std::to_string(found.checksum));
}

}  // namespace cpudist::data
