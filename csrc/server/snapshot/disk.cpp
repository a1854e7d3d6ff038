// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/snapshot/disk.h"

#include <utility>

#include "base/errors.h"
#include "base/threads.h"

namespace cpudist::server {
namespace {

// Files that the disk may be at work on. The fsync of the oldest waits for little then, and has the
// file system write its journal once for several.
constexpr size_t kMostUnsynced = 4;

}  // namespace

Disk::Disk(files::Calls& calls, std::string directory, const std::atomic<bool>& given_up, Done done)
    : calls_(calls), directory_(std::move(directory)), given_up_(given_up), done_(std::move(done)) {
  thread_ = start_io_thread("the thread that writes files of a snapshot", [this] { work(); });
}

Disk::~Disk() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  join_thread(thread_);
}

void Disk::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !busy_; });
  if (failure_) std::rethrow_exception(failure_);
}

void Disk::hand_over(Task task) {
  wait();
  {
    const std::lock_guard lock(mutex_);
    task_ = std::move(task);
    busy_ = true;
  }
  changed_.notify_all();
}

void Disk::write(wire::CutFile file, Pieces pieces) {
  hand_over({std::move(file), std::move(pieces)});
}

void Disk::finish() {
  Task last;
  last.last = true;
  hand_over(std::move(last));
  wait();
}

void Disk::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || task_; });
    if (stopping_) return;
    Task task = std::move(*task_);
    task_.reset();
    lock.unlock();
    std::exception_ptr failure;
    try {
      carry_out(std::move(task));
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    failure_ = failure;
    busy_ = false;
    changed_.notify_all();
    if (failure) return;
  }
}

void Disk::carry_out(Task task) {
  if (task.last) {
    while (!written_.empty()) finish_oldest();
    return;
  }
  OutputFile file(calls_, directory_, std::move(task.file));
  for (const auto& piece : task.pieces) {
    if (given_up_) throw Error(ErrorCode::kSnapshot, "it was given up");
    file.append(piece);
  }
  file.close();
  written_.push_back(std::move(file));
  if (written_.size() > kMostUnsynced) finish_oldest();
}

void Disk::finish_oldest() {
  wire::CutFile file = written_.front().finish();
  written_.pop_front();
  done_(std::move(file));
}

}  // namespace cpudist::server
