// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/read/command_output.h"

#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <string_view>

namespace cpudist::data {

namespace {

constexpr size_t kErrorBytes = 2048;
constexpr auto kEndPoll = std::chrono::milliseconds(20);
// Of silence, until a notice tells of it.
constexpr double kSlowS = 30.0;

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

CommandOutput::CommandOutput(const Command& command, const std::string& path,
                             const StopSignal& stop, Notices& notices)
    : command_(command), path_(path), stop_(stop), notices_(notices) {
  start();
}

void CommandOutput::start() {
  const Descriptor input = open_regular(path_);
  ::fcntl(input.get(), F_SETFL, 0);
  Pipe output = make_pipe();
  Pipe errors = make_pipe();
  try {
    group_.start(command_.text, input.get(), output.writer.get(), errors.writer.get());
  } catch (const Error& error) {
    throw Error(error.code(), std::string(error.what()) + ", for " + path_);
  }
  output_ = std::move(output.reader);
  errors_ = std::move(errors.reader);
}

// What is waited for here is the command: a pipe that is full has output.
size_t CommandOutput::read(char* to, size_t size) {
  quiet_since_ = Clock::now();
  while (!finished_) {
    stop_.check();
    const ssize_t found = read_some(output_.get(), to, size);
    if (found > 0) return static_cast<size_t>(found);
    if (found == 0) {
      finish();
    } else {
      await_change(output_.get(), time_left(false));
    }
  }
  return 0;
}

// Until there is something to read, or stop.
void CommandOutput::await_change(int descriptor, Clock::duration most) {
  std::array<pollfd, 3> polled{pollfd{stop_.descriptor(), POLLIN, 0},
                               pollfd{errors_.get(), POLLIN, 0}, pollfd{descriptor, POLLIN, 0}};
  const auto limit = std::chrono::ceil<std::chrono::milliseconds>(most).count();
  ::poll(polled.data(), polled.size(), static_cast<int>(limit));
  drain_errors();
}

// Until it is over, or until it is time to tell that it is slow.
Clock::duration CommandOutput::time_left(bool output_ended) {
  using Seconds = std::chrono::duration<double>;
  const Seconds timeout(std::min(command_.timeout_s, 1e6));
  const Seconds slow(std::min(kSlowS, timeout.count() / 2));
  const Seconds quiet = Clock::now() - quiet_since_;
  if (quiet >= timeout) fail_late(output_ended);
  if (!told_slow_ && quiet >= slow) {
    told_slow_ = true;
    notices_.add(
        name() +
        (output_ended ? " has ended its output and goes on for " : " writes nothing for ") +
        seconds_text(slow.count()) + "; it is killed after " + seconds_text(command_.timeout_s) +
        " (command_timeout_s)");
  }
  return std::chrono::ceil<Clock::duration>((told_slow_ ? timeout : slow) - quiet);
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
  quiet_since_ = Clock::now();
  std::optional<int> status;
  while (true) {
    try {
      status = group_.status();
    } catch (const Error& error) {
      fail(error.what());
    }
    if (status) break;
    await_change(-1, std::min<Clock::duration>(kEndPoll, time_left(true)));
    stop_.check();
  }
  group_.kill();
  drain_errors();
  finished_ = true;
  if (WIFSIGNALED(*status)) {
    const int signal = WTERMSIG(*status);
    fail("was killed by signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")");
  }
  if (WEXITSTATUS(*status) != 0) fail("ended with status " + std::to_string(WEXITSTATUS(*status)));
}

bool CommandOutput::has_ended() {
  try {
    return group_.status().has_value();
  } catch (const Error&) {
    return true;
  }
}

void CommandOutput::fail_late(bool output_ended) {
  const std::string time = seconds_text(command_.timeout_s);
  const bool ended = has_ended();
  group_.kill();
  drain_errors();
  const std::string advice =
      ", and was killed with all that it started; mend it, or set command_timeout_s higher";
  if (output_ended) {
    fail("has closed its output and did not end within " + time + advice);
  }
  if (ended) {
    fail("has ended, but something that it started keeps its output open and wrote nothing for " +
         time + advice);
  }
  fail("wrote nothing for " + time + advice);
}

void CommandOutput::fail(const std::string& what) const {
  std::string text = name() + " " + what;
  const std::string errors = trimmed(errors_end_);
  if (!errors.empty()) {
    text += "; the end of its stderr:\n";
    text += as_ascii(errors.substr(errors.size() - std::min(errors.size(), kErrorBytes)));
  }
  throw Error(ErrorCode::kDataFile, text);
}

}  // namespace cpudist::data
