// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Messages between ranks that are threads: tags, both directions, sources, sizes; and processes
// that end.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <string>
#include <thread>

#include "base/errors.h"
#include "support/check.h"
#include "support/shm_fixture.h"

namespace cpudist::shm {
namespace {

constexpr size_t kLarge = 3'000'001;  // more than a ring holds

std::shared_ptr<Message> message_of(bool sends, int peer, int64_t tag, std::string& data) {
  auto message = std::make_shared<Message>();
  message->sends = sends;
  message->peer = peer;
  message->tag = tag;
  message->data = reinterpret_cast<std::byte*>(data.data());
  message->size_bytes = data.size();
  message->timeout = kLimit;
  return message;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST(shm_large_messages_cross) {
  run_ranks(2, [](Group& group, int rank) {
    for (int i = 0; i < 3; ++i) {
      std::string out(kLarge, static_cast<char>('a' + rank)), in(kLarge, '?');
      const auto send = message_of(true, 1 - rank, 0, out);
      const auto receive = message_of(false, 1 - rank, 0, in);
      group.messages.submit(send);
      group.messages.submit(receive);
      group.messages.wait(*send, std::nullopt);
      group.messages.wait(*receive, std::nullopt);
      CHECK(in == std::string(kLarge, static_cast<char>('b' - rank)));
    }
  });
}

TEST(shm_receives_are_matched_by_tag_and_source) {
  run_ranks(3, [](Group& group, int rank) {
    std::string data[4] = {"zero", "one ", "two ", std::string(kLarge, 'x')};
    if (rank != 0) {
      for (int tag = 0; tag < 4; ++tag) {
        const auto send = message_of(true, 0, tag, data[tag]);
        group.messages.submit(send);
        group.messages.wait(*send, std::nullopt);
      }
      return;
    }
    for (const int peer : {2, 1}) {
      for (const int tag : {3, 1, 0}) {
        std::string in(data[tag].size(), '?');
        const auto receive = message_of(false, peer, tag, in);
        group.messages.submit(receive);
        group.messages.wait(*receive, std::nullopt);
        CHECK(in == data[tag]);
      }
    }
    int sources = 0;
    for (int i = 0; i < 2; ++i) {
      std::string in(4, '?');
      const auto receive = message_of(false, kAnySource, 2, in);
      group.messages.submit(receive);
      group.messages.wait(*receive, std::nullopt);
      CHECK(in == data[2]);
      sources += receive->peer;
    }
    CHECK_EQ(sources, 3);
  });
}

// A receive that is asked for while a message of its tag is half put aside, for another tag.
TEST(shm_messages_of_one_tag_keep_their_order) {
  std::atomic<bool> sent{false};
  run_ranks(2, [&](Group& group, int rank) {
    std::string data[3] = {std::string(kLarge, 'a'), std::string(kLarge, 'b'), "c"};
    const int64_t tags[3] = {1, 1, 2};
    std::shared_ptr<Message> messages[3];
    if (rank == 0) {
      for (int i = 0; i < 3; ++i) {
        messages[i] = message_of(true, 1, tags[i], data[i]);
        group.messages.submit(messages[i]);
      }
      sent = true;
    } else {
      while (!sent) std::this_thread::yield();
      for (std::string& one : data) one.assign(one.size(), '?');
      for (const int i : {2, 0, 1}) {
        messages[i] = message_of(false, 0, tags[i], data[i]);
        group.messages.submit(messages[i]);
      }
    }
    for (const auto& one : messages) group.messages.wait(*one, std::nullopt);
    for (int i = 0; i < 3; ++i) {
      CHECK(data[i].find_first_not_of(static_cast<char>('a' + i)) == std::string::npos);
    }
    group.engine.submit({call_of(Kind::kBarrier, DType::kBytes, 0), kLimit});
  });
}

TEST(shm_messages_go_on_beside_collectives) {
  run_ranks(2, [](Group& group, int rank) {
    std::string data(kLarge, static_cast<char>('a' + rank));
    const auto message = message_of(rank == 0, 1 - rank, 5, data);
    if (rank == 0) {
      group.messages.submit(message);  // larger than a ring: a thread goes on with it
      group.engine.submit({call_of(Kind::kBarrier, DType::kBytes, 0), kLimit});
    } else {
      group.messages.submit(message);
      group.messages.wait(*message, std::nullopt);
      CHECK(data == std::string(kLarge, 'a'));
      group.engine.submit({call_of(Kind::kBarrier, DType::kBytes, 0), kLimit});
    }
    group.messages.wait(*message, std::nullopt);
  });
}

TEST(shm_messages_of_another_size_are_told_to_both) {
  std::atomic<int> told{0};
  run_ranks(2, [&](Group& group, int rank) {
    std::string data(rank == 0 ? 100 : 99, 'x');
    const auto message = message_of(rank == 0, 1 - rank, 0, data);
    try {
      group.messages.submit(message);
      group.messages.wait(*message, std::nullopt);
      group.engine.submit({call_of(Kind::kBarrier, DType::kBytes, 0), kLimit});
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kConfigMismatch);
      ++told;
    }
  });
  CHECK_EQ(told.load(), 2);
}

TEST(shm_messages_of_another_dtype_are_told_to_both) {
  std::atomic<int> told{0};
  run_ranks(2, [&](Group& group, int rank) {
    std::string data(8, 'x');
    const auto message = message_of(rank == 0, 1 - rank, 0, data);
    message->dtype = rank == 0 ? DType::kF32 : DType::kI32;
    try {
      group.messages.submit(message);
      group.messages.wait(*message, std::nullopt);
      group.engine.submit({call_of(Kind::kBarrier, DType::kBytes, 0), kLimit});
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kConfigMismatch);
      const std::string wanted = "sends 8 bytes of float32 with tag 0, rank 1 expects 8 bytes of ";
      CHECK(std::string(error.what()).find(wanted) != std::string::npos);
      ++told;
    }
  });
  CHECK_EQ(told.load(), 2);
}

// Ranks leave one after the other; what the last one sent before is received all the same.
TEST(shm_a_receive_from_anybody_waits_for_those_that_are_there) {
  const Segment segment = Segment::create(3, 7);
  std::atomic<int> here{0};
  std::atomic<bool> first_left{false};
  std::string data[2] = {"from 2", "??????"};
  const auto rank = [&](int me) {
    Group group(segment, me, names_of(3), kLimit);
    ++here;
    while (here != 3) std::this_thread::yield();
    if (me == 1) return;
    if (me == 2) {
      while (!first_left) std::this_thread::yield();
      // Longer than it takes to see that rank 1 has left.
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      const auto send = message_of(true, 0, 0, data[0]);
      group.messages.submit(send);
      group.messages.wait(*send, std::nullopt);
      return;
    }
    const auto receive = message_of(false, kAnySource, 0, data[1]);
    group.messages.submit(receive);
    first_left = true;
    group.messages.wait(*receive, std::nullopt);
    CHECK_EQ(receive->peer, 2);
    CHECK(data[1] == data[0]);
    const auto begin = Clock::now();
    try {
      const auto never = message_of(false, kAnySource, 0, data[1]);
      group.messages.submit(never);
      group.messages.wait(*never, std::nullopt);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kPeerLost);
      CHECK(std::string(error.what()).find("has left the group") != std::string::npos);
    }
    CHECK(Clock::now() - begin < std::chrono::seconds(2));
  };
  testing::run_all({[&] { rank(0); }, [&] { rank(1); }, [&] { rank(2); }});
}

