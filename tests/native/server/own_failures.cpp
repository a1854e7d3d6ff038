// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What goes wrong inside a server is told as its own failure, not as a violation by its peer.

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "support/failing_new.h"
#include "support/patience.h"
#include "support/remote_fixture.h"

namespace cpudist::testing {
namespace {

// What the server throws to the channel, and answers, when this is thrown while it greets.
std::string failure_of_hello(std::exception_ptr planted, ErrorCode code) {
  server::Server server(server_options(1));
  Trainer trainer(server, 0);
  trainer.connection()->fail_address(std::move(planted));
  std::string thrown;
  try {
    trainer.hello(1, 1);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), code);
    thrown = error.what();
  }
  CHECK_EQ(trainer.error(1, code), thrown);
  CHECK_EQ(server.stats().refused, 0u);
  CHECK_EQ(server.stats().trainers, 0u);
  // Nothing is left of it: the trainer comes again.
  trainer.disconnect();
  trainer.reconnect();
  trainer.reply(trainer.hello(1, 1), wire::FrameKind::kHello);
  CHECK_EQ(server.stats().trainers, 1u);
  return thrown;
}

// What a client does about a push of which it has no answer: it asks, and sends the push again
// where nobody knows of it. Whether it has its answer.
bool has_answer(World& world, size_t rank, const Buffer& push) {
  Trainer& trainer = world[rank];
  const uint64_t sequence = trainer.sequence();
  const auto probe = trainer.plain(wire::FrameKind::kProbe, 0, Buffer(), sequence);
  const wire::Frame frame = trainer.answer(probe);
  if (frame.header.kind != wire::FrameKind::kProbeReply) return true;
  if (!wire::decode_probe_reply(view(frame.payload)).known) {
    trainer.deliver(trainer.header(wire::FrameKind::kPush, 0, trainer.next_request(), sequence),
                    push.share());
  }
  return false;
}

// The last push of a round, with `count` allocations failing in a row: whatever becomes of the
// round, everybody gets an answer.
void strand_nobody(int64_t count, double clip_norm) {
  constexpr size_t kTrainers = 3;
  int64_t attempts = 0;
  at_every_allocation([&](int64_t nth) {
    World world(remote_layout(), server_options(kTrainers), false);
    make_ready(world);
    wire::PushHeader header;
    header.clip_norm = clip_norm;
    const Buffer push = remote_push(world, header, {{3, 1.0f}, {60, 0.5f}});
    for (size_t rank = 0; rank + 1 < kTrainers; ++rank) {
      world[rank].ask(wire::FrameKind::kPush, push.share());
    }
    bool happened = false;
    {
      Buffer given = push.share();
      const FailingNew failing(nth, count);
      try {
        world[kTrainers - 1].ask(wire::FrameKind::kPush, std::move(given));
      } catch (const std::exception&) {
        // told to the channel
      }
      happened = failing.happened();
    }
    // A trainer whose push has failed pushes once more: the others may wait for it.
    bool settled = false;
    for (int round = 0; !settled; ++round) {
      CHECK(round < 8);
      settled = true;
      for (size_t rank = 0; rank < kTrainers; ++rank) {
        if (has_answer(world, rank, push)) continue;
        settled = false;
        if (round == 2) world[kTrainers - 1].ask(wire::FrameKind::kPush, push.share());
      }
    }
    if (clip_norm == 0) CHECK_EQ(world.server.stats().pending_bytes, 0u);
    ++attempts;
    return happened;
  });
  CHECK(attempts > 20);
}

}  // namespace

TEST(server_out_of_memory_in_a_round_strands_nobody) {
  for (const int64_t count : {1, 2, 4, 12}) strand_nobody(count, 0.0);
}

TEST(server_out_of_memory_in_a_round_of_two_phases_strands_nobody) {
  for (const int64_t count : {1, 3}) strand_nobody(count, 1.0);
}

// A newer incarnation takes over as a whole, or the older one goes on.
TEST(server_out_of_memory_at_a_hello_changes_nothing) {
  int64_t failed = 0;
  at_every_allocation([&](int64_t nth) {
    server::ServerOptions options = server_options(1);
    options.elastic = true;
    server::Server server(options);
    Trainer old(server, 0);
    old.reply(old.hello(1, 1), wire::FrameKind::kHello);
    Trainer fresh(server, 0, 2);
    bool happened = false;
    bool refused = false;
    {
      const FailingNew failing(nth);
      try {
        fresh.hello(1, 1);
      } catch (const Error&) {
        refused = true;
      } catch (const std::bad_alloc&) {
        // Before the server saw it, or while it was answered.
      }
      happened = failing.happened();
    }
    if (refused) {
      ++failed;
      CHECK(!old.connection()->closed());
      old.reply(old.plain(wire::FrameKind::kHeartbeat, wire::kNoParamSet, Buffer()),
                wire::FrameKind::kHeartbeatAck);
      fresh.disconnect();
      fresh.reconnect();
    }
    if (refused) fresh.reply(fresh.hello(1, 1), wire::FrameKind::kHello);
    return happened;
  });
  CHECK(failed > 5);
}

