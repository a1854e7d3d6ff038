// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "simulator/gate.h"

#include <algorithm>
#include <chrono>

#include "simulator/plan.h"
#include "wire/codec/codec.h"
#include "wire/frame_kind.h"
#include "wire/sections.h"

namespace cpudist::simulator {

// A link as the server sees it.
class Gate::Watched final : public transport::Connection,
                            public std::enable_shared_from_this<Gate::Watched> {
 public:
  Watched(Link connection, Gate& owner) : inner(std::move(connection)), gate_(owner) {}

  bool send(wire::Frame frame) override {
    return !closed() && gate_.send(shared_from_this(), std::move(frame));
  }
  void close(const std::string& reason) override {
    if (closing) return;
    closing = true;
    gate_.close(shared_from_this(), reason);
  }
  bool closed() const override { return closing || heard_end; }
  std::string peer_address() const override { return inner->peer_address(); }
  bool reliable() const override { return inner->reliable(); }
  uint64_t bytes_sent() const override { return inner->bytes_sent(); }
  uint64_t bytes_received() const override { return bytes; }
  uint64_t bytes_moved() const override { return bytes; }

  const Link inner;
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t bytes = 0;      // that the server has read
  bool closing = false;    // by the server
  bool heard_end = false;  // the server knows of its end
  bool told_end = false;   // and the trainer
  // When the server has read of it, and the trainer could last, once it has introduced itself and
  // was answered.
  std::optional<TimePoint> heard;
  std::optional<TimePoint> spoken;

 private:
  Gate& gate_;
};

Gate::Gate(const server::ServerOptions& options, const wire::ParamSetLayout& layout, uint64_t bound,
           Pushed pushed, testing::SeededSchedule& schedule, EventLog& events)
    : shard_(options.shard_id),
      layout_(layout),
      memory_cap_(options.memory_cap_bytes),
      pushed_(std::move(pushed)),
      schedule_(schedule),
      events_(events),
      watch_(layout, bound),
      server_(options) {}

Gate::~Gate() = default;

bool Gate::cut_in(const Watched& link) const {
  const auto found = cut_in_.find(link.rank);
  return found != cut_in_.end() && link.incarnation <= found->second;
}

bool Gate::cut_out(const Watched& link) const {
  const auto found = cut_out_.find(link.rank);
  return found != cut_out_.end() && link.incarnation <= found->second;
}

void Gate::note(const char* way, const Watched& link, const wire::Frame& frame, const char* fate) {
  if (frame.header.kind == wire::FrameKind::kHeartbeat ||
      frame.header.kind == wire::FrameKind::kHeartbeatAck) {
    return;
  }
  events_.note("trainer " + std::to_string(link.rank) + " " + way + " server " +
               std::to_string(shard_) + ": " + name_of(frame.header.kind) + " " +
               std::to_string(frame.header.sequence) + " of process " +
               std::to_string(link.incarnation) + fate);
}

// ---- from trainers ----

void Gate::on_open(const Link& connection) {
  const auto link = std::make_shared<Watched>(connection, *this);
  links_[connection.get()] = link;
  if (!dead_) server_.on_open(link);
}

void Gate::on_frame(const Link& connection, wire::Frame frame) {
  const auto found = links_.find(connection.get());
  if (found == links_.end()) return;
  const WatchedPtr link = found->second;
  if (frame.header.kind == wire::FrameKind::kHello) {
    link->rank = frame.header.rank;
    link->incarnation = frame.header.incarnation;
  }
  const auto killed = killed_.find(link->rank);
  const bool never_said = frame.header.kind == wire::FrameKind::kError && killed != killed_.end() &&
                          link->incarnation <= killed->second;
  if (never_said || dead_) return;
  if (cut_in(*link)) return note("->", *link, frame, ", lost");
  schedule_.pause();
  take({link, std::move(frame), false, {}});
}

void Gate::on_close(const Link& connection, const std::string& reason) {
  const auto found = links_.find(connection.get());
  if (found == links_.end()) return;
  const WatchedPtr link = found->second;
  links_.erase(found);
  if (!link->heard_end) take({link, {}, true, reason});
}

void Gate::take(Item item) {
  if (dead_) return;
  if (frozen_ || (item.closes && cut_in(*item.link))) {
    incoming_.push_back(std::move(item));
    return;
  }
  Watched& link = *item.link;
  if (link.heard_end) return;
  if (item.closes) {
    link.heard_end = true;
    events_.note("server " + std::to_string(shard_) + " hears the end of a link of trainer " +
                 std::to_string(link.rank));
    return server_.on_close(item.link, item.reason);
  }
  if (link.closing) return;
  note("->", link, item.frame, "");
  if (link.heard || item.frame.header.kind == wire::FrameKind::kHello) link.heard = Clock::now();
  link.bytes += wire::kHeaderBytes + item.frame.payload.size();
  if (watch_.asked(item.frame) && pushed_) read_push(item.frame);
  try {
    server_.on_frame(item.link, std::move(item.frame));
  } catch (const std::exception& error) {
    item.link->close(error.what());
  }
}

void Gate::read_push(const wire::Frame& frame) const {
  if (frame.header.kind != wire::FrameKind::kPush) return;
  wire::Decoded decoded;
  std::span<const uint8_t> bytes = frame.payload.bytes();
  if (frame.header.coded) {
    decoded = wire::decode_sections(wire::SectionKind::kPush, bytes, layout_,
                                    wire::allocate_from(nullptr));
    bytes = decoded.payload.bytes();
  }
  pushed_(frame.header.rank, frame.header.incarnation, wire::decode_push(bytes, layout_));
}

void Gate::take_kept() {
  std::deque<Item> kept = std::exchange(incoming_, {});
  for (Item& item : kept) {
    if (item.closes && cut_in(*item.link)) {
      incoming_.push_back(std::move(item));
    } else {
      take(std::move(item));
    }
  }
}

// ---- to trainers ----

bool Gate::send(const WatchedPtr& link, wire::Frame frame) {
  if (dead_) return true;
  if (!watch_.answered(link->rank, frame)) ++stale_;
  give({link, std::move(frame), false, {}});
  return true;
}

void Gate::close(const WatchedPtr& link, const std::string& reason) {
  if (dead_) return;
  // Its own side is over at once.
  if (!link->heard_end) {
    link->heard_end = true;
    server_.on_close(link, reason);
  }
  give({link, {}, true, reason});
}

void Gate::give(Item item) {
  const bool cut = cut_out(*item.link);
  if (cut && !item.closes) return note("<-", *item.link, item.frame, ", lost");
  if (cut || frozen_trainers_.contains(item.link->rank)) {
    outgoing_.push_back(std::move(item));
    return;
  }
  if (item.closes) {
    item.link->told_end = true;
    return item.link->inner->close(item.reason);
  }
  item.link->spoken = Clock::now();
  note("<-", *item.link, item.frame, "");
  item.link->inner->send(std::move(item.frame));
}

void Gate::give_kept() {
  std::deque<Item> kept = std::exchange(outgoing_, {});
  for (Item& item : kept) give(std::move(item));
}

// ---- faults that end ----

void Gate::thaw() {
  frozen_ = false;
  forget_silence(nullptr);
  take_kept();
}

void Gate::thaw_trainer(uint32_t rank) {
  frozen_trainers_.erase(rank);
  forget_silence(&rank);
  give_kept();
}

void Gate::heal(uint32_t rank) {
  cut_in_.erase(rank);
  cut_out_.erase(rank);
  if (!frozen_) take_kept();
  give_kept();
}

// ---- silence ----

bool Gate::is_silence(const std::optional<TimePoint>& since) const {
  const auto limit = std::chrono::milliseconds(kSilenceMs);
  // A process that was away itself hears of nobody's silence.
  return since && Clock::now() - std::max(*since, schedule_.slept_until()) > limit;
}

std::string Gate::unnoticed() const {
  if (dead_ || frozen_) return {};
  for (const auto& [connection, link] : links_) {
    if (link->closing || link->heard_end || !is_silence(link->heard)) continue;
    return "server " + std::to_string(shard_) + " has not counted trainer " +
           std::to_string(link->rank) + " as lost, which is silent";
  }
  return {};
}

bool Gate::silent_to(uint32_t rank, uint32_t incarnation) const {
  return !dead_ && !frozen_trainers_.contains(rank) &&
         std::any_of(links_.begin(), links_.end(), [&](const auto& one) {
           const Watched& link = *one.second;
           return link.rank == rank && link.incarnation == incarnation && !link.told_end &&
                  is_silence(link.spoken);
         });
}

void Gate::forget_silence(const uint32_t* rank) {
  for (const auto& [connection, link] : links_) {
    if (rank == nullptr && link->heard) link->heard = Clock::now();
    if ((rank == nullptr || link->rank == *rank) && link->spoken) link->spoken = Clock::now();
  }
}

}  // namespace cpudist::simulator
