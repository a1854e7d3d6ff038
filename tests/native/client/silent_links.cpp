// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A connection that is silent while a new one to the same server would be answered: TCP sends again
// seconds after the network is back.

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "client/client.h"
#include "support/check.h"
#include "support/scripted_links.h"
#include "wire/control.h"

namespace {

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT
using std::chrono::milliseconds;
using wire::FrameKind;

// Answers what a server does, until it is cut: then it swallows all, and nothing comes of it any
// more.
class Line final : public transport::Connection, public std::enable_shared_from_this<Line> {
 public:
  Line(transport::ConnectionHandler* handler, std::string address, uint32_t shard = 0,
       uint32_t servers = 1)
      : handler_(handler), address_(std::move(address)), shard_(shard), servers_(servers) {}
  bool send(wire::Frame frame) override {
    if (closed_) return false;
    sent_[static_cast<size_t>(frame.header.kind)]++;
    if (!cut) answer(frame.header);
    return true;
  }
  void close(const std::string& reason) override {
    if (!closed_.exchange(true)) handler_->on_close(shared_from_this(), reason);
  }
  bool closed() const override { return closed_; }
  std::string peer_address() const override { return address_; }
  bool reliable() const override { return true; }
  uint64_t bytes_sent() const override { return 0; }
  uint64_t bytes_received() const override { return 0; }
  uint64_t bytes_moved() const override { return answers_; }
  uint32_t sent(FrameKind kind) const { return sent_[static_cast<size_t>(kind)]; }

  std::atomic<bool> cut{false};
  std::atomic<bool> other{false};  // of another run: it refuses hellos
  std::atomic<bool> keeps{false};  // barriers: they are not answered yet
  std::atomic<bool> knows{false};  // of a probe: it is answered with what was recorded

 private:
  void answer(wire::FrameHeader header) {
    Buffer payload;
    switch (header.kind) {
      case FrameKind::kHello:
        if (other) header.kind = FrameKind::kError;
        payload = other ? encode(wire::ErrorReply{ErrorCode::kProtocol, "hello of another run"})
                        : encode(wire::Hello{1, servers_, shard_, 0, "test"});
        break;
      case FrameKind::kHeartbeat:
        header.kind = FrameKind::kHeartbeatAck;
        break;
      case FrameKind::kProbe:
        header.kind = knows ? FrameKind::kReply : FrameKind::kProbeReply;
        payload = knows ? encode(wire::BarrierReply{}) : encode(wire::ProbeReply{});
        break;
      case FrameKind::kBarrier:
        if (keeps) return;
        header.kind = FrameKind::kReply;
        payload = encode(wire::BarrierReply{});
        break;
      default:
        return;
    }
    ++answers_;
    handler_->on_frame(shared_from_this(), wire::Frame{header, std::move(payload)});
  }

