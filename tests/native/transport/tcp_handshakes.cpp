// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Sockets with a key: who is let in, and that everybody else costs that connection only.

#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/wait.h"
#include "support/check.h"
#include "support/handshake_fixture.h"
#include "support/run_all.h"
#include "support/tcp_fixture.h"
#include "transport/tcp/prove.h"
#include "wire/control.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

using transport::Door;

// A server and a trainer, each with a key or without one.
struct KeyedPair {
  KeyedPair(const std::string& server_key, const std::string& trainer_key,
            Door::Limits limits = {256, 64}, uint64_t deadline_ms = 60000)
      : door(std::make_shared<Door>(limits)) {
    transport::ListenOptions options = listen_options();
    options.door = door;
    options.limits.handshake_deadline_ms = deadline_ms;
    if (!server_key.empty()) options.credentials = with_key(a_server(), server_key);
    listener = transport::listen_tcp(options, &server);
    connector = transport::make_tcp_connector(
        &client, options.limits,
        trainer_key.empty() ? nullptr : with_key(a_trainer(), trainer_key));
  }
  ~KeyedPair() {
    connector->stop();
    listener->stop();
  }
  std::string address(bool unix_socket) const {
    return listener->addresses().at(unix_socket ? 0 : 1);
  }
  // Connected, with a hello that the server has taken.
  std::shared_ptr<transport::Connection> greet(bool unix_socket) {
    const size_t before = server.frame_count();
    const auto connection = connector->connect(address(unix_socket), soon());
    CHECK(connection->send(frame_of(wire::FrameKind::kHello)));
    CHECK(server.wait_frames(before + 1));
    return connection;
  }
  // The same, by one who comes again while there is no place.
  std::shared_ptr<transport::Connection> greet_in_time() {
    const TimePoint deadline = soon();
    const size_t before = server.frame_count();
    while (Clock::now() < deadline) {
      try {
        const auto connection = connector->connect(address(false), deadline);
        if (connection->send(frame_of(wire::FrameKind::kHello))) {
          while (!connection->closed() && server.frame_count() == before &&
                 Clock::now() < deadline) {
            pass();
          }
          if (server.frame_count() > before) return connection;
        }
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kAddress);
      }
      pass();
    }
    return nullptr;
  }
  static void pass() { let_pass(std::chrono::milliseconds(5)); }
  std::string refused() const {
    const auto found = door->take_refusals(soon());
    CHECK_EQ(found.count, 1u);
    return found.newest.at(0).reason;
  }
  static wire::Frame frame_of(wire::FrameKind kind, size_t size_bytes = 10) {
    wire::Frame frame = make_frame(kind, 0, size_bytes);
    frame.header.run_id = a_trainer().run_id;
    frame.header.incarnation = a_trainer().incarnation;
    frame.header.rank = a_trainer().rank;
    return frame;
  }

  std::shared_ptr<Door> door;
  Recorder server;
  Recorder client;
  std::unique_ptr<transport::Listener> listener;
  std::shared_ptr<transport::Connector> connector;
};

bool begins(const std::string& text, const char* part) { return text.starts_with(part); }

std::vector<uint8_t> bytes_of(wire::Frame frame) {
  frame.header.length = frame.payload.size();
  frame.header.payload_crc = crc32c(frame.payload.data(), frame.payload.size());
  const auto header = wire::encode_header(frame.header);
  std::vector<uint8_t> bytes(header.begin(), header.end());
  const auto payload = frame.payload.bytes();
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  return bytes;
}

// Until the other end has closed, at most so long.
bool ends(const Descriptor& socket) {
  const TimePoint deadline = soon();
  char byte[4096];
  while (Clock::now() < deadline) {
    const ssize_t found = recv(socket.get(), byte, sizeof byte, MSG_DONTWAIT);
    if (found == 0) return true;
    if (found < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return true;
    if (found < 0) let_pass(std::chrono::milliseconds(1));
  }
  return false;
}

template <typename Condition>
bool waits_for(const Condition& condition) {
  const TimePoint deadline = soon();
  while (!condition() && Clock::now() < deadline) KeyedPair::pass();
  return condition();
}

}  // namespace

