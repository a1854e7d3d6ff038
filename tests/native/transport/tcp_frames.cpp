// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Frames of all sizes over TCP and unix sockets, from many threads, and stopping in the middle.

#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "support/check.h"
#include "support/tcp_fixture.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

// Answers every frame with its own payload.
void echo(const std::shared_ptr<transport::Connection>& connection, wire::Frame& frame) {
  connection->send(wire::Frame{frame.header, frame.payload.share()});
}

void check_sizes(bool unix_socket) {
  TcpPair pair;
  pair.server.on_each = echo;
  const auto connection = pair.greet(unix_socket);
  const size_t sizes[] = {0, 1, 63, 64, 65, 4096, 65472, 65536, 65537, 1 << 20, 5 << 20, 0, 1};
  uint64_t sent = wire::kHeaderBytes;
  for (size_t i = 0; i < std::size(sizes); ++i) {
    const auto fill = static_cast<uint8_t>(i);
    CHECK(connection->send(make_frame(wire::FrameKind::kPush, i + 1, sizes[i], fill)));
    sent += wire::kHeaderBytes + sizes[i];
  }
  CHECK(pair.client.wait_frames(1 + std::size(sizes)));
  const auto frames = pair.client.take_frames();
  for (size_t i = 0; i < std::size(sizes); ++i) {
    CHECK_EQ(frames[i + 1].header.request_id, i + 1);
    CHECK(has_fill(frames[i + 1], sizes[i], static_cast<uint8_t>(i)));
    CHECK_EQ(frames[i + 1].header.payload_crc == 0, unix_socket || sizes[i] == 0);
  }
  CHECK_EQ(connection->bytes_sent(), sent);
  CHECK_EQ(connection->bytes_received(), sent);
  CHECK_EQ(pair.broken_promises(), std::string());
}

void check_threads(bool unix_socket) {
  constexpr size_t kConnections = 8;
  constexpr size_t kThreads = 2;
  constexpr size_t kCount = 25;
  TcpPair pair;
  pair.server.on_each = echo;
  pair.server.keep_frames = false;
  std::vector<std::shared_ptr<transport::Connection>> connections;
  for (size_t c = 0; c < kConnections; ++c) connections.push_back(pair.greet(unix_socket));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kConnections * kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < kCount; ++i) {
        const uint64_t id = 1 + t * kCount + i;
        const size_t size = (id * 7919) % 20000;
        connections[t % kConnections]->send(
            make_frame(wire::FrameKind::kPush, id, size, static_cast<uint8_t>(id)));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  constexpr size_t kAll = kConnections * kThreads * kCount;
  CHECK(pair.client.wait_frames(kConnections + kAll));
  std::vector<bool> seen(kAll + 1);
  for (const wire::Frame& frame : pair.client.take_frames()) {
    const uint64_t id = frame.header.request_id;
    if (id == 0) continue;  // the hello
    CHECK(!seen.at(id));
    seen[id] = true;
    CHECK(has_fill(frame, (id * 7919) % 20000, static_cast<uint8_t>(id)));
  }
  CHECK_EQ(pair.broken_promises(), std::string());
}

}  // namespace

TEST(tcp_frames_of_all_sizes) { check_sizes(false); }
TEST(unix_frames_of_all_sizes) { check_sizes(true); }
TEST(tcp_connections_and_threads) { check_threads(false); }
TEST(unix_connections_and_threads) { check_threads(true); }

