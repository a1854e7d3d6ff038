// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/store/load.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "base/threads.h"

namespace cpudist::data {

namespace {

const LoadOptions& checked(const LoadOptions& options) {
  check_input(options.input, options.lanes);
  return options;
}

}  // namespace

StoreLoader::StoreLoader(const Schema& schema, LoadOptions options)
    : schema_(schema),
      options_(std::move(options)),
      bad_lines_(checked(options_).policy, options_.quarantine),
      feeds_(schema, options_.lanes.size(), options_.input.fed,
             options_.buffer_bytes / options_.lanes.size()),
      tasks_(ranked_tasks()) {
  size_t count = 0;
  for (const auto& lane : tasks_) count += lane.size();
  slabs_.resize(count);
  running_ = options_.lanes.size();
  reading_.resize(running_);
  try {
    for (size_t lane = 0; lane < options_.lanes.size(); ++lane) {
      threads_.push_back(start_io_thread("a loading thread", [this, lane] { run(lane); }));
    }
  } catch (...) {
    stop();  // no destructor runs
    throw;
  }
}

StoreLoader::~StoreLoader() { stop(); }

// Ranks are the order of files and bytes, whichever lane a split is in.
std::vector<std::vector<StoreLoader::Task>> StoreLoader::ranked_tasks() const {
  std::vector<std::vector<Task>> tasks;
  for (const auto& lane : options_.lanes) {
    tasks.emplace_back();
    for (const Split& split : lane) tasks.back().push_back({split, 0});
  }
  std::vector<Task*> sorted;
  for (auto& lane : tasks) {
    for (Task& task : lane) sorted.push_back(&task);
  }
  std::stable_sort(sorted.begin(), sorted.end(), [](const Task* a, const Task* b) {
    return std::tie(a->split.file, a->split.begin) < std::tie(b->split.file, b->split.begin);
  });
  for (size_t rank = 0; rank < sorted.size(); ++rank) sorted[rank]->rank = rank;
  if (options_.input.fed) return tasks;
  std::vector<Task> all;
  for (const Task* task : sorted) all.push_back(*task);
  return {std::move(all)};
}

void StoreLoader::run(size_t lane) noexcept {
  try {
    read_tasks(lane);
  } catch (...) {
    fail(std::current_exception());
  }
  if (FedQueue* queue = feeds_.of_lane(lane)) queue->stop();
  {
    const std::lock_guard lock(mutex_);
    --running_;
  }
  ended_.notify_all();
}

void StoreLoader::read_tasks(size_t lane) {
  SplitReader reader(schema_, options_.input, bad_lines_, notices_, stop_, feeds_.of_lane(lane));
  RecordBuffer buffer;
  const bool fed = options_.input.fed;
  const std::vector<Task>& tasks = tasks_[fed ? lane : 0];
  size_t own = 0;
  while (!stop_.raised()) {
    const size_t index = fed ? own++ : next_task_.fetch_add(1);
    if (index >= tasks.size()) return;
    {
      const std::lock_guard lock(mutex_);
      reading_[lane] = tasks[index].split;
    }
    read_task(reader, tasks[index], buffer);
    splits_done_.fetch_add(1);
  }
}

void StoreLoader::read_task(SplitReader& reader, const Task& task, RecordBuffer& buffer) {
  std::vector<Slab>& slabs = slabs_[task.rank];
  reader.open(task.split, 0);
  bool more = true;
  while (more) {
    stop_.check();
    buffer.clear();
    more = reader.read(buffer, ~size_t{0}, kSlabWords);
    if (buffer.count() == 0) continue;
    slabs.push_back(make_slab(buffer));
    records_.fetch_add(buffer.count());
    words_.fetch_add(buffer.size_words());
  }
}

// The first error ends the others, whose kClosed is none of their own.
void StoreLoader::fail(std::exception_ptr cause) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!error_ && !stopped_) error_ = std::move(cause);
  }
  stop_.raise();
  feeds_.stop();
}

void StoreLoader::wait(const Wait& wait) {
  std::unique_lock lock(mutex_);
  while (!wait_for_progress(lock, wait)) {
  }
  if (error_) throw_failure(error_, "a loading thread");
  if (stopped_) throw Error(ErrorCode::kClosed, "the load has been stopped");
}

// False: not at the end yet, but further than before.
bool StoreLoader::wait_for_progress(std::unique_lock<std::mutex>& lock, const Wait& wait) {
  const uint64_t words = words_.load();
  const uint64_t splits = splits_done_.load();
  try {
    wait_until(
        lock, ended_, wait, [this] { return running_ == 0 || stopped_; },
        [&] { return slow_text(wait.timeout_s); });
    return true;
  } catch (const Error& error) {
    const bool further = words_.load() != words || splits_done_.load() != splits;
    if (error.code() != ErrorCode::kTimeout || !further) throw;
    return false;
  }
}

std::string StoreLoader::slow_text(double timeout_s) const {
  std::string text = "loading has stood still for " + seconds_text(timeout_s) + ": " +
                     std::to_string(splits_done_.load()) + " of " + std::to_string(slabs_.size()) +
                     " parts of files are read; lane 0 reads ";
  text += options_.input.files.empty() ? std::string("nothing")
                                       : options_.input.files[reading_.front().file];
  return text;
}

std::vector<Slab> StoreLoader::take_slabs() {
  std::vector<Slab> result;
  for (auto& slabs : slabs_) {
    std::move(slabs.begin(), slabs.end(), std::back_inserter(result));
    slabs.clear();
  }
  return result;
}

LoadProgress StoreLoader::progress() const {
  return {records_.load(), words_.load() * sizeof(uint64_t), splits_done_.load(), slabs_.size()};
}

void StoreLoader::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = stopped_ || running_ > 0;
  }
  stop_.raise();
  feeds_.stop();
  ended_.notify_all();
  const std::lock_guard lock(join_mutex_);
  for (std::thread& thread : threads_) {
    if (thread.joinable()) join_thread(thread);
  }
}

}  // namespace cpudist::data
