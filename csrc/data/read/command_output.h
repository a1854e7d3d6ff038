// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a shell command makes of a file.
#pragma once

#include <string>

#include "base/clock.h"
#include "data/read/byte_source.h"
#include "data/read/command_group.h"
#include "data/read/notices.h"

namespace cpudist::data {

struct Command {
  std::string text;  // for the shell; empty: none
  // How long it may neither write nor end while its output is waited for.
  double timeout_s = 600.0;
};

// Runs `sh -c command` with the file as its standard input, in a process group of its own, and
// reads its standard output. The end of the source means that it ended with status 0. The group is
// killed when the command ends, with the source, and with this process.
class CommandOutput : public ByteSource {
 public:
  // All but `path` outlive it. Throws Error(kDataFile).
  CommandOutput(const Command& command, const std::string& path, const StopSignal& stop,
                Notices& notices);
  ~CommandOutput() override = default;
  CommandOutput(const CommandOutput&) = delete;
  CommandOutput& operator=(const CommandOutput&) = delete;

  // kDataFile: it ended with another status, by a signal, or not in time; with the end of its
  // stderr. A notice tells before that it is slow.
  size_t read(char* to, size_t size) override;

 private:
  void start();
  void await_change(int descriptor, Clock::duration most);
  Clock::duration time_left(bool output_ended);  // throws once there is none
  void drain_errors();
  void finish();  // waits for the end of the command and checks its status
  std::string name() const { return "the command '" + command_.text + "' on " + path_; }
  [[noreturn]] void fail(const std::string& what) const;
  [[noreturn]] void fail_late(bool output_ended);
  bool has_ended();  // also where other code has taken its status

  const Command& command_;
  std::string path_;
  const StopSignal& stop_;
  Notices& notices_;
  CommandGroup group_;
  Descriptor output_;
  Descriptor errors_;
  std::string errors_end_;
  TimePoint quiet_since_;  // since when its output, or its end, is waited for
  bool told_slow_ = false;
  bool finished_ = false;
};

}  // namespace cpudist::data