TEST(tcp_handshake_lets_in_who_has_the_key) {
  for (const bool unix_socket : {false, true}) {
    KeyedPair pair(kSecret, kSecret);
    const auto connection = pair.greet(unix_socket);
    CHECK(connection->send(KeyedPair::frame_of(wire::FrameKind::kPush, 1 << 20)));
    CHECK(pair.server.wait_frames(2));
    CHECK(pair.server.wait_opened(1));
    CHECK_EQ(pair.door->counts().refused, 0u);
    CHECK_EQ(pair.door->counts().waiting, 0u);
    connection->close("enough");
    CHECK(pair.server.wait_closed(1) && pair.client.wait_closed(1));
    CHECK_EQ(pair.server.broken_promises() + pair.client.broken_promises(), std::string());
  }
}

TEST(tcp_handshake_names_a_wrong_key_at_both_ends) {
  for (const bool unix_socket : {false, true}) {
    KeyedPair pair(kSecret, kOtherSecret);
    const std::string address = pair.address(unix_socket);
    std::string said;
    try {
      pair.connector->connect(address, soon());
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kAuthentication);
      said = error.what();
    }
    CHECK(begins(said, (address + ": wrong key: ").c_str()));
    CHECK(begins(pair.refused(), "wrong key: "));
    CHECK_EQ(pair.door->counts().refused, 1u);
  }
}

TEST(tcp_handshake_names_a_missing_key_at_the_server) {
  KeyedPair pair("", kSecret);
  try {
    pair.connector->connect(pair.address(false), soon());
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kAuthentication);
    CHECK(begins(error.what(), (pair.address(false) + ": no key there: ").c_str()));
  }
  CHECK(begins(pair.refused(), "no key here"));
}

TEST(tcp_handshake_names_a_missing_key_at_the_trainer) {
  KeyedPair pair(kSecret, "");
  const auto connection = pair.connector->connect(pair.address(false), soon());
  CHECK(connection->send(KeyedPair::frame_of(wire::FrameKind::kHello)));
  CHECK(pair.client.wait_frames(1));
  const auto frames = pair.client.take_frames();
  CHECK(frames[0].header.kind == wire::FrameKind::kError);
  const auto told = wire::decode_error(frames[0].payload.bytes());
  CHECK(told.code == ErrorCode::kAuthentication);
  CHECK(begins(told.message, "no key here: "));
  CHECK(begins(pair.refused(), "no key there: "));
  // Those that have not proven it are nothing that a server hears of.
  CHECK_EQ(pair.server.frame_count() + pair.server.closed_count(), 0u);
}

TEST(tcp_handshake_binds_frames_to_who_has_proven_it) {
  KeyedPair pair(kSecret, kSecret);
  const auto good = pair.greet(false);
  for (const int field : {0, 1, 2}) {
    const auto connection = pair.greet(false);
    wire::Frame frame = KeyedPair::frame_of(wire::FrameKind::kPush);
    if (field == 0) ++frame.header.rank;
    if (field == 1) ++frame.header.incarnation;
    if (field == 2) ++frame.header.run_id;
    const size_t before = pair.server.closed_count();
    CHECK(connection->send(std::move(frame)));
    CHECK(pair.server.wait_closed(before + 1));
    CHECK(pair.server.reason(before).find("which has proven that") != std::string::npos);
  }
  const auto later = pair.connector->connect(pair.address(false), soon());
  wire::Frame hello = KeyedPair::frame_of(wire::FrameKind::kHello);
  hello.header.incarnation = 0xffffffffu;
  CHECK(later->send(std::move(hello)));
  CHECK(pair.server.wait_closed(4));
  const size_t frames = pair.server.frame_count();
  CHECK(good->send(KeyedPair::frame_of(wire::FrameKind::kPush)));
  CHECK(pair.server.wait_frames(frames + 1));
}

