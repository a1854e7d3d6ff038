// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Hello, fencing, sequence numbers, probes, foreign frames and the memory cap.

#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

PushSpec one_step(uint64_t round = 0) {
  PushSpec spec;
  spec.round = round;
  spec.blocks[0] = {1, 1, 1, 1};
  return spec;
}

wire::ProbeReply probe_of(const wire::Frame& frame) {
  CHECK_EQ(frame.header.kind, wire::FrameKind::kProbeReply);
  return wire::decode_probe_reply(view(frame.payload));
}

}  // namespace

TEST(server_hello_is_checked) {
  server::Server server(server_options(2));
  const auto refused = [&](Trainer& trainer, uint64_t id, ErrorCode code, const char* part) {
    CHECK(contains(trainer.error(id, code), part));
    CHECK(trainer.connection()->closed());
    trainer.reconnect();
  };
  Trainer trainer(server, 0);
  refused(trainer, trainer.hello(3, 1), ErrorCode::kConfigMismatch, "number of trainers");
  refused(trainer, trainer.hello(2, 2), ErrorCode::kConfigMismatch, "number of servers");
  refused(trainer, trainer.hello(2, 1, 1), ErrorCode::kConfigMismatch, "shard");
  Trainer stranger(server, 2);
  refused(stranger, stranger.hello(2, 1), ErrorCode::kConfigMismatch, "trainer rank 2");
  wire::Hello hello{2, 1, 0, 0, "h"};
  wire::FrameHeader header = trainer.header(wire::FrameKind::kHello, wire::kNoParamSet, 90, 0);
  header.run_id = 1;
  trainer.deliver(header, encode(hello));
  refused(trainer, 90, ErrorCode::kProtocol, "another run");
  header = trainer.header(wire::FrameKind::kHello, wire::kNoParamSet, 91, 0);
  header.role = wire::Role::kServer;
  trainer.deliver(header, encode(hello));
  refused(trainer, 91, ErrorCode::kProtocol, "server");
  CHECK_EQ(server.stats().refused, 6u);

  const wire::Frame reply = trainer.reply(trainer.hello(2, 1), wire::FrameKind::kHello);
  CHECK_EQ(wire::decode_hello(view(reply.payload)).host, "host-s pid 1");
  CHECK_EQ(reply.header.role, wire::Role::kServer);
  CHECK_THROWS(trainer.hello(2, 1), Error);  // twice on one connection
}

TEST(server_frames_that_contradict_the_hello_close_the_connection) {
  server::Server server(server_options(2));
  Trainer trainer(server, 0);
  CHECK_THROWS(trainer.plain(wire::FrameKind::kHeartbeat, wire::kNoParamSet, Buffer()), Error);
  trainer.hello(2, 1);
  trainer.reply(trainer.plain(wire::FrameKind::kHeartbeat, wire::kNoParamSet, Buffer()),
                wire::FrameKind::kHeartbeatAck);
  for (int field = 0; field < 4; ++field) {
    wire::FrameHeader header =
        trainer.header(wire::FrameKind::kHeartbeat, wire::kNoParamSet, 50, 0);
    if (field == 0) header.run_id = 1;
    if (field == 1) header.incarnation = 9;
    if (field == 2) header.rank = 1;
    if (field == 3) header.role = wire::Role::kServer;
    CHECK_THROWS(trainer.deliver(header, Buffer()), Error);
  }
  CHECK_THROWS(trainer.plain(wire::FrameKind::kReply, 0, Buffer()), Error);
  const auto refused = [&](wire::FrameKind kind, bool coded, const char* part) {
    wire::FrameHeader header = trainer.header(kind, wire::kNoParamSet, 51, 0);
    header.coded = coded;
    try {
      trainer.deliver(header, Buffer());
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kProtocol);
      CHECK(contains(error.what(), part));
    }
  };
  refused(wire::FrameKind::kReply, false, "a server takes no frame of kind reply");
  refused(wire::FrameKind::kShuffle, false, "a server takes no frame of kind shuffle");
  refused(wire::FrameKind::kFetchState, true, "a coded frame of kind fetch");
  CHECK(trainer.waits(50));
}

