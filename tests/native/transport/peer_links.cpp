// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Links between trainers: their thread finds no memory, or peers that are frozen, or a stranger in
// the place of one.

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "support/check.h"
#include "support/failing_new.h"
#include "support/scripted_links.h"
#include "transport/peer_links.h"
#include "wire/control.h"

namespace cpudist::testing {
namespace {

using std::chrono::milliseconds;

class Nobody final : public transport::Connector {
 public:
  std::shared_ptr<transport::Connection> connect(const std::string& address,
                                                 TimePoint /*deadline*/) override {
    throw Error(ErrorCode::kAddress, address + ": nobody listens at this address of a test");
  }
  void stop() override {}
};

class Silent final : public transport::PeerLinksUser {
 public:
  wire::Frame hello(uint32_t, uint64_t) const override { return {}; }
  Greeting greeted(const wire::Frame&) const override { return {}; }
  Greeting answered(const wire::Frame&) const override { return {}; }
  wire::Frame refusal(const Error&) const override { return {}; }
  Error refused(const wire::Frame&) const override { return {ErrorCode::kInternal, ""}; }
  void take(uint32_t, const wire::Frame&) override {}
  bool settled(uint32_t, const transport::LinkState&) const override { return false; }
};

}  // namespace

// Whatever it finds no memory for, it does at its next look.
TEST(peer_links_whose_thread_is_out_of_memory_go_on) {
  at_every_allocation([](int64_t nth) {
    Silent user;
    transport::PeerLinksOptions options;
    options.peers = 2;
    options.connect_deadline_ms = 30;
    options.name = "test";
    transport::PeerLinks links(options, &user);
    const FailingNewElsewhere failing(nth, 3);
    links.connect({{}, {"nowhere"}}, nullptr, std::make_shared<Nobody>());
    try {
      links.wait(milliseconds(20000), [] { return false; });
      CHECK(false);
    } catch (const Error& error) {
      CHECK_EQ(error.code(), ErrorCode::kAddress);
      CHECK(std::string(error.what()).find("is not reached") != std::string::npos);
    }
    return failing.happened();
  });
}

namespace {

using Link = std::shared_ptr<Answering>;

class Greets final : public transport::PeerLinksUser {
 public:
  wire::Frame hello(uint32_t, uint64_t) const override {
    wire::Frame frame;
    frame.header.kind = wire::FrameKind::kHello;
    return frame;
  }
  Greeting greeted(const wire::Frame&) const override { return {}; }
  Greeting answered(const wire::Frame& frame) const override { return {frame.header.rank, 0, ""}; }
  wire::Frame refusal(const Error&) const override { return {}; }
  Error refused(const wire::Frame& frame) const override {
    const wire::ErrorReply reply = wire::decode_error(frame.payload.bytes());
    return {reply.code, reply.message};
  }
  void take(uint32_t, const wire::Frame&) override {}
  bool settled(uint32_t, const transport::LinkState&) const override { return false; }
};

// Trainer 0 and its links to others, which a test makes.
struct Linked {
  using Attempt = std::function<Link(const std::string& address, uint32_t nth)>;

  Linked(uint32_t peers, Attempt attempt_) : attempt(std::move(attempt_)), opened(peers) {
    transport::PeerLinksOptions options;
    options.peers = peers;
    options.connect_deadline_ms = 60000;
    options.liveness_ms = 250;  // nobody is silent here, and a heartbeat is due every 50 ms
    options.name = "test";
    links = std::make_unique<transport::PeerLinks>(options, &user);
    connector = std::make_shared<Scripted>([this](const std::string& address) {
      const Link link = attempt(address, attempts++);
      const std::lock_guard lock(mutex);
      return opened.at(std::stoul(address.substr(5))) = link;
    });
  }
  void connect() {
    std::vector<std::vector<std::string>> addresses;
    for (size_t rank = 0; rank < opened.size(); ++rank) {
      addresses.push_back({"test:" + std::to_string(rank)});
    }
    links->connect(std::move(addresses), nullptr, connector);
  }
  Link answering(const std::string& address) {
    return std::make_shared<Answering>(links.get(), address, wire::Hello{});
  }
  Link link(uint32_t rank) {
    const std::lock_guard lock(mutex);
    return opened.at(rank);
  }
  bool is_open(uint32_t rank) {
    return links->wait(milliseconds(20000), [&] {
      const transport::LinkState state = links->state(rank);
      return state.ever_open && !state.broken;
    });
  }

  const Attempt attempt;
  Greets user;
  std::shared_ptr<Scripted> connector;
  std::atomic<uint32_t> attempts{0};
  std::mutex mutex;
  std::vector<Link> opened;  // by rank
  std::unique_ptr<transport::PeerLinks> links;
};

}  // namespace

// Each attempt takes longer than a heartbeat may: there is one in between.
TEST(peer_links_beat_between_attempts_at_peers_that_are_frozen) {
  std::mutex mutex;
  std::vector<uint64_t> beats;  // at trainer 1, by attempt
  Linked linked(5, [&](const std::string& address, uint32_t) {
    if (address == "test:1") return linked.answering(address);
    const Link good = linked.link(1);
    if (good) {
      const std::lock_guard lock(mutex);
      beats.push_back(good->beats());
    }
    let_pass(milliseconds(110));
    throw Error(ErrorCode::kAddress, "no answer within the deadline");
  });
  linked.connect();
  CHECK(linked.is_open(1));
  CHECK(comes_true([&] {
    const std::lock_guard lock(mutex);
    return beats.size() >= 8;
  }));
  linked.links->close(false);
  for (size_t i = 2; i < beats.size(); ++i) CHECK(beats[i] > beats[i - 1]);
}

TEST(peer_links_that_end_do_not_wait_for_an_attempt) {
  std::atomic<bool> at_it{false};
  std::atomic<bool> ended{false};
  Linked linked(2, [&](const std::string&, uint32_t) -> Link {
    at_it = true;
    ended = comes_true([&] { return linked.connector->stopped.load(); });
    throw Error(ErrorCode::kAddress, "the connector stopped");
  });
  linked.connect();
  CHECK(comes_true([&] { return at_it.load(); }));
  linked.links->close(false);
  CHECK(ended);
}

TEST(peer_links_that_were_open_outlive_a_stranger_at_the_port) {
  Linked linked(2, [&](const std::string& address, uint32_t nth) {
    const Link link = linked.answering(address);
    if (nth == 1) throw Error(ErrorCode::kAuthentication, "wrong key of a test");
    if (nth == 2) link->refuse_with(Error(ErrorCode::kAuthentication, "no key here"));
    return link;
  });
  linked.connect();
  CHECK(linked.is_open(1));
  linked.link(1)->close("test");
  CHECK(comes_true([&] { return linked.attempts >= 4; }));
  CHECK(linked.is_open(1));
}

TEST(peer_links_that_were_never_open_are_told_of_the_key_at_once) {
  Linked linked(2, [](const std::string&, uint32_t) -> Link {
    throw Error(ErrorCode::kAuthentication, "wrong key of a test");
  });
  linked.connect();
  CHECK_EQ(error_code([&] { linked.is_open(1); }), code(ErrorCode::kAuthentication));
}

}  // namespace cpudist::testing
