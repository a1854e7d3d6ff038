// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/store/reader.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "base/threads.h"

namespace cpudist::data {

namespace {

const StoreReaderOptions& checked(const StoreReaderOptions& options, size_t records) {
  if (options.batch_size == 0 || options.threads == 0) {
    throw Error(ErrorCode::kInvalidArgument, "batch_size and threads must be at least 1");
  }
  if (options.begin_record > records) {
    throw Error(ErrorCode::kInvalidArgument,
                "cannot begin at record " + std::to_string(options.begin_record) + " of " +
                    std::to_string(records) + ": the position is of other data");
  }
  return options;
}

}  // namespace

StoreReader::StoreReader(const Schema& schema, std::shared_ptr<const Content> content,
                         std::shared_ptr<const Order> order, const StoreReaderOptions& options,
                         std::shared_ptr<BatchPool> pool)
    : schema_(schema),
      content_(std::move(content)),
      order_(std::move(order)),
      options_(checked(options, order_->size())),
      pool_(std::move(pool)),
      batches_(batch_count()) {
  pool_->keep_bytes(options_.buffer_bytes);
  try {
    for (size_t i = 0; i < options_.threads; ++i) {
      threads_.push_back(start_io_thread("a reader thread", [this] { run(); }));
    }
  } catch (...) {
    stop();  // no destructor runs
    throw;
  }
}

StoreReader::~StoreReader() { stop(); }

uint64_t StoreReader::batch_count() const {
  const uint64_t records = order_->size() - options_.begin_record;
  const uint64_t whole = records / options_.batch_size;
  const bool rest = records % options_.batch_size != 0;
  return whole + (rest && !options_.drop_last ? 1 : 0);
}

void StoreReader::run() noexcept {
  try {
    produce();
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
    }
    ready_.notify_all();
  }
}

// Others' unfinished batches count as large as the largest yet, so that the bound holds; the first
// of a reader are made one by one.
bool StoreReader::may_begin() const {
  const uint64_t ahead = begun_ - delivered_;
  if (ahead == 0) return true;
  if (largest_bytes_ == 0) return false;
  const uint64_t unfinished = ahead - made_.size();
  return made_bytes_ + (unfinished + 1) * largest_bytes_ <= options_.buffer_bytes;
}

void StoreReader::produce() {
  std::unique_lock lock(mutex_);
  while (true) {
    room_.wait(lock, [this] { return stopped_ || begun_ == batches_ || may_begin(); });
    if (stopped_ || begun_ == batches_) return;
    const uint64_t number = begun_++;
    lock.unlock();
    const size_t at = options_.begin_record + number * options_.batch_size;
    const size_t count = std::min(options_.batch_size, order_->size() - at);
    std::shared_ptr<Batch> batch = pool_->take();
    assemble(schema_, std::span(*order_).subspan(at, count), *batch);
    const size_t size = size_bytes(*batch);
    lock.lock();
    made_bytes_ += size;
    const bool first = largest_bytes_ == 0;
    largest_bytes_ = std::max(largest_bytes_, size);
    made_.emplace(number, std::move(batch));
    if (first) room_.notify_all();
    if (number == delivered_) ready_.notify_one();
  }
}

StoreBatch StoreReader::next(const Wait& wait) {
  std::unique_lock lock(mutex_);
  const auto available = [this] {
    return delivered_ == batches_ || (!made_.empty() && made_.begin()->first == delivered_);
  };
  wait_until(
      lock, ready_, wait, [&] { return stopped_ || error_ || available(); },
      [&] {
        return "no batch within " + seconds_text(wait.timeout_s) + ": " +
               std::to_string(options_.threads) + " threads make batches of " +
               std::to_string(options_.batch_size) + " records";
      });
  if (stopped_) throw Error(ErrorCode::kClosed, "the reader has been stopped");
  if (error_) throw_failure(error_, "a reader thread");
  StoreBatch result;
  if (delivered_ < batches_) {
    result.batch = std::move(made_.begin()->second);
    made_.erase(made_.begin());
    made_bytes_ -= size_bytes(*result.batch);
    ++delivered_;
  }
  result.records_before =
      std::min<uint64_t>(order_->size(), options_.begin_record + delivered_ * options_.batch_size);
  const bool more = available();
  lock.unlock();
  room_.notify_one();
  if (more) ready_.notify_one();
  return result;
}

uint64_t StoreReader::position() const {
  const std::lock_guard lock(mutex_);
  return std::min<uint64_t>(order_->size(),
                            options_.begin_record + delivered_ * options_.batch_size);
}

void StoreReader::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  room_.notify_all();
  ready_.notify_all();
  const std::lock_guard lock(join_mutex_);
  for (std::thread& thread : threads_) {
    if (thread.joinable()) join_thread(thread);
  }
}

}  // namespace cpudist::data
