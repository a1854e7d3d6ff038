// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One thread's share of a stream: full batches out of its own splits, in order or shuffled within
// windows.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "data/read/batch.h"
#include "data/read/split_reader.h"

namespace cpudist::data {

// Where a lane is to go on. Where it is shuffled: at the beginning of the window, of which some
// batches have been delivered.
struct LanePosition {
  uint64_t split = 0;      // of the lane's splits; their number at the end
  uint64_t offset = 0;     // see SplitReader::position
  uint64_t window = 0;     // number of the window, 0 without
  uint64_t delivered = 0;  // batches of it
};

struct LaneOptions {
  size_t number = 0;
  size_t batch_size = 0;
  std::optional<uint64_t> seed;  // none: in the order of the files
  size_t window_records = 0;     // a multiple of batch_size
};

class Lane {
 public:
  // `splits` outlive it.
  Lane(const Schema& schema, std::unique_ptr<SplitReader> reader, const std::vector<Split>& splits,
       const LaneOptions& options, const LanePosition& position, RecordBuffer buffer = {});

  // The next full batch, and where to go on after it. False: fewer records than batch_size are
  // left, see remainder().
  bool next(Batch& batch, LanePosition& after);
  RecordBuffer take_remainder() { return std::move(remainder_); }
  // At the end, or when it is given up: gives back what is open.
  void close() { reader_->close(); }
  // At the end, for another lane.
  RecordBuffer take_buffer() { return std::move(buffer_); }
  // Any thread: the split that is being read, or the number of splits.
  size_t split_now() const { return split_now_.load(std::memory_order_relaxed); }

 private:
  bool fill(size_t records);  // the buffer; false: all splits have ended
  bool next_in_order(Batch& batch, LanePosition& after);
  bool next_of_window(Batch& batch, LanePosition& after);
  void read_window();
  void keep_remainder();
  LanePosition here() const;

  const Schema& schema_;
  const std::unique_ptr<SplitReader> reader_;
  const std::vector<Split>& splits_;
  const LaneOptions options_;
  LanePosition position_;  // where it goes on reading; offset: where the open split was opened
  bool open_ = false;
  std::atomic<size_t> split_now_;
  RecordBuffer buffer_;
  std::vector<const uint64_t*> order_;
  size_t order_at_ = 0;
  LanePosition window_start_;
  RecordBuffer remainder_;
};

}  // namespace cpudist::data
