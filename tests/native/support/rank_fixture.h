// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A group of ranks whose messages stay in memory: a send is done once it is received, as with a
// backend that has no buffers. Ranks can be killed, and directions held and damaged.

#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "support/channel_fixture.h"
#include "transport/ranks/channel.h"

namespace cpudist::testing {

class Fabric : public std::enable_shared_from_this<Fabric> {
 public:
  explicit Fabric(uint32_t ranks, size_t under_way = 4) : size(ranks), at_once(under_way) {}

  void kill(uint32_t rank) {
    const std::lock_guard lock(mutex_);
    for (auto& [pair, stream] : streams_) {
      if (pair.first == rank || pair.second == rank) end(stream, "killed");
    }
    changed_.notify_all();
  }
  // Nothing arrives any more in this direction, as if the receiver were stopped.
  void hold(uint32_t from, uint32_t to) {
    const std::lock_guard lock(mutex_);
    streams_[{from, to}].held = true;
  }
  // Changes one byte of the next message of this size.
  void damage(uint32_t from, uint32_t to, size_t size_bytes, size_t offset) {
    const std::lock_guard lock(mutex_);
    streams_[{from, to}].damaged = {size_bytes, offset};
  }

  struct Post {
    uint8_t* data;
    size_t size_bytes;
    std::shared_ptr<const void> owner;
    bool done = false;
    std::string trouble;
  };
  using PostPtr = std::shared_ptr<Post>;