TEST(tcp_addresses_say_where_to_connect) {
  TcpPair pair;
  const auto addresses = pair.listener->addresses();
  CHECK_EQ(addresses.size(), 2u);
  CHECK(addresses[0].starts_with("unix:@cpudist-"));
  CHECK(addresses[0].ends_with("#" + transport::tcp::boot_id()));
  CHECK(addresses[1].starts_with("tcp:127.0.0.1:"));
  const uint32_t refused = code(ErrorCode::kAddress);
  const auto connect = [&](const std::string& text) {
    return error_code([&] { pair.connector->connect(text, soon()); });
  };
  CHECK_EQ(connect(addresses[0].substr(0, addresses[0].find('#')) + "#another-boot"), refused);
  CHECK_EQ(connect("unix:@cpudist-nobody#" + transport::tcp::boot_id()), refused);
  for (const char* text :
       {"tcp:localhost:80", "tcp:127.0.0.1", "tcp:127.0.0.1:0", "tcp:[::1]:x",
        "tcp:127.0.0.1:65536", "unix:@name", "unix:@#boot", "", "udp:1.2.3.4:5"}) {
    CHECK_EQ(connect(text), refused);
  }
}

TEST(tcp_ports_are_taken_from_the_range) {
  transport::ListenOptions options;
  options.unix_socket = false;
  Recorder handler;
  const auto first = listen_tcp(options, &handler);
  const std::string address = first->addresses().front();
  const auto port = static_cast<uint16_t>(std::stoul(address.substr(address.rfind(':') + 1)));
  options.port_first = port;
  CHECK_EQ(error_code([&] { listen_tcp(options, &handler); }), code(ErrorCode::kAddress));
  options.bind_address = "192.0.2.1";  // of no interface (RFC 5737)
  CHECK_EQ(error_code([&] { listen_tcp(options, &handler); }), code(ErrorCode::kAddress));
  options.bind_address = "localhost";
  CHECK_EQ(error_code([&] { listen_tcp(options, &handler); }), code(ErrorCode::kAddress));
  options.bind_address = "127.0.0.1";
  first->stop();
  const auto again = listen_tcp(options, &handler);
  CHECK_EQ(again->addresses().front(), address);
}

TEST(tcp_connect_to_nobody_says_why) {
  TcpPair pair;
  const std::string address = pair.address(false);
  pair.listener->stop();
  try {
    pair.connector->connect(address, soon());
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kAddress);
    const std::string text = error.what();
    CHECK(text.find(address) != std::string::npos);
    CHECK(text.find("refused") != std::string::npos);
  }
}

TEST(tcp_stop_during_traffic_ends_all_callbacks) {
  TcpPair pair;
  pair.server.keep_frames = false;
  std::vector<std::shared_ptr<transport::Connection>> connections;
  for (int t = 0; t < 4; ++t) connections.push_back(pair.greet(t % 2 == 0));
  std::vector<std::thread> threads;
  for (const auto& connection : connections) {
    threads.emplace_back([connection] {
      while (connection->send(make_frame(wire::FrameKind::kPush, 1, 3000))) {
      }
    });
  }
  const bool traffic = pair.server.wait_frames(50);
  pair.listener->stop();
  const size_t frames = pair.server.frame_count();
  const size_t closed = pair.server.closed_count();
  const bool all_closed = pair.client.wait_closed(4);
  for (auto& thread : threads) thread.join();
  CHECK(traffic && all_closed);
  CHECK_EQ(closed, 4u);
  CHECK_EQ(pair.server.frame_count(), frames);
  CHECK_EQ(pair.broken_promises(), std::string());
}

TEST(tcp_refuses_use_in_a_forked_child) {
  TcpPair pair;
  const auto connection = pair.greet(true);
  const pid_t child = fork();
  if (child == 0) {
    const auto use = [&] { connection->send(make_frame(wire::FrameKind::kPush, 1, 1)); };
    const bool refused = error_code(use) == code(ErrorCode::kClosed) &&
                         error_code([&] { pair.connect(true); }) == code(ErrorCode::kClosed);
    connection->close("in the child");
    pair.listener.reset();  // neither joins nor shuts anything down
    pair.connector.reset();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK(connection->send(make_frame(wire::FrameKind::kPush, 2, 1)));
  CHECK(pair.server.wait_frames(2));
}