TEST(server_out_of_memory_at_a_push_leaves_no_pending_bytes) {
  int64_t failed = 0;
  at_every_allocation([&](int64_t nth) {
    World world(2);
    PushSpec spec;
    spec.blocks[0] = {1, 2, 3, 4};
    spec.tables[0] = {{3, 1.0f}};
    Buffer push = make_push(world.layout, spec);
    const uint64_t size = push.size();
    bool happened = false;
    uint64_t request = 0;
    {
      const FailingNew failing(nth);
      try {
        request = world[0].ask(wire::FrameKind::kPush, std::move(push));
      } catch (const std::exception&) {
        ++failed;  // told to the channel
      }
      happened = failing.happened();
    }
    const bool waits = request != 0 && world[0].waits(request);
    if (!waits) ++failed;
    CHECK_EQ(world.server.stats().pending_bytes, waits ? size : 0u);
    return happened;
  });
  CHECK(failed > 5);
}

// Whatever fails once the gradient is in, no later event applies it again.
TEST(server_out_of_memory_at_a_commit_applies_nothing_twice) {
  int64_t attempts = 0;
  at_every_allocation([&](int64_t nth) {
    World world(2);
    PushSpec spec;
    spec.clip_norm = 100;
    spec.blocks[0] = {4, 0, 0, 0};
    world.push(0, spec);
    world.push(1, spec);
    const auto ask = [&](size_t rank, wire::FrameKind kind, Buffer payload) {
      try {
        world[rank].ask(kind, std::move(payload));
      } catch (const std::exception&) {
        // told to the channel
      }
    };
    const Buffer commit = encode(wire::Commit{0, {4.0}});
    bool happened = false;
    {
      Buffer first = commit.share();
      const FailingNew failing(nth);
      ask(1, wire::FrameKind::kCommit, std::move(first));
      happened = failing.happened();
    }
    ask(0, wire::FrameKind::kCommit, commit.share());
    ask(0, wire::FrameKind::kLeave, Buffer());
    CHECK(world.server.stats().rounds <= 1);
    ++attempts;
    return happened;
  });
  CHECK(attempts > 5);
}

// Those who wait are told of a loss however often its telling fails.
TEST(server_out_of_memory_in_the_liveness_thread_is_made_up_for) {
  int64_t failed = 0;
  at_every_allocation([&](int64_t nth) {
    server::ServerOptions options = server_options(2);
    options.reconnect_grace_ms = 1;
    options.liveness_ms = 600;
    World world(small_layout(), options);
    const auto push = world.push(0, {});
    const FailingNewElsewhere failing(nth);
    world[1].disconnect();
    const TimePoint deadline = Clock::now() + kPatience;
    auto answered = push;
    // An answer that there was no memory to send is recorded: a client asks for it.
    while (!world[0].connection()->wait_for_answer(push,
                                                   Clock::now() + std::chrono::milliseconds(10))) {
      CHECK(Clock::now() < deadline);
      const auto probe = world[0].plain(wire::FrameKind::kProbe, 0, Buffer(), world[0].sequence());
      if (world[0].answer(probe).header.kind == wire::FrameKind::kProbeReply) continue;
      answered = probe;
      break;
    }
    world[0].error(answered, ErrorCode::kPeerLost);
    if (failing.happened()) ++failed;
    return failing.happened();
  });
  CHECK(failed > 5);
}

TEST(server_out_of_memory_is_overloaded) {
  const auto text =
      failure_of_hello(std::make_exception_ptr(std::bad_alloc()), ErrorCode::kOverloaded);
  CHECK(contains(text, "server 0 (host-s pid 1)"));
  CHECK(contains(text, "of trainer 0: it has no memory left"));
}

TEST(server_that_fails_otherwise_has_an_internal_error) {
  const auto text = failure_of_hello(std::make_exception_ptr(std::runtime_error("planted")),
                                     ErrorCode::kInternal);
  CHECK(contains(text, "of trainer 0: planted"));
}

TEST(server_error_of_a_peer_stays_a_protocol_violation) {
  server::Server server(server_options(1));
  Trainer trainer(server, 0);
  bool thrown = false;
  try {
    trainer.ask(wire::FrameKind::kBarrier);  // before the hello
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kProtocol);
    thrown = true;
  }
  CHECK(thrown);
  CHECK_EQ(server.stats().refused, 1u);
}

}  // namespace cpudist::testing
