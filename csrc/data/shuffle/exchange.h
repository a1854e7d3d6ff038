// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A global shuffle: every trainer gives its records away, to others or to
// itself, and takes those it is given, each exactly once. What arrives is
// checked and handed on in the order (source, sequence), so the result does not
// depend on timing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/parse/records.h"
#include "data/parse/schema.h"
#include "transport/channel.h"
#include "transport/peer_links.h"

namespace cpudist::data {

// The trainer that a record goes to: uniform over `trainers`, the same for
// equal keys. The key is the record's number, or its instance id where records
// of an instance are to stay together.
uint32_t destination(uint64_t seed, uint64_t key, uint32_t trainers);

// What a stream of records was; equal for equal records in any order.
struct ShuffleTotals {
  uint64_t records = 0;
  uint64_t words = 0;
  uint64_t checksum = 0;  // sum of a hash of each record
  void add(const uint64_t* record);
  void add(const ShuffleTotals& other);
  bool operator==(const ShuffleTotals&) const = default;
};

struct ShuffleOptions {
  uint32_t rank = 0;
  uint32_t trainers = 1;
  uint64_t run_id = 0;
  uint32_t epoch = 0;  // of the shuffle: frames of another one are refused
  std::string host;    // of this trainer, for messages
  uint64_t connect_deadline_ms = 30000;
  uint64_t liveness_ms = 5000;
  uint64_t round_deadline_ms = 1800000;  // for a live trainer that does not get on
  uint64_t resend_ms = 200;              // on links that lose frames
  // Asked while this trainer waits; true ends the wait with kInterrupted. May
  // be null.
  std::function<bool()> interrupted;
};

// Takes whole checked records of a source, in its sequence. One call at a time
// per source, several sources at once, from the channel's threads and, for own
// records, from the thread of send().
using ShuffleSink =
    std::function<void(uint32_t source, std::span<const uint64_t> words, size_t records)>;

// Use: make it, make a listener and a connector over handler(), tell all
// trainers the listener's addresses, connect(), send() any number of times,
// finish(), close(). One thread; the sink is called until close() returns.
// Memory: at most five frames of about 1 MiB per destination.
//
// A trainer's stream to another is frames of records, an end with their totals,
// and "done" once that is acknowledged.
class ShuffleExchange final : private transport::PeerLinksUser {
 public:
  ShuffleExchange(Schema schema, ShuffleOptions options, ShuffleSink sink);
  ~ShuffleExchange() override { close(); }
  ShuffleExchange(const ShuffleExchange&) = delete;
  ShuffleExchange& operator=(const ShuffleExchange&) = delete;

  // Of both ends of the channel; valid as long as the exchange is.
  transport::ConnectionHandler* handler() { return &links_; }
  // `addresses` of every trainer by rank, best first; its own are not used.
  // Both may be null in a world of one. Throws kAddress when a trainer cannot
  // be reached until the connect deadline.
  void connect(std::vector<std::vector<std::string>> addresses,
               std::unique_ptr<transport::Listener> listener,
               std::shared_ptr<transport::Connector> connector);
  // Blocks while four frames of the destination are not acknowledged. Throws
  // kPeerLost naming the trainer, kTimeout, kProtocol, kInterrupted.
  void send(uint32_t to, std::span<const uint64_t> records);
  // Sends what is left, and waits until every trainer has everything of
  // everybody; then no trainer needs this one any more. Returns what was
  // received; throws as send().
  ShuffleTotals finish();
  ShuffleTotals sent() const;  // up to now, with what went to this trainer itself
  // Ends links and threads; the others are told if it comes before finish()
  // returned. Idempotent.
  void close() { links_.close(!finished_); }

 private:
  struct Peer {
    // Of the thread that sends:
    Buffer filling;
    size_t filled_bytes = 0;
    ShuffleTotals sent;
    uint64_t end_sequence = 0;
    std::atomic<uint64_t> done_sequence{0};  // 0: not sent yet
    // Of the peer's stream, which the links give on in order:
    ShuffleTotals received;
    std::atomic<bool> ended{false};
    std::atomic<bool> done{false};
  };

  wire::Frame hello(uint32_t to, uint64_t taken) const override;
  Greeting greeted(const wire::Frame& hello) const override;
  Greeting answered(const wire::Frame& hello) const override;
  wire::Frame refusal(const Error& error) const override;
  Error refused(const wire::Frame& refusal) const override;
  void take(uint32_t rank, const wire::Frame& frame) override;
  bool settled(uint32_t rank, const transport::LinkState& link) const override;

  void take_records(uint32_t rank, const wire::Frame& frame);
  void take_end(uint32_t rank, const wire::Frame& frame);
  void append(uint32_t to, const uint64_t* record, size_t size_bytes);
  void flush(uint32_t to);
  uint64_t push(uint32_t to, wire::FrameKind kind, Buffer payload);
  // Waits until `condition(rank)` holds for every other trainer.
  template <typename Condition>
  void wait_for_all(const char* what, const Condition& condition);
  template <typename Condition>
  void wait(const char* what, const Condition& condition);
  std::string waited_for() const;  // in a condition of the links
  bool is_peer(uint32_t rank) const { return rank != options_.rank; }

  const Schema schema_;
  const ShuffleOptions options_;
  const ShuffleSink sink_;
  ShuffleTotals kept_;                 // what this trainer gave itself
  std::deque<Peer> peers_;             // by rank; the one of this trainer is unused
  std::atomic<bool> finished_{false};  // close() may come from any thread
  transport::PeerLinks links_;
};

}  // namespace cpudist::data