// Garbage, a hello, half a handshake, one that is too long, a frame of another kind, a recorded
// one: each ends its own connection, is counted, and the trainer that is there goes on.
TEST(tcp_handshake_refuses_strangers_one_by_one) {
  KeyedPair pair(kSecret, kSecret);
  const auto good = pair.greet(false);
  wire::ConnectingHandshake recorded(with_key(a_trainer(4)), pair.address(false));
  wire::ListeningHandshake elsewhere(with_key(a_server()), pair.address(false));
  const auto challenge = bytes_of(recorded.challenge());
  auto replay = challenge;
  const auto proof = bytes_of(recorded.prove(elsewhere.answer(recorded.challenge())));
  replay.insert(replay.end(), proof.begin(), proof.end());
  wire::Frame huge = recorded.challenge();
  huge.payload = Buffer(4097);
  std::memset(huge.payload.data(), 0, 4097);
  auto long_one = bytes_of(std::move(huge));
  auto half = challenge;
  half.resize(100);
  auto twice = challenge;
  twice.insert(twice.end(), challenge.begin(), challenge.end());
  const std::vector<std::pair<std::vector<uint8_t>, const char*>> strangers = {
      {std::vector<uint8_t>(200, 'G'), "not a torch_cpudist frame"},
      {bytes_of(KeyedPair::frame_of(wire::FrameKind::kHello)), "no key there"},
      {bytes_of(KeyedPair::frame_of(wire::FrameKind::kPush)),
       "the first frame must be a handshake"},
      {long_one, "frame payload of 4097 bytes"},
      {twice, "step 1 of a handshake"},
      {replay, "wrong key"},
  };
  uint64_t count = 0;
  for (const auto& [bytes, why] : strangers) {
    const auto socket = raw_socket(pair.address(false));
    CHECK(raw_send(socket, bytes.data(), bytes.size()));
    CHECK(begins(pair.refused(), why));
    CHECK_EQ(pair.door->counts().refused, ++count);
    CHECK(ends(socket));
  }
  auto gone = raw_socket(pair.address(false));
  CHECK(raw_send(gone, half.data(), half.size()));
  gone.reset();
  // Who only goes, as those do that look whether somebody listens, and trainers that die, is no
  // stranger.
  CHECK(waits_for([&] { return pair.door->counts().waiting == 0; }));
  auto looking = raw_socket(pair.address(false));
  CHECK(waits_for([&] { return pair.door->counts().waiting == 1; }));
  looking.reset();
  CHECK(waits_for([&] { return pair.door->counts().waiting == 0; }));
  CHECK_EQ(pair.door->counts().refused, count);
  // But for one whose words are not ours.
  auto web = raw_socket(pair.address(false));
  CHECK(raw_send(web, "GET / HTTP/1.1", 14));
  web.reset();
  CHECK(begins(pair.refused(), "the peer closed the connection in the middle of a frame"));
  const size_t frames = pair.server.frame_count();
  CHECK(good->send(KeyedPair::frame_of(wire::FrameKind::kPush)));
  CHECK(pair.server.wait_frames(frames + 1));
  CHECK_EQ(pair.server.closed_count(), 0u);
}

TEST(tcp_handshake_has_a_deadline) {
  KeyedPair pair(kSecret, kSecret, {256, 64}, 300);
  const auto silent = raw_socket(pair.address(false));
  wire::ConnectingHandshake begun(with_key(a_trainer()), pair.address(false));
  const auto challenge = bytes_of(begun.challenge());
  const auto slow = raw_socket(pair.address(false));
  CHECK(raw_send(slow, challenge.data(), challenge.size()));
  for (size_t count = 0; count < 2;) {
    for (const auto& refusal : pair.door->take_refusals(soon()).newest) {
      CHECK(begins(refusal.reason, "no complete first frame within"));
      ++count;
    }
  }
  CHECK(ends(silent));
  CHECK_EQ(pair.door->counts().refused, 2u);
}

// With a key or without: so many wait, of one address or in total, and others get in.
TEST(tcp_idle_strangers_have_so_many_places) {
  for (const std::string& key : {kSecret, std::string()}) {
    const bool crowd = key.empty();
    KeyedPair pair(key, key, {crowd ? 8u : 64u, crowd ? 64u : 8u});
    const auto good = pair.greet(false);
    std::vector<Descriptor> idle;
    for (int i = 0; i < 50; ++i) idle.push_back(raw_socket(pair.address(false)));
    const auto later = pair.greet_in_time();
    CHECK(later != nullptr);
    CHECK(waits_for([&] { return pair.door->counts().turned_away > 0; }));
    CHECK(pair.door->counts().waiting <= 8);
    const size_t frames = pair.server.frame_count();
    CHECK(good->send(KeyedPair::frame_of(wire::FrameKind::kPush)));
    CHECK(later->send(KeyedPair::frame_of(wire::FrameKind::kPush)));
    CHECK(pair.server.wait_frames(frames + 2));
  }
}

