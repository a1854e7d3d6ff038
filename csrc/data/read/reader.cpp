// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/read/reader.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/threads.h"

namespace cpudist::data {

namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::kInvalidArgument, text);
}

size_t lane_limit(const ReaderOptions& options) {
  const size_t lanes = std::max<size_t>(options.lanes.size(), 1);
  return options.buffer_bytes / lanes / (options.input.fed ? 2 : 1);
}

}  // namespace

Reader::Reader(ReaderOptions options, std::shared_ptr<BatchPool> pool)
    : options_(std::move(options)),
      pool_(std::move(pool)),
      bad_lines_(options_.policy, options_.quarantine),
      lane_limit_bytes_(lane_limit(options_)),
      feeds_(options_.schema, options_.lanes.size(), options_.input.fed, lane_limit_bytes_) {
  check();
  pool_->keep_bytes(options_.buffer_bytes);
  const size_t count = options_.lanes.size();
  pool_->keep_buffers(count);
  if (options_.position) position_ = *options_.position;
  position_.lanes.resize(count);
  for (size_t i = 0; i < count; ++i) make_lane(i);
  running_ = count;
  try {
    for (auto& state : lanes_) {
      threads_.push_back(start_io_thread("a reader thread", [this, &state] { run(*state); }));
    }
  } catch (...) {
    stop();  // no destructor runs
    throw;
  }
}

Reader::~Reader() {
  stop();
  for (const auto& state : lanes_) pool_->give_back(state->lane->take_buffer());
}

void Reader::check() const {
  const ReaderOptions& options = options_;
  options.schema.check();
  check_input(options.input, options.lanes);
  if (options.batch_size == 0) refuse("batch_size must be at least 1");
  if (options.seed && options.window_records == 0) refuse("window_records must be at least 1");
  if (!options.position) return;
  const auto& lanes = options.position->lanes;
  if (lanes.size() != options.lanes.size() || options.position->turn >= lanes.size()) {
    refuse("the position is of a reader with " + std::to_string(lanes.size()) +
           " lanes, this one has " + std::to_string(options.lanes.size()) +
           "; use the number of threads that it was saved with");
  }
  for (size_t i = 0; i < lanes.size(); ++i) {
    if (lanes[i].split <= options.lanes[i].size()) continue;
    refuse("the position is in split " + std::to_string(lanes[i].split) + " of lane " +
           std::to_string(i) + ", which has " + std::to_string(options.lanes[i].size()) +
           "; use the files and the number of threads that it was saved with");
  }
}

void Reader::make_lane(size_t number) {
  LaneOptions options;
  options.number = number;
  options.batch_size = options_.batch_size;
  options.seed = options_.seed;
  const size_t batches = (options_.window_records + options_.batch_size - 1) / options_.batch_size;
  options.window_records = batches * options_.batch_size;
  auto state = std::make_unique<LaneState>();
  state->fed = feeds_.of_lane(number);
  auto reader = std::make_unique<SplitReader>(options_.schema, options_.input, bad_lines_, notices_,
                                              stop_, state->fed);
  state->lane = std::make_unique<Lane>(options_.schema, std::move(reader), options_.lanes[number],
                                       options, position_.lanes[number], pool_->take_buffer());
  lanes_.push_back(std::move(state));
}

void Reader::run(LaneState& state) noexcept {
  std::exception_ptr error;
  try {
    produce(state);
  } catch (...) {
    error = std::current_exception();
  }
  if (state.fed) state.fed->stop();
  state.lane->close();  // a command ends now, and not when the last user lets go of the reader
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    state.error = std::move(error);
    state.ended = true;
    last = --running_ == 0;
  }
  if (last && !stop_.raised()) make_tail();
  ready_.notify_all();
}

void Reader::produce(LaneState& state) {
  while (true) {
    Made made;
    made.batch = pool_->take();
    if (!state.lane->next(*made.batch, made.after)) break;
    made.bytes = size_bytes(*made.batch);
    if (!offer(state, std::move(made))) return;
  }
  state.remainder = state.lane->take_remainder();
}

bool Reader::offer(LaneState& state, Made made) {
  std::unique_lock lock(mutex_);
  state.room.wait(lock, [&] {
    return stopped_ || state.made.empty() || state.made_bytes + made.bytes <= lane_limit_bytes_;
  });
  if (stopped_) return false;
  state.made_bytes += made.bytes;
  state.made.push_back(std::move(made));
  const bool turn = lanes_[giving_lane()].get() == &state;  // it has not ended, so there is one
  lock.unlock();
  if (turn) ready_.notify_one();
  return true;
}