TEST(shm_a_send_to_who_has_left_is_told) {
  std::atomic<bool> left{false};
  const Segment segment = Segment::create(2, 7);
  const auto rank = [&](int me) {
    {
      Group group(segment, me, names_of(2), kLimit);
      if (me == 0) {
        while (!left) std::this_thread::yield();
        std::string data = "nobody reads it";
        const auto send = message_of(true, 1, 0, data);
        try {
          group.messages.submit(send);
          group.messages.wait(*send, std::nullopt);
          CHECK(false);
        } catch (const Error& error) {
          CHECK(error.code() == ErrorCode::kPeerLost);
        }
      }
    }
    left = true;
  };
  testing::run_all({[&] { rank(0); }, [&] { rank(1); }});
}

// A send that finds its rank gone ends the group, but not before what has come is taken.
TEST(shm_what_has_come_is_received_before_a_send_finds_its_rank_gone) {
  std::atomic<bool> waits{false}, left{false};
  const Segment segment = Segment::create(2, 7);
  std::string sent = "the last words", got = "??????????????";
  const auto rank = [&](int me) {
    {
      Group group(segment, me, names_of(2), kLimit);
      if (me == 1) {
        while (!waits) std::this_thread::yield();
        const auto send = message_of(true, 0, 0, sent);
        group.messages.submit(send);
        group.messages.wait(*send, std::nullopt);
      } else {
        const auto receive = message_of(false, 1, 0, got);
        group.messages.submit(receive);
        waits = true;
        while (!left) std::this_thread::yield();
        const auto send = message_of(true, 1, 0, sent);
        CHECK(!error_of([&] {
                 group.messages.submit(send);
                 group.messages.wait(*send, std::nullopt);
               }).empty());
        group.messages.wait(*receive, std::nullopt);
        CHECK(got == sent);
      }
    }
    left = true;
  };
  testing::run_all({[&] { rank(0); }, [&] { rank(1); }});
}