TEST(server_malformed_payloads_leave_no_trace) {
  World world(1);
  Buffer junk(24);
  std::memset(junk.data(), 0xff, junk.size());
  for (const auto kind : {wire::FrameKind::kOpen, wire::FrameKind::kStore, wire::FrameKind::kPush,
                          wire::FrameKind::kCommit, wire::FrameKind::kJoin}) {
    CHECK_THROWS(world[0].ask(kind, junk.share(), kind == wire::FrameKind::kOpen ? 5 : 0), Error);
    world[0].take_back();
  }
  CHECK_THROWS(world[0].plain(wire::FrameKind::kPullRows, 0, junk.share()), Error);
  CHECK_THROWS(world[0].plain(wire::FrameKind::kFetchState, 0, junk.share()), Error);
  CHECK_EQ(world.server.stats().refused, 7u);
  world[0].reply(world.push(0, one_step()));  // the same number is still free
}

TEST(server_duplicates_get_the_recorded_reply) {
  World world(1);
  const auto id = world.push(0, one_step());
  const auto expected = world.dense(world[0].reply(id)).version.round;
  for (uint64_t repeat = 100; repeat < 103; ++repeat) {
    world[0].deliver(world[0].header(wire::FrameKind::kPush, 0, repeat, world[0].sequence()),
                     make_push(world.layout, one_step()));
    const wire::Frame again = world[0].reply(repeat);
    CHECK_EQ(world.dense(again).version.round, expected);
    CHECK_EQ(world.dense(again).blocks.size(), 1u);
  }
  CHECK_EQ(world.floats(0)[0], 9.0f);
  CHECK_EQ(world.server.stats().duplicates, 3u);
  CHECK_EQ(world.server.stats().pushes, 1u);
  // Older than the last: the trainer has its answer already.
  world[0].deliver(world[0].header(wire::FrameKind::kPush, 0, 200, 1), Buffer());
  CHECK(world[0].waits(200));
}

TEST(server_duplicate_of_a_waiting_request_only_rebinds_the_answer) {
  World world(2);
  const auto id = world.push(0, one_step());
  const uint64_t again = world[0].next_request();
  world[0].disconnect();
  world[0].reconnect();
  const wire::Frame hello = world[0].reply(world[0].hello(2, 1), wire::FrameKind::kHello);
  CHECK_EQ(wire::decode_hello(view(hello.payload)).last_sequence, world[0].sequence() - 1);
  world[0].deliver(world[0].header(wire::FrameKind::kPush, 0, again, world[0].sequence()),
                   make_push(world.layout, one_step()));
  CHECK(world[0].waits(again));
  world.push(1, one_step());
  world[0].reply(again);
  CHECK(world[0].waits(id));
  CHECK_EQ(world.floats(0)[0], 9.0f);
}

TEST(server_a_gap_is_an_error_and_changes_nothing) {
  World world(1);
  const uint64_t next = world[0].sequence() + 1;
  world[0].deliver(world[0].header(wire::FrameKind::kPush, 0, 60, next + 1),
                   make_push(world.layout, one_step()));
  const auto text = world[0].error(60, ErrorCode::kProtocol);
  CHECK(contains(text, "expected request " + std::to_string(next)));
  world[0].reply(world.push(0, one_step()));
  CHECK_EQ(world.floats(0)[0], 9.0f);
}

TEST(server_probe_answers_known_unknown_and_done) {
  World world(3);
  const auto id = world.push(1, one_step());
  CHECK(world[1].waits(id));
  const auto ask = [&](uint64_t sequence) {
    return world[1].answer(world[1].plain(wire::FrameKind::kProbe, 0, Buffer(), sequence));
  };
  wire::ProbeReply reply = probe_of(ask(world[1].sequence()));
  CHECK(reply.known);
  CHECK(reply.waiting_for == std::vector<uint32_t>({0, 2}));
  reply = probe_of(ask(world[1].sequence() + 1));
  CHECK(!reply.known);
  world.push(0, one_step());
  world.push(2, one_step());
  CHECK_EQ(ask(world[1].sequence()).header.kind, wire::FrameKind::kReply);
  const auto old = world[1].plain(wire::FrameKind::kProbe, 0, Buffer(), 1);
  CHECK(world[1].waits(old));
}