  transport::ConnectionHandler* const handler_;
  const std::string address_;
  const uint32_t shard_;
  const uint32_t servers_;
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> answers_{0};
  std::array<std::atomic<uint32_t>, 64> sent_{};
};

// A client of one server, whose connections a test makes.
class OneServer {
 public:
  using Attempt = std::function<std::shared_ptr<Line>(OneServer&, uint32_t nth)>;
  OneServer(std::string address, uint64_t liveness_ms, Attempt attempt)
      : attempt_(std::move(attempt)) {
    options_.run_id = 7;
    options_.servers = {{std::move(address)}};
    options_.liveness_ms = liveness_ms;
    options_.probe_ms = 1000000;  // but for those of a new connection
    options_.rpc_retries = 0;
    client =
        std::make_unique<client::Client>(options_, [this](transport::ConnectionHandler* made_for) {
          handler_ = made_for;
          return std::make_shared<Scripted>([this](const std::string&) {
            const auto line = attempt_(*this, attempts++);
            const std::lock_guard lock(mutex_);
            lines_.push_back(line);
            return line;
          });
        });
    client->connect();
  }
  std::shared_ptr<Line> make() { return std::make_shared<Line>(handler_, options_.servers[0][0]); }
  std::shared_ptr<Line> line(size_t i) {
    const std::lock_guard lock(mutex_);
    return lines_.at(i);
  }
  size_t lines() {
    const std::lock_guard lock(mutex_);
    return lines_.size();
  }
  // What a barrier ends with: "" if it was answered.
  std::string barrier() {
    try {
      client->barrier();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  std::atomic<uint32_t> attempts{0};

 private:
  const Attempt attempt_;
  client::ClientOptions options_;
  transport::ConnectionHandler* handler_ = nullptr;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Line>> lines_;

 public:
  std::unique_ptr<client::Client> client;  // ends before what it calls
};

// Silent from the moment that it has a barrier, until another connection can be made.
std::shared_ptr<Line> after_a_cut(OneServer& server, uint32_t nth, bool knows) {
  if (nth == 1 || nth == 2) throw Error(ErrorCode::kAddress, "no answer within the deadline");
  const auto line = server.make();
  line->keeps = nth == 0;
  line->knows = knows;
  return line;
}

TEST(client_moves_to_a_new_connection_where_a_cut_was_shorter_than_the_liveness) {
  for (const bool knows : {false, true}) {
    OneServer server("tcp:127.0.0.1:1", 4000,
                     [&](OneServer& self, uint32_t nth) { return after_a_cut(self, nth, knows); });
    std::string said = "nothing";
    std::thread waits([&] { said = server.barrier(); });
    const bool asked = comes_true([&] { return server.line(0)->sent(FrameKind::kBarrier) > 0; });
    server.line(0)->cut = true;
    waits.join();
    CHECK(asked);
    CHECK_EQ(said, std::string());
    CHECK_EQ(server.attempts.load(), 4u);
    CHECK(comes_true([&] { return server.line(0)->closed(); }));
    // The server is asked whether it has it, and is sent only what it has not.
    CHECK_EQ(server.line(1)->sent(FrameKind::kProbe), 1u);
    CHECK_EQ(server.line(1)->sent(FrameKind::kBarrier), knows ? 0u : 1u);
    CHECK_EQ(server.client->stats().reconnects, 1u);
  }
}

TEST(client_counts_a_server_as_lost_that_new_connections_do_not_reach_either) {
  OneServer unreached("tcp:127.0.0.1:1", 400, [](OneServer& self, uint32_t nth) {
    if (nth > 0) throw Error(ErrorCode::kAddress, "no route to it");
    return self.make();
  });
  unreached.line(0)->cut = true;
  std::string said;
  CHECK(comes_true([&] { return !(said = unreached.barrier()).empty(); }));
  CHECK(said.find("silent for 400 ms") != std::string::npos);
  CHECK(said.find("no route to it") != std::string::npos);
  CHECK(unreached.client->out_of_reach());  // it may be there
  CHECK(unreached.attempts > 1);

  // Its kernel takes connections, and it is frozen.
  OneServer frozen("tcp:127.0.0.1:1", 400, [](OneServer& self, uint32_t nth) {
    const auto line = self.make();
    line->cut = nth > 0;
    return line;
  });
  frozen.line(0)->cut = true;
  CHECK(comes_true([&] { return !(said = frozen.barrier()).empty(); }));
  CHECK(said.find("it does not answer a hello") != std::string::npos);
  CHECK(frozen.attempts > 1);
}

// Its host has gone, and another one has its address.
TEST(client_loses_a_silent_server_whose_place_another_has_taken) {
  OneServer one("tcp:test:0", 2000, [](OneServer& to, uint32_t nth) {
    const auto line = to.make();
    line->other = nth > 0;
    return line;
  });
  one.line(0)->cut = true;
  const std::string text = one.barrier();
  CHECK(text.find("another server has taken its place at tcp:test:0: hello of another run") !=
        std::string::npos);
  CHECK_EQ(one.lines(), 2u);
}

TEST(client_stays_with_a_connection_that_speaks_again) {
  std::atomic<bool> tried{false};
  OneServer server("tcp:127.0.0.1:1", 2000, [&](OneServer& self, uint32_t nth) {
    if (nth > 0) {
      // While another one is made.
      self.line(0)->cut = false;
      wire::Frame beat;
      beat.header.kind = FrameKind::kHeartbeat;
      self.line(0)->send(std::move(beat));
      tried = true;
    }
    return self.make();
  });
  server.line(0)->cut = true;
  CHECK(comes_true([&] { return tried.load(); }));
  CHECK(comes_true([&] { return server.lines() > 1 && server.line(1)->closed(); }));
  CHECK_EQ(server.barrier(), std::string());
  CHECK(!server.line(0)->closed());
  CHECK_EQ(server.client->stats().reconnects, 0u);
}

// An attempt to reach one that is cut off lasts; the broken link of another is made anew meanwhile.
TEST(client_looks_for_a_silent_server_beside_a_broken_link) {
  transport::ConnectionHandler* handler = nullptr;
  std::atomic<bool> attempted{false};
  std::atomic<bool> let_go{false};
  std::atomic<uint32_t> to_second{0};
  std::mutex mutex;
  std::vector<std::shared_ptr<Line>> lines;
  client::ClientOptions options;
  options.run_id = 7;
  options.servers = {{"tcp:127.0.0.1:1"}, {"tcp:127.0.0.1:2"}};
  options.liveness_ms = 6000;
  options.reconnect_grace_ms = 600000;
  client::Client client(options, [&](transport::ConnectionHandler* made_for) {
    handler = made_for;
    return std::make_shared<Scripted>([&](const std::string& address) {
      const bool second = address.ends_with(":2");
      const bool again = !second && [&] {
        const std::lock_guard lock(mutex);
        return !lines.empty() && lines.front()->cut;
      }();
      if (again) {
        attempted = true;
        comes_true([&] { return let_go.load(); });
        throw Error(ErrorCode::kAddress, "no answer within the deadline");
      }
      const auto line = std::make_shared<Line>(handler, address, second ? 1 : 0, 2);
      to_second += second ? 1 : 0;
      const std::lock_guard lock(mutex);
      lines.push_back(line);
      return line;
    });
  });
  client.connect();
  const auto silent = lines[0];
  const auto broken = lines[1];
  silent->cut = true;
  CHECK(comes_true([&] { return attempted.load(); }));
  broken->close("the cable is pulled");
  CHECK(comes_true([&] { return to_second == 2; }));
  silent->cut = false;
  wire::Frame beat;
  beat.header.kind = FrameKind::kHeartbeat;
  silent->send(std::move(beat));
  let_go = true;
  client.barrier();
  CHECK_EQ(client.stats().reconnects, 1u);
}

// What the kernel carries within a host is not lost on the way.
TEST(client_makes_no_second_connection_within_a_host) {
  OneServer server("unix:@test#boot", 300, [](OneServer& self, uint32_t) { return self.make(); });
  server.line(0)->cut = true;
  std::string said;
  CHECK(comes_true([&] { return !(said = server.barrier()).empty(); }));
  CHECK(said.find("silent for 300 ms (CPUDIST_LIVENESS_MS)") != std::string::npos);
  CHECK_EQ(server.attempts.load(), 1u);
}

}  // namespace