// Who holds places with half a word, or with a challenge that nothing follows, of one address or in
// total, keeps nobody out who says a whole one at once.
TEST(tcp_strangers_who_begin_to_speak_keep_nobody_out) {
  struct Case {
    std::string key;
    bool challenges;
  };
  for (const Case& one : {Case{"", false}, Case{kSecret, false}, Case{kSecret, true}}) {
    for (const bool crowd : {false, true}) {
      const size_t places = one.challenges ? 6 : 4;  // with those for whole words, or without
      const Door::Limits limits{crowd ? 4u : 64u, crowd ? 64u : 4u, std::chrono::milliseconds(1)};
      KeyedPair pair(one.key, one.key, limits);
      const std::string address = pair.address(false);
      std::vector<uint8_t> said(1, static_cast<uint8_t>(wire::kMagic & 0xff));
      if (one.challenges) {
        wire::ConnectingHandshake handshake(with_key(a_trainer(), kSecret), address);
        said = bytes_of(handshake.challenge());
      }
      std::vector<Descriptor> strangers;
      while (pair.door->counts().waiting < places && strangers.size() < 100) {
        strangers.push_back(raw_socket(address));
        CHECK(raw_send(strangers.back(), said.data(), said.size()));
        KeyedPair::pass();
      }
      for (int i = 0; i < 3; ++i) {
        const auto later = pair.greet_in_time();
        CHECK(later != nullptr);
        // One of those with a whole word has left for it.
        const size_t left = one.challenges ? places - 1 : places;
        CHECK(waits_for([&] { return pair.door->counts().waiting == left; }));
      }
    }
  }
}

// Trainers behind one address, as containers are, who take their time between an answer and the
// proof: whoever has one of the places of all keeps it until it is through.
TEST(tcp_all_who_have_the_key_get_in_though_places_are_few) {
  constexpr int kPlaces = 4;
  KeyedPair pair(kSecret, kSecret, {64, kPlaces, std::chrono::milliseconds(250)}, 20000);
  const std::string address = pair.address(false);
  pair.server.on_each = [](const Recorder::Peer& connection, const wire::Frame&) {
    CHECK(connection->send(make_frame(wire::FrameKind::kHello, 0, 10)));
  };
  std::atomic<uint64_t> most{0};
  const auto enter = [&](uint16_t rank) {
    const std::atomic<bool> never{false};
    const transport::tcp::Address parsed = transport::tcp::parse_address(address);
    const TimePoint deadline = soon();
    while (Clock::now() < deadline) {
      try {
        const Descriptor socket = raw_socket(address);
        const transport::tcp::Blocking link(socket, parsed, deadline, never);
        wire::ConnectingHandshake handshake(with_key(a_trainer(rank)), address);
        link.send(handshake.challenge());
        const wire::Frame answer = link.receive();
        const uint64_t here = pair.door->counts().waiting;
        for (uint64_t seen = most; here > seen && !most.compare_exchange_weak(seen, here);) {
        }
        let_pass(std::chrono::milliseconds(30));
        link.send(handshake.prove(answer));
        wire::Frame hello = make_frame(wire::FrameKind::kHello, rank, 10);
        hello.header.run_id = a_trainer().run_id;
        hello.header.incarnation = a_trainer().incarnation;
        hello.header.rank = rank;
        link.send(std::move(hello));
        static_cast<void>(link.receive());
        return;
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kAddress);
      }
      KeyedPair::pass();
    }
    CHECK(false);
  };
  std::vector<std::function<void()>> calls;
  for (uint16_t rank = 0; rank < 4 * kPlaces; ++rank) {
    calls.push_back([&, rank] { enter(rank); });
  }
  run_all(calls);
  CHECK(most <= 2 * kPlaces);
  CHECK_EQ(pair.door->counts().refused, 0u);
}
