// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How often a request is sent again when its connection breaks before the answer.

#include <atomic>
#include <memory>
#include <string>

#include "client/client.h"
#include "support/channel_fixture.h"
#include "support/check.h"
#include "transport/inproc/channel.h"
#include "wire/control.h"
#include "wire/frame.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

// A server that knows nobody's requests, and hangs up on the first `breaks` of them.
class Breaking {
 public:
  explicit Breaking(uint32_t breaks) {
    transport::FaultPlan plan;  // links of a network without faults keep no request
    plan.delay = 1.0;
    plan.delay_ms_max = 1;
    network_ = transport::InprocNetwork::create(plan);
    recorder_.on_each = [this, breaks](const Recorder::Peer& connection, wire::Frame& frame) {
      answer(*connection, frame.header, breaks);
    };
    listener_ = network_->listen("server", &recorder_);
  }
  ~Breaking() { listener_->stop(); }

  // What joining a parameter set ends with: "" if it was answered.
  std::string join(uint32_t retries) {
    client::ClientOptions options;
    options.run_id = 7;
    options.probe_ms = 5;
    options.resend_ms = 5;
    options.reconnect_grace_ms = 20000;
    options.round_deadline_ms = 20000;
    options.rpc_retries = retries;
    options.servers = {listener_->addresses()};
    client::Client client(options, [this](transport::ConnectionHandler* handler) {
      return make_connector(network_->connector(handler), nullptr);
    });
    client.connect();
    try {
      client.barrier();
    } catch (const Error& error) {
      CHECK_EQ(static_cast<int>(error.code()), static_cast<int>(ErrorCode::kPeerLost));
      return error.what();
    }
    return "";
  }
  uint32_t requests() const { return broken_ + (answered_ ? 1u : 0u); }

 private:
  void answer(transport::Connection& connection, wire::FrameHeader header, uint32_t breaks) {
    Buffer payload;
    switch (header.kind) {
      case wire::FrameKind::kHello:
        payload = encode(wire::Hello{1, 1, 0, 0, "test"});
        break;
      case wire::FrameKind::kProbe:
        header.kind = wire::FrameKind::kProbeReply;
        payload = encode(wire::ProbeReply{});
        break;
      case wire::FrameKind::kBarrier:
        if (broken_ < breaks) {
          ++broken_;
          return connection.close("broken");
        }
        answered_ = true;  // asked for anew where its answer takes longer than probes wait
        header.kind = wire::FrameKind::kReply;
        payload = encode(wire::BarrierReply{});
        break;
      default:
        return;
    }
    connection.send(wire::Frame{header, std::move(payload)});
  }

  std::atomic<uint32_t> broken_{0};
  std::atomic<bool> answered_{false};
  Recorder recorder_;
  std::shared_ptr<transport::InprocNetwork> network_;
  std::unique_ptr<transport::Listener> listener_;
};

}  // namespace

TEST(client_retries_as_often_as_it_may) {
  Breaking server(3);
  CHECK_EQ(server.join(3), std::string());
  CHECK_EQ(server.requests(), 4u);
}

TEST(client_retries_end_with_the_loss_of_the_server) {
  for (const uint32_t retries : {0u, 2u}) {
    Breaking server(100);
    const std::string said = server.join(retries);
    CHECK_EQ(server.requests(), retries + 1);
    CHECK(said.find("CPUDIST_RPC_RETRIES is " + std::to_string(retries)) != std::string::npos);
    CHECK(said.find("broke " + std::to_string(retries + 1) + " times") != std::string::npos);
  }
}
