// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A stream of batches out of files: lanes that read and parse ahead, and consumers that take their
// batches in a sequence that depends on files, lanes, batch size and seed only.
//
// Batch k comes from lane k mod lanes; lanes that have ended are left out in turn. When all have,
// what is left of each (less than a batch) is joined in the order of lanes and cut into batches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/wait.h"
#include "data/read/batch_pool.h"
#include "data/read/lane.h"
#include "data/read/waiting.h"

namespace cpudist::data {

struct ReaderPosition {
  uint64_t turn = 0;            // the lane that the next batch comes from, unless it has ended
  uint64_t tail_delivered = 0;  // batches of the joined remainders
  std::vector<LanePosition> lanes;
};

struct ReaderOptions {
  Schema schema;
  Input input;
  std::vector<std::vector<Split>> lanes;  // one thread each
  size_t batch_size = 0;
  bool drop_last = false;
  // Of finished batches, and of what is fed and not yet read; half each when the input is fed.
  // Every lane has an equal part, and may always hold one batch. Windows come on top.
  size_t buffer_bytes = 64 << 20;
  BadLinePolicy policy = BadLinePolicy::kRaise;
  std::string quarantine;
  std::optional<uint64_t> seed;
  size_t window_records = 0;  // rounded up to whole batches; for a seed
  std::optional<ReaderPosition> position;
};

struct Delivered {
  std::shared_ptr<Batch> batch;  // null at the end
  ReaderPosition position;       // after it
};

class Reader {
 public:
  // Starts to read. Throws Error: kInvalidArgument, kDataFile.
  Reader(ReaderOptions options, std::shared_ptr<BatchPool> pool);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Any number of threads; each batch goes to one of them. Throws Error: kBadRecord and
  // kDataFile in the place of the batch that could not be made, and again from then on;
  // kOutOfMemory, too; kTimeout; kInterrupted; kClosed after stop().
  Delivered next(const Wait& wait);
  // After the last batch that was delivered.
  ReaderPosition position() const;

  Feeds& feeds() { return feeds_; }
  BadLines& bad_lines() { return bad_lines_; }
  Notices& notices() { return notices_; }
  const Schema& schema() const { return options_.schema; }
  // Ends all threads and waits; takes as long as a read of a file. Any thread, any time.
  void stop();

 private:
  struct Made {
    std::shared_ptr<Batch> batch;
    LanePosition after;
    size_t bytes = 0;
  };
  struct LaneState {
    FedQueue* fed = nullptr;
    std::unique_ptr<Lane> lane;
    ConditionVariable room;
    std::deque<Made> made;
    size_t made_bytes = 0;
    bool ended = false;
    std::exception_ptr error;
    RecordBuffer remainder;
  };

  void check() const;
  void make_lane(size_t number);
  void run(LaneState& state) noexcept;
  void produce(LaneState& state);
  bool offer(LaneState& state, Made made);  // false: stopped
  void make_tail() noexcept;
  std::deque<std::shared_ptr<Batch>> tail() const;
  // With the lock:
  size_t giving_lane() const;  // that the next batch comes from; none is left: their number
  bool available() const;      // something to give, or the end
  Delivered take();
  std::string slow_text(double timeout_s) const;

  ReaderOptions options_;
  const std::shared_ptr<BatchPool> pool_;
  BadLines bad_lines_;
  Notices notices_;
  StopSignal stop_;
  const size_t lane_limit_bytes_;
  Feeds feeds_;

  mutable std::mutex mutex_;
  ConditionVariable ready_;
  std::vector<std::unique_ptr<LaneState>> lanes_;
  size_t running_ = 0;
  bool stopped_ = false;
  bool tail_made_ = false;
  std::deque<std::shared_ptr<Batch>> tail_;
  std::exception_ptr tail_error_;
  ReaderPosition position_;

  std::mutex join_mutex_;
  std::vector<std::thread> threads_;
};

}  // namespace cpudist::data