TEST(server_probe_of_a_barrier_and_of_ready) {
  World world(small_layout(), server_options(3), false);
  const auto probe = [&](size_t rank) {
    const auto id = world[rank].plain(wire::FrameKind::kProbe, 0, Buffer(), world[rank].sequence());
    return probe_of(world[rank].answer(id)).waiting_for;
  };
  world[2].ask(wire::FrameKind::kReady);
  CHECK(probe(2) == std::vector<uint32_t>({0}));
  world[1].ask(wire::FrameKind::kBarrier, Buffer(), wire::kNoParamSet);
  CHECK(probe(1) == std::vector<uint32_t>({0, 2}));
}

TEST(server_newer_incarnation_fences_the_older) {
  server::ServerOptions options = server_options(2);
  options.elastic = true;
  World world(small_layout(), options);
  world.push(1, one_step());  // parked, and then forgotten with its sender
  Trainer reborn(world.server, 1, 2);
  const wire::Frame hello = reborn.reply(reborn.hello(2, 1), wire::FrameKind::kHello);
  CHECK_EQ(wire::decode_hello(view(hello.payload)).last_sequence, 0u);
  CHECK(world[1].connection()->closed());
  CHECK(contains(world[1].error(0, ErrorCode::kFenced), "incarnation 2"));
  CHECK_THROWS(world[1].plain(wire::FrameKind::kHeartbeat, wire::kNoParamSet, Buffer()), Error);
  CHECK_EQ(world.server.stats().pending_bytes, 0u);
  world[1].reconnect();
  world[1].error(world[1].hello(2, 1), ErrorCode::kFenced);

  reborn.reply(reborn.ask(wire::FrameKind::kOpen, encode(world.layout)));
  world.push(0, one_step());
  reborn.reply(reborn.ask(wire::FrameKind::kPush, make_push(world.layout, one_step())));
  CHECK_EQ(world.floats(0)[0], 9.0f);
}

TEST(server_second_connection_replaces_the_first) {
  World world(1);
  const auto old = world[0].connection();
  world[0].reconnect();
  world[0].reply(world[0].hello(1, 1), wire::FrameKind::kHello);
  CHECK(old->closed());
  world.server.on_close(old, "late");  // must not take the new link for broken
  world[0].reply(world.push(0, one_step()));
  CHECK_EQ(world.server.stats().connections, 1u);
  CHECK_EQ(world.server.stats().bytes_received, 40u);
}

TEST(server_memory_cap_rejects_without_recording) {
  const auto size = make_push(small_layout(), one_step()).size();
  server::ServerOptions options = server_options(3);
  options.memory_cap_bytes = 2 * size + values_bytes(small_layout(), options);
  World world(small_layout(), options);
  const auto first = world.push(0, one_step());
  world.push(1, one_step());
  CHECK_EQ(world.server.stats().pending_bytes, 2 * size);
  const auto third = world.push(2, one_step());
  const std::string text = world[2].error(third, ErrorCode::kOverloaded);
  CHECK(contains(text, "CPUDIST_SERVER_MEMORY_CAP_BYTES"));
  world[2].take_back();
  world[2].reply(world[2].ask(wire::FrameKind::kLeave));  // under the same number
  world[0].reply(first);
  CHECK_EQ(world.server.stats().pending_bytes, 0u);
}

TEST(server_memory_cap_that_no_round_fits_is_refused_when_opening) {
  const uint64_t dense_bytes = 4 * sizeof(float) + 3 * sizeof(double);
  server::ServerOptions options = server_options(3);
  options.memory_cap_bytes = 3 * dense_bytes - 1;
  server::Server server(options);
  Trainer trainer(server, 0);
  trainer.reply(trainer.hello(options.trainer_count, options.server_count),
                wire::FrameKind::kHello);
  const auto open = trainer.ask(wire::FrameKind::kOpen, encode(small_layout()));
  const std::string text = trainer.error(open, ErrorCode::kOverloaded);
  CHECK(contains(text, std::to_string(3 * dense_bytes)));
  CHECK(contains(text, "CPUDIST_SERVER_MEMORY_CAP_BYTES"));
}

}  // namespace cpudist::testing
