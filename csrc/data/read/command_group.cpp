// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/read/command_group.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>

#include "base/clock.h"
#include "base/wait.h"
#include "data/read/byte_source.h"

extern char** environ;

namespace cpudist::data {

namespace {

// Reads nothing until the pipe ends. 0 is its own group.
constexpr const char* kGuard = "read nothing; kill -s KILL 0";
constexpr auto kLongestKill = std::chrono::seconds(2);
constexpr auto kKillPoll = std::chrono::milliseconds(1);

// What posix_spawn is told, freed at the end.
class SpawnSettings {
 public:
  // `group`: 0 for a new one.
  SpawnSettings(pid_t group, int input) {
    ::posix_spawn_file_actions_init(&actions_);
    ::posix_spawnattr_init(&attributes_);
    redirect(input, 0);
    // Reader threads block all signals and Python ignores some; a command begins with neither.
    sigset_t none;
    sigset_t all;
    sigemptyset(&none);
    sigfillset(&all);
    ::posix_spawnattr_setsigmask(&attributes_, &none);
    ::posix_spawnattr_setsigdefault(&attributes_, &all);
    ::posix_spawnattr_setpgroup(&attributes_, group);
    ::posix_spawnattr_setflags(
        &attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  }
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&actions_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  void redirect(int from, int to) { ::posix_spawn_file_actions_adddup2(&actions_, from, to); }
  void drop(int output) {
    ::posix_spawn_file_actions_addopen(&actions_, output, "/dev/null", O_WRONLY, 0);
  }
  pid_t run(const std::string& command) const {
    std::array<std::string, 3> words{"sh", "-c", command};
    std::array<char*, 4> arguments{words[0].data(), words[1].data(), words[2].data(), nullptr};
    pid_t process = -1;
    const int failed =
        ::posix_spawn(&process, "/bin/sh", &actions_, &attributes_, arguments.data(), environ);
    if (failed == 0) return process;
    throw Error(ErrorCode::kDataFile,
                "cannot start the command '" + command + "': " + system_text(failed));
  }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

// Of a child that was killed. False: there is none, or it does not end: it is in a call of the
// kernel that nothing interrupts, a file system's that does not answer, say.
bool wait_for(pid_t process, int* status) noexcept {
  const TimePoint began = Clock::now();
  while (true) {
    const pid_t reaped = ::waitpid(process, status, WNOHANG);
    if (reaped == process) return true;
    const bool gone = reaped < 0 && errno != EINTR;
    if (gone || Clock::now() - began > kLongestKill) return false;
    let_pass(kKillPoll);
  }
}

}  // namespace

CommandGroup::CommandGroup() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw Error(ErrorCode::kDataFile, "cannot make a pipe: " + system_text(errno) +
                                          "; allow this process more open files (ulimit -n)");
  }
  const Descriptor read_end(ends[0]);
  lifeline_.reset(ends[1]);
  SpawnSettings settings(0, read_end.get());
  settings.drop(1);
  settings.drop(2);
  guard_ = settings.run(kGuard);
}

void CommandGroup::start(const std::string& command, int input, int output, int errors) {
  SpawnSettings settings(guard_, input);
  settings.redirect(output, 1);
  settings.redirect(errors, 2);
  command_ = settings.run(command);
}

std::optional<int> CommandGroup::status() {
  if (status_ || command_ < 0) return status_;
  int status = 0;
  pid_t reaped = -1;
  do {
    reaped = ::waitpid(command_, &status, WNOHANG);
  } while (reaped < 0 && errno == EINTR);
  if (reaped == 0) return std::nullopt;
  command_ = -1;
  if (reaped < 0) {
    throw Error(ErrorCode::kDataFile,
                "ended, but its status was taken by other code of this process (waitpid for any "
                "child, or SIGCHLD ignored)");
  }
  status_ = status;
  return status_;
}

// The group's number is its guard's, which is no other's until the guard is waited for.
void CommandGroup::kill() noexcept {
  if (guard_ < 0) return;
  ::kill(-guard_, SIGKILL);
  // It may have left the group: timeout(1) and setsid(1) begin one of their own.
  if (command_ >= 0) ::kill(command_, SIGKILL);
  int status = 0;
  if (command_ >= 0 && wait_for(command_, &status)) status_ = status;
  command_ = -1;
  wait_for(guard_, &status);
  guard_ = -1;
}

}  // namespace cpudist::data
