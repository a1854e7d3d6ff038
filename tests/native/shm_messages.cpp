// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Messages between ranks that are threads: tags, both directions, sources, sizes; and processes
// that end.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <string>

#include "check.h"
#include "core/errors.h"
#include "shm_fixture.h"

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
    } catch (const core::Error& error) {
      CHECK(error.code() == core::ErrorCode::kConfigMismatch);
      ++told;
    }
  });
  CHECK_EQ(told.load(), 2);
}

#if !defined(__SANITIZE_THREAD__)
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
  } catch (const core::Error& error) {
    CHECK(error.code() == core::ErrorCode::kPeerLost);
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
      } catch (const core::Error& error) {
        ::_exit(error.code() == core::ErrorCode::kClosed ? 0 : 2);
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
