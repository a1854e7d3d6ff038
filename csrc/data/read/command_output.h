// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a shell command makes of a file.
#pragma once

#include <sys/types.h>

#include <string>

#include "data/read/byte_source.h"

namespace cpudist::data {

// Runs `sh -c command` with the file as its standard input, in a process group of its own, and
// reads its standard output. The end of the source means that it ended with status 0. The group is
// killed when the command ends, and with the source.
class CommandOutput : public ByteSource {
 public:
  // Throws Error(kDataFile).
  CommandOutput(const std::string& command, const std::string& path, const StopSignal& stop);
  ~CommandOutput() override;
  CommandOutput(const CommandOutput&) = delete;
  CommandOutput& operator=(const CommandOutput&) = delete;

  // kDataFile: it ended with another status, or by a signal; with the end of its stderr.
  size_t read(char* to, size_t size) override;

 private:
  void spawn();
  void await_output();  // or the end of the output, or stop
  void drain_errors();
  void finish();  // waits for the end of the command and checks its status
  bool reap(int& status, bool wait);
  [[noreturn]] void fail(const std::string& what) const;

  std::string command_;
  std::string path_;
  const StopSignal& stop_;
  pid_t process_ = -1;  // -1: reaped
  Descriptor output_;
  Descriptor errors_;
  std::string errors_end_;
  bool finished_ = false;
};

}  // namespace cpudist::data
