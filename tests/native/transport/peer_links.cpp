// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Links between trainers whose thread finds no memory.

#include <chrono>
#include <memory>
#include <string>

#include "base/errors.h"
#include "support/check.h"
#include "support/failing_new.h"
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

}  // namespace cpudist::testing
