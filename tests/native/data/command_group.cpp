// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Commands end with the process that started them, however it ends.
#include "data/read/command_group.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <optional>
#include <string>

#include "support/check.h"

namespace cpudist::testing {
namespace {

struct Ends {
  Descriptor read;
  Descriptor write;
};

Ends make_pipe() {
  std::array<int, 2> ends{};
  CHECK_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

// What is written until a text has come, or until everybody who can write is gone.
std::string read_until(int descriptor, const std::string& wanted) {
  std::string text;
  std::array<char, 64> piece;
  while (wanted.empty() || text != wanted) {
    pollfd polled{descriptor, POLLIN, 0};
    CHECK_EQ(::poll(&polled, 1, 20000), 1);
    const ssize_t found = ::read(descriptor, piece.data(), piece.size());
    CHECK(found >= 0);
    if (found == 0) break;
    text.append(piece.data(), static_cast<size_t>(found));
  }
  return text;
}

constexpr const char* kHangs = "sleep 100 & echo runs; trap '' HUP TERM; sleep 100; sleep 100";

// A process that starts a command and, once it runs, ends as it is told.
void check_left_by(void (*end)()) {
  Ends output = make_pipe();
  Ends until = make_pipe();
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    until.write.reset();
    data::CommandGroup group;
    group.start(kHangs, 0, output.write.get(), 2);
    read_until(until.read.get(), "");
    end();
    ::_exit(3);
  }
  output.write.reset();
  CHECK_EQ(read_until(output.read.get(), "runs\n"), "runs\n");
  until.write.reset();
  CHECK_EQ(read_until(output.read.get(), ""), "");
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
}

}  // namespace

TEST(data_command_group_ends_with_its_process) {
  check_left_by([] { ::_exit(0); });
}

TEST(data_command_group_ends_with_a_process_that_is_killed) {
  check_left_by([] { ::kill(::getpid(), SIGKILL); });
}

TEST(data_command_group_tells_how_the_command_ended) {
  data::CommandGroup group;
  Ends output = make_pipe();
  group.start("exit 5", 0, output.write.get(), 2);
  output.write.reset();
  CHECK_EQ(read_until(output.read.get(), ""), "");
  std::optional<int> status;
  while (!(status = group.status())) ::poll(nullptr, 0, 1);
  CHECK_EQ(WEXITSTATUS(*status), 5);
  group.kill();
  group.kill();
  CHECK_EQ(WEXITSTATUS(*group.status()), 5);
}

TEST(data_command_group_kills_all_that_a_command_started) {
  data::CommandGroup group;
  Ends output = make_pipe();
  group.start(kHangs, 0, output.write.get(), 2);
  output.write.reset();
  CHECK_EQ(read_until(output.read.get(), "runs\n"), "runs\n");
  CHECK(!group.status());
  group.kill();
  CHECK_EQ(read_until(output.read.get(), ""), "");
  CHECK_EQ(WTERMSIG(*group.status()), SIGKILL);
}

}  // namespace cpudist::testing
