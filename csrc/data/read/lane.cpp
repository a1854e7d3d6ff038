// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/read/lane.h"

#include <utility>

#include "data/store/random.h"

namespace cpudist::data {

Lane::Lane(const Schema& schema, std::unique_ptr<SplitReader> reader,
           const std::vector<Split>& splits, const LaneOptions& options,
           const LanePosition& position, RecordBuffer buffer)
    : schema_(schema),
      reader_(std::move(reader)),
      splits_(splits),
      options_(options),
      position_(position),
      split_now_(position.split),
      buffer_(std::move(buffer)) {}

bool Lane::next(Batch& batch, LanePosition& after) {
  return options_.seed ? next_of_window(batch, after) : next_in_order(batch, after);
}

bool Lane::fill(size_t records) {
  while (buffer_.count() < records) {
    if (position_.split == splits_.size()) return false;
    if (!open_) {
      split_now_.store(position_.split, std::memory_order_relaxed);
      reader_->open(splits_[position_.split], position_.offset);
      open_ = true;
    }
    if (reader_->read(buffer_, records)) continue;
    ++position_.split;
    position_.offset = 0;
    open_ = false;
    split_now_.store(position_.split, std::memory_order_relaxed);
  }
  return true;
}

LanePosition Lane::here() const {
  LanePosition position = position_;
  if (open_) position.offset = reader_->position();
  return position;
}

bool Lane::next_in_order(Batch& batch, LanePosition& after) {
  buffer_.clear();
  const bool full = fill(options_.batch_size);
  order_.clear();
  for (size_t i = 0; i < buffer_.count(); ++i) order_.push_back(buffer_.record(i));
  order_at_ = 0;
  if (!full) {
    keep_remainder();
    return false;
  }
  assemble(schema_, order_, batch);
  after = here();
  return true;
}

bool Lane::next_of_window(Batch& batch, LanePosition& after) {
  const size_t size = options_.batch_size;
  if (order_at_ == order_.size()) read_window();
  if (order_.size() - order_at_ < size) {
    keep_remainder();
    return false;
  }
  assemble(schema_, std::span(order_).subspan(order_at_, size), batch);
  order_at_ += size;
  if (order_.size() == options_.window_records && order_at_ == order_.size()) {
    after = here();
    ++after.window;
    after.delivered = 0;
    position_.window = after.window;
    position_.delivered = 0;
  } else {
    after = window_start_;
    after.delivered = order_at_ / size;
  }
  return true;
}

void Lane::read_window() {
  window_start_ = here();
  buffer_.clear();
  fill(options_.window_records);
  order_.clear();
  for (size_t i = 0; i < buffer_.count(); ++i) order_.push_back(buffer_.record(i));
  Random random({*options_.seed, options_.number, position_.window});
  shuffle(std::span(order_), random);
  if (position_.delivered > order_.size() / options_.batch_size) {
    throw Error(ErrorCode::kDataFile, "a position has " + std::to_string(position_.delivered) +
                                          " batches delivered of a window of " +
                                          std::to_string(order_.size()) +
                                          " records: the files have changed since it was saved");
  }
  order_at_ = position_.delivered * options_.batch_size;
  position_.delivered = 0;
}

void Lane::keep_remainder() {
  remainder_.clear();
  for (; order_at_ < order_.size(); ++order_at_) remainder_.append(order_[order_at_]);
}

}  // namespace cpudist::data