TEST(shm_pairs_that_are_given_up_leave_the_others_alone) {
  run_ranks(3, [](Group& group, int rank) {
    group.messages.fail_pairwise();
    std::string lost(8, '?'), kept(8, '?');
    if (rank == 2) {
      group.messages.give_up(0);
      const auto send = message_of(true, 1, 0, kept);
      group.messages.submit(send);
      group.messages.wait(*send, std::nullopt);
    } else {
      const auto receive = message_of(false, rank == 0 ? 2 : 0, 0, lost);
      group.messages.submit(receive);
      if (rank == 1) {
        const auto other = message_of(false, 2, 0, kept);
        group.messages.submit(other);
        group.messages.wait(*other, std::nullopt);
        group.messages.give_up(0);
      }
      const std::string said = error_of([&] { group.messages.wait(*receive, std::nullopt); });
      CHECK(said.find(rank == 0 ? "rank 2 has given up" : "with rank 0 were given up") !=
            std::string::npos);
      CHECK(error_of([&] {
              group.messages.submit(message_of(true, rank == 0 ? 2 : 0, 0, lost));
            }) == said);
    }
    group.engine.submit({call_of(Kind::kBarrier, DType::kBytes, 0), kLimit});
  });
}

#if !defined(__SANITIZE_THREAD__)
// Rank 2 is killed while it has nothing to do with what rank 0 and rank 1 send each other.
TEST(shm_a_killed_process_ends_its_own_pairs_only) {
  const Segment segment = Segment::create(3, 7);
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      Group group(segment, 2, names_of(3), kLimit);
      ::pause();
    } catch (...) {
    }
    ::_exit(1);
  }
  std::atomic<int> named{0};
  const auto body = [&](int rank) {
    Group group(segment, rank, names_of(3), kLimit);
    group.messages.fail_pairwise();
    std::string out(8, 'o'), in(8, '?'), never(8, '?');
    const auto receive = message_of(false, 1 - rank, 0, in);
    const auto lost = message_of(false, 2, 0, never);
    group.messages.submit(receive);
    group.messages.submit(lost);
    if (rank == 0) ::kill(child, SIGKILL);
    const std::string said = error_of([&] { group.messages.wait(*lost, std::nullopt); });
    named +=
        said.find("rank 2 (process " + std::to_string(child) + ") has ended") != std::string::npos;
    const auto send = message_of(true, 1 - rank, 0, out);
    group.messages.submit(send);
    group.messages.wait(*send, std::nullopt);
    group.messages.wait(*receive, std::nullopt);
    CHECK(in == out);
  };
  testing::run_all({[&] { body(0); }, [&] { body(1); }});
  CHECK_EQ(named.load(), 2);
  ::waitpid(child, nullptr, 0);
}

// A child process is rank 1, and is killed while rank 0 waits for it.
TEST(shm_a_killed_process_is_named_at_once) {
  const Segment segment = Segment::create(2, 7);
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      Group group(segment, 1, names_of(2), kLimit);
      ::pause();
    } catch (...) {
    }
    ::_exit(1);
  }
  Group group(segment, 0, names_of(2), kLimit);
  ::kill(child, SIGKILL);
  const auto begin = Clock::now();
  try {
    group.engine.submit({call_of(Kind::kBarrier, DType::kBytes, 0), kLimit});
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kPeerLost);
    const std::string wanted = "rank 1 (process " + std::to_string(child) + ") has ended";
    CHECK(std::string(error.what()).find(wanted) != std::string::npos);
  }
  CHECK(Clock::now() - begin < std::chrono::seconds(2));
  ::waitpid(child, nullptr, 0);
}

TEST(shm_a_forked_child_is_refused) {
  run_ranks(1, [](Group& group, int) {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        group.engine.submit({call_of(Kind::kBarrier, DType::kBytes, 0), kLimit});
      } catch (const Error& error) {
        ::_exit(error.code() == ErrorCode::kClosed ? 0 : 2);
      }
      ::_exit(1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  });
}
#endif

}  // namespace cpudist::shm
