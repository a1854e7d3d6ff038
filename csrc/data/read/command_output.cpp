// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/read/command_output.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>

extern char** environ;

namespace cpudist::data {

namespace {

constexpr size_t kErrorBytes = 2048;
constexpr int kEndPollMs = 20;

struct Pipe {
  Descriptor reader;
  Descriptor writer;
};

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw Error(ErrorCode::kDataFile, "cannot make a pipe: " + system_text(errno) +
                                          "; allow this process more open files (ulimit -n)");
  }
  Pipe result{Descriptor(ends[0]), Descriptor(ends[1])};
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return result;
}

// What posix_spawn is told, freed at the end.
class SpawnSettings {
 public:
  SpawnSettings(int input, int output, int errors) {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
    ::posix_spawn_file_actions_adddup2(&actions, input, 0);
    ::posix_spawn_file_actions_adddup2(&actions, output, 1);
    ::posix_spawn_file_actions_adddup2(&actions, errors, 2);
    // Reader threads block all signals and Python ignores some; a command begins with neither.
    sigset_t none;
    sigset_t all;
    sigemptyset(&none);
    sigfillset(&all);
    ::posix_spawnattr_setsigmask(&attributes, &none);
    ::posix_spawnattr_setsigdefault(&attributes, &all);
    ::posix_spawnattr_setpgroup(&attributes, 0);
    ::posix_spawnattr_setflags(
        &attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  }
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
};

// -1: nothing yet. 0: the end.
ssize_t read_some(int descriptor, char* to, size_t size) {
  ssize_t found = 0;
  do {
    found = ::read(descriptor, to, size);
  } while (found < 0 && errno == EINTR);
  // A pipe gives no other error than that it is empty.
  return found;
}

std::string trimmed(const std::string& text) {
  const size_t end = text.find_last_not_of(" \t\r\n");
  return end == std::string::npos ? std::string() : text.substr(0, end + 1);
}

// Other bytes as \xhh: a command may write any, and the cut may be within a character, but a
// message is UTF-8.
std::string as_ascii(const std::string& text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string result;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) {
      result += c;
      continue;
    }
    result += "\\x";
    result += kHex[byte >> 4];
    result += kHex[byte & 15];
  }
  return result;
}

}  // namespace

CommandOutput::CommandOutput(const std::string& command, const std::string& path,
                             const StopSignal& stop)
    : command_(command), path_(path), stop_(stop) {
  spawn();
}

CommandOutput::~CommandOutput() {
  if (process_ < 0) return;
  ::kill(-process_, SIGKILL);
  int status = 0;
  reap(status, true);
}

void CommandOutput::spawn() {
  const Descriptor input = open_regular(path_);
  ::fcntl(input.get(), F_SETFL, 0);
  Pipe output = make_pipe();
  Pipe errors = make_pipe();
  const SpawnSettings settings(input.get(), output.writer.get(), errors.writer.get());
  std::array<std::string, 3> words{"sh", "-c", command_};
  std::array<char*, 4> arguments{words[0].data(), words[1].data(), words[2].data(), nullptr};
  const int failed = ::posix_spawn(&process_, "/bin/sh", &settings.actions, &settings.attributes,
                                   arguments.data(), environ);
  if (failed != 0) {
    process_ = -1;
    throw Error(ErrorCode::kDataFile, "cannot start the command '" + command_ + "' for " + path_ +
                                          ": " + system_text(failed));
  }
  output_ = std::move(output.reader);
  errors_ = std::move(errors.reader);
}

size_t CommandOutput::read(char* to, size_t size) {
  while (!finished_) {
    stop_.check();
    const ssize_t found = read_some(output_.get(), to, size);
    if (found > 0) return static_cast<size_t>(found);
    if (found == 0) {
      finish();
    } else {
      await_output();
    }
  }
  return 0;
}

void CommandOutput::await_output() {
  std::array<pollfd, 3> polled{pollfd{output_.get(), POLLIN, 0},
                               pollfd{stop_.descriptor(), POLLIN, 0},
                               pollfd{errors_.get(), POLLIN, 0}};
  ::poll(polled.data(), polled.size(), -1);
  drain_errors();
}

void CommandOutput::drain_errors() {
  std::array<char, 4096> piece;
  while (errors_.get() >= 0) {
    const ssize_t found = read_some(errors_.get(), piece.data(), piece.size());
    if (found < 0) return;
    if (found == 0) {
      errors_.reset();  // poll() leaves out negative descriptors
      return;
    }
    errors_end_.append(piece.data(), static_cast<size_t>(found));
    if (errors_end_.size() > 2 * kErrorBytes) {
      errors_end_.erase(0, errors_end_.size() - kErrorBytes);
    }
  }
}

void CommandOutput::finish() {
  int status = 0;
  while (!reap(status, false)) {
    std::array<pollfd, 2> polled{pollfd{stop_.descriptor(), POLLIN, 0},
                                 pollfd{errors_.get(), POLLIN, 0}};
    ::poll(polled.data(), polled.size(), kEndPollMs);
    drain_errors();
    stop_.check();
  }
  drain_errors();
  finished_ = true;
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    fail("was killed by signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")");
  }
  if (WEXITSTATUS(status) != 0) fail("ended with status " + std::to_string(WEXITSTATUS(status)));
}

// What is left of its group is killed while the number of the group cannot belong to another.
bool CommandOutput::reap(int& status, bool wait) {
  siginfo_t info{};
  const int options = WEXITED | WNOWAIT | (wait ? 0 : WNOHANG);
  int failed = 0;
  do {
    failed = ::waitid(P_PID, static_cast<id_t>(process_), &info, options);
  } while (failed != 0 && errno == EINTR);
  if (failed == 0 && info.si_pid == 0) return false;
  if (failed == 0) ::kill(-process_, SIGKILL);
  pid_t reaped = -1;
  do {
    reaped = ::waitpid(process_, &status, 0);
  } while (reaped < 0 && errno == EINTR);
  process_ = -1;
  if (reaped < 0 && !wait) {
    fail(
        "ended, but its status was taken by other code of this process (waitpid for any child, or "
        "SIGCHLD ignored)");
  }
  return true;
}

void CommandOutput::fail(const std::string& what) const {
  std::string text = "the command '" + command_ + "' on " + path_ + " " + what;
  const std::string errors = trimmed(errors_end_);
  if (!errors.empty()) {
    text += "; the end of its stderr:\n";
    text += as_ascii(errors.substr(errors.size() - std::min(errors.size(), kErrorBytes)));
  }
  throw Error(ErrorCode::kDataFile, text);
}

}  // namespace cpudist::data