  PostPtr post(uint32_t from, uint32_t to, bool sends, Post made) {
    auto item = std::make_shared<Post>(std::move(made));
    const std::lock_guard lock(mutex_);
    Stream& stream = streams_[{from, to}];
    if ((sends ? stream.sends : stream.receives).size() >= at_once) item->trouble = "too many";
    if (stream.cancelled[sends] || !item->trouble.empty()) {
      item->done = true;
      if (item->trouble.empty()) item->trouble = stream.trouble;
      return item;
    }
    (sends ? stream.sends : stream.receives).push_back(item);
    match(stream);
    return item;
  }
  std::string wait(const PostPtr& item) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return item->done; });
    return item->trouble;
  }
  void forget(uint32_t from, uint32_t to, bool sends, const PostPtr& item) {
    const std::lock_guard lock(mutex_);
    Stream& stream = streams_[{from, to}];
    std::erase(sends ? stream.sends : stream.receives, item);
  }
  void cancel(uint32_t rank, uint32_t peer) {
    const std::lock_guard lock(mutex_);
    end(streams_[{rank, peer}], "cancelled", true);
    end(streams_[{peer, rank}], "cancelled", false);
    changed_.notify_all();
  }

  const uint32_t size;
  const size_t at_once;

 private:
  struct Stream {
    std::deque<PostPtr> sends;
    std::deque<PostPtr> receives;
    std::map<bool, bool> cancelled;  // by whether it is the sending end
    std::string trouble;
    bool held = false;
    std::pair<size_t, size_t> damaged{0, 0};
  };

  static void end(Stream& stream, const char* trouble, bool sends) {
    stream.cancelled[sends] = true;
    if (stream.trouble.empty()) stream.trouble = trouble;  // the cause, not what it made others do
    auto& posts = sends ? stream.sends : stream.receives;
    for (const PostPtr& item : posts) {
      item->done = true;
      item->trouble = trouble;
    }
    posts.clear();
  }
  static void end(Stream& stream, const char* trouble) {
    end(stream, trouble, true);
    end(stream, trouble, false);
  }

  void match(Stream& stream) {
    while (!stream.held && !stream.sends.empty() && !stream.receives.empty()) {
      const PostPtr from = stream.sends.front();
      const PostPtr to = stream.receives.front();
      stream.sends.pop_front();
      stream.receives.pop_front();
      if (from->size_bytes == to->size_bytes) {
        std::memcpy(to->data, from->data, to->size_bytes);
        if (to->size_bytes > 0 && stream.damaged.first == to->size_bytes) {
          to->data[stream.damaged.second] ^= 0x40;
          stream.damaged.first = 0;
        }
      } else {
        from->trouble = to->trouble = "sizes differ";
      }
      from->done = to->done = true;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<uint32_t, uint32_t>, Stream> streams_;
};

class FabricTransfer final : public transport::Transfer {
 public:
  FabricTransfer(std::shared_ptr<Fabric> fabric, uint32_t from, uint32_t to, bool sends,
                 Fabric::Post post)
      : fabric_(std::move(fabric)), from_(from), to_(to), sends_(sends) {
    item_ = fabric_->post(from, to, sends, std::move(post));
  }
  ~FabricTransfer() override { fabric_->forget(from_, to_, sends_, item_); }
  std::string wait() override { return fabric_->wait(item_); }

 private:
  const std::shared_ptr<Fabric> fabric_;
  const uint32_t from_;
  const uint32_t to_;
  const bool sends_;
  Fabric::PostPtr item_;
};

class FabricTransport final : public transport::RankTransport {
 public:
  FabricTransport(std::shared_ptr<Fabric> fabric, uint32_t rank)
      : fabric_(std::move(fabric)), rank_(rank) {}
  uint32_t rank() const override { return rank_; }
  uint32_t size() const override { return fabric_->size; }
  size_t at_once() const override { return fabric_->at_once; }
  std::unique_ptr<transport::Transfer> start_send(uint32_t peer, const uint8_t* data,
                                                  size_t size_bytes,
                                                  std::shared_ptr<const void> owner) override {
    return std::make_unique<FabricTransfer>(
        fabric_, rank_, peer, true,
        Fabric::Post{const_cast<uint8_t*>(data), size_bytes, std::move(owner), false, {}});
  }
  std::unique_ptr<transport::Transfer> start_receive(uint32_t peer, uint8_t* data,
                                                     size_t size_bytes,
                                                     std::shared_ptr<void> owner) override {
    return std::make_unique<FabricTransfer>(
        fabric_, peer, rank_, false, Fabric::Post{data, size_bytes, std::move(owner), false, {}});
  }
  void cancel(uint32_t peer) noexcept override { fabric_->cancel(rank_, peer); }

 private:
  const std::shared_ptr<Fabric> fabric_;
  const uint32_t rank_;
};

// One rank that serves and trains, as a colocated one does.
struct FabricRank {
  FabricRank(const std::shared_ptr<Fabric>& fabric, uint32_t rank, std::vector<uint32_t> peers,
             const transport::ChannelLimits& limits = {})
      : network(transport::RankNetwork::create(std::make_shared<FabricTransport>(fabric, rank),
                                               peers, limits)),
        listener(network->listen(&server)),
        connector(network->connector(&client)) {}
  ~FabricRank() {
    connector->stop();
    listener->stop();
    network->stop();
  }
  std::shared_ptr<transport::Connection> connect(uint32_t peer) {
    return connector->connect("c10d:" + std::to_string(peer), soon());
  }
  std::string broken_promises() const {
    return server.broken_promises() + client.broken_promises();
  }

  Recorder server;
  Recorder client;
  std::shared_ptr<transport::RankNetwork> network;
  std::unique_ptr<transport::Listener> listener;
  std::shared_ptr<transport::Connector> connector;
};

// Two of them.
struct FabricPair {
  explicit FabricPair(const transport::ChannelLimits& limits = {}, size_t at_once = 4)
      : fabric(std::make_shared<Fabric>(2, at_once)),
        a(fabric, 0, {1}, limits),
        b(fabric, 1, {0}, limits) {}
  // From a to b, past the handshake, with an empty hello.
  std::shared_ptr<transport::Connection> greet() {
    const size_t before = b.server.frame_count();
    const auto connection = a.connect(1);
    connection->send(make_frame(wire::FrameKind::kHello, 0, 0));
    b.server.wait_frames(before + 1);
    return connection;
  }
  std::string broken_promises() const { return a.broken_promises() + b.broken_promises(); }

  std::shared_ptr<Fabric> fabric;
  FabricRank a;
  FabricRank b;
};

}  // namespace cpudist::testing
