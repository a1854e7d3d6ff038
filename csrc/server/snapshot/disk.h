// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The thread that brings files of a snapshot onto the disk: while it writes one the next is made,
// and while the disk works on that one it writes the next.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/file_calls.h"
#include "base/wait.h"
#include "server/snapshot/output.h"
#include "wire/cut.h"

namespace cpudist::server {

// All calls of the file system are in the order of write(). Thread safety: one caller at a time.
class Disk {
 public:
  using Pieces = std::vector<std::span<const uint8_t>>;
  using Done = std::function<void(wire::CutFile)>;

  // Of files in `directory`. `done`, in the thread, is told of each that lies on the disk. Once
  // `given_up` is set there is no writing on. Throws Error where there is no thread left.
  Disk(files::Calls& calls, std::string directory, const std::atomic<bool>& given_up, Done done);
  ~Disk();  // files that are not finished stay as they are
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  // Returns when nothing that was handed over is read any more. Throws what a file failed by.
  void wait();
  // A file that has these bytes one after the other, which stay until wait() has returned. Waits
  // and throws as that does.
  void write(wire::CutFile file, Pieces pieces);
  // Returns when all files lie on the disk. Throws what one failed by.
  void finish();

 private:
  struct Task {
    wire::CutFile file{};
    Pieces pieces{};
    bool last = false;  // no file, but the end of all
  };

  void hand_over(Task task);
  void work();
  void carry_out(Task task);
  void finish_oldest();

  files::Calls& calls_;
  const std::string directory_;
  const std::atomic<bool>& given_up_;
  const Done done_;
  std::deque<OutputFile> written_;  // of the thread: those that are not synced
  std::mutex mutex_;                // of what follows
  ConditionVariable changed_;
  std::optional<Task> task_;  // to be begun
  bool busy_ = false;         // with what was handed over
  bool stopping_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace cpudist::server