// Called by the thread that ends last, when the others are done with their remainders.
void Reader::make_tail() noexcept {
  std::exception_ptr failed;
  try {
    auto made = tail();
    const std::lock_guard lock(mutex_);
    tail_ = std::move(made);
  } catch (...) {
    failed = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  tail_error_ = std::move(failed);
  tail_made_ = true;
}

std::deque<std::shared_ptr<Batch>> Reader::tail() const {
  std::vector<const uint64_t*> records;
  for (const auto& state : lanes_) {
    for (size_t i = 0; i < state->remainder.count(); ++i) {
      records.push_back(state->remainder.record(i));
    }
  }
  std::deque<std::shared_ptr<Batch>> batches;
  const size_t size = options_.batch_size;
  size_t at = position_.tail_delivered * size;  // none is delivered before they are made
  for (; at < records.size(); at += size) {
    const size_t count = std::min(size, records.size() - at);
    if (count < size && options_.drop_last) break;
    std::shared_ptr<Batch> batch = pool_->take();
    assemble(options_.schema, std::span(records).subspan(at, count), *batch);
    batches.push_back(std::move(batch));
  }
  return batches;
}

// From the one whose turn it is, passes over those that have ended and have nothing left.
size_t Reader::giving_lane() const {
  for (size_t passed = 0; passed < lanes_.size(); ++passed) {
    const size_t lane = (position_.turn + passed) % lanes_.size();
    const LaneState& state = *lanes_[lane];
    if (!state.made.empty() || state.error || !state.ended) return lane;
  }
  return lanes_.size();
}

bool Reader::available() const {
  const size_t lane = giving_lane();
  if (lane == lanes_.size()) return tail_made_;
  return !lanes_[lane]->made.empty() || lanes_[lane]->error;
}

Delivered Reader::next(const Wait& wait) {
  std::unique_lock lock(mutex_);
  wait_until(
      lock, ready_, wait, [this] { return stopped_ || available(); },
      [&] { return slow_text(wait.timeout_s); });
  if (stopped_) throw Error(ErrorCode::kClosed, "the reader has been stopped");
  Delivered delivered = take();
  const bool more = available();
  lock.unlock();
  if (more) ready_.notify_one();
  return delivered;
}

Delivered Reader::take() {
  Delivered delivered;
  delivered.position = position_;  // has its memory before a batch is taken
  const size_t lane = giving_lane();
  if (lane < lanes_.size()) {
    LaneState& state = *lanes_[lane];
    if (state.made.empty()) throw_failure(state.error, "a reader thread");
    Made made = std::move(state.made.front());
    state.made.pop_front();
    state.made_bytes -= made.bytes;
    state.room.notify_one();
    position_.lanes[lane] = made.after;
    position_.turn = (lane + 1) % lanes_.size();
    delivered.batch = std::move(made.batch);
  } else if (tail_error_) {
    throw_failure(tail_error_, "a reader thread");
  } else if (!tail_.empty()) {
    delivered.batch = std::move(tail_.front());
    tail_.pop_front();
    ++position_.tail_delivered;
  }
  delivered.position = position_;
  return delivered;
}

ReaderPosition Reader::position() const {
  const std::lock_guard lock(mutex_);
  return position_;
}

std::string Reader::slow_text(double timeout_s) const {
  const size_t giving = giving_lane();
  const size_t lane = giving < lanes_.size() ? giving : position_.turn;
  const auto& splits = options_.lanes[lane];
  const size_t split = lanes_[lane]->lane->split_now();
  std::string text = "no batch within " + seconds_text(timeout_s) + ": lane " +
                     std::to_string(lane) + " of " + std::to_string(lanes_.size());
  if (split < splits.size()) {
    text += " reads " + options_.input.files[splits[split].file] + " (split " +
            std::to_string(split + 1) + " of " + std::to_string(splits.size()) + ")";
    const std::string& command = options_.input.command.text;
    if (!command.empty()) text += " through '" + command + "'";
    if (options_.input.fed) text += ", and waits for what is fed to it";
  }
  return text;
}

void Reader::stop() {
  stop_.raise();
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  ready_.notify_all();
  for (const auto& state : lanes_) state->room.notify_all();
  feeds_.stop();
  const std::lock_guard lock(join_mutex_);
  for (std::thread& thread : threads_) {
    if (thread.joinable()) join_thread(thread);
  }
}

}  // namespace cpudist::data
