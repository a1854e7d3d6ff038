// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/read/fed_queue.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cpudist::data {

namespace {

constexpr size_t kPieceBytes = 256 << 10;

}  // namespace

size_t FedQueue::bytes_of(const Item& item) {
  if (const auto* bytes = std::get_if<std::string>(&item)) return bytes->size();
  if (const auto* columns = std::get_if<ColumnRecords>(&item)) {
    return columns->records.capacity_bytes();
  }
  return 0;
}

bool FedQueue::push(Item item, const Wait& wait) {
  const size_t size = bytes_of(item);
  std::unique_lock lock(mutex_);
  wait_until(
      lock, room_, wait,
      [&] { return stopped_ || items_.empty() || bytes_ + size <= limit_bytes_; },
      [] { return std::string("a reader took no more of what is fed to it in time"); });
  if (stopped_) return false;
  items_.push_back(std::move(item));
  bytes_ += size;
  lock.unlock();
  filled_.notify_one();
  return true;
}

bool FedQueue::push_bytes(std::string_view bytes, const Wait& wait) {
  const size_t piece = std::clamp<size_t>(limit_bytes_ / 2, 1, kPieceBytes);
  while (!bytes.empty()) {
    const size_t size = std::min(bytes.size(), piece);
    if (!push(std::string(bytes.substr(0, size)), wait)) return false;
    bytes.remove_prefix(size);
  }
  const std::lock_guard lock(mutex_);
  return !stopped_;
}

void FedQueue::await_item(std::unique_lock<std::mutex>& lock) {
  filled_.wait(lock, [this] { return stopped_ || !items_.empty(); });
  if (stopped_) throw Error(ErrorCode::kClosed, "the reader has been stopped");
}

bool FedQueue::next_is_columns() {
  std::unique_lock lock(mutex_);
  await_item(lock);
  return std::holds_alternative<ColumnRecords>(items_.front());
}

FedQueue::Item FedQueue::pop() {
  std::unique_lock lock(mutex_);
  await_item(lock);
  Item item = std::move(items_.front());
  items_.pop_front();
  bytes_ -= bytes_of(item);
  lock.unlock();
  room_.notify_one();
  return item;
}

void FedQueue::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    items_.clear();
    bytes_ = 0;
  }
  room_.notify_all();
  filled_.notify_all();
}

size_t FedQueue::held_bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

size_t FedBytes::read(char* to, size_t size) {
  while (!ended_ && used_ == piece_.size()) {
    FedQueue::Item item = queue_.pop();
    if (const auto* failure = std::get_if<FedQueue::Failure>(&item)) {
      throw Error(ErrorCode::kDataFile, "cannot read " + path_ + ": " + failure->message);
    }
    if (std::holds_alternative<ColumnRecords>(item)) {
      throw Error(ErrorCode::kInvalidArgument, path_ + ": columns were fed where text is read");
    }
    ended_ = std::holds_alternative<FedQueue::End>(item);
    if (ended_) return 0;
    piece_ = std::move(std::get<std::string>(item));
    used_ = 0;
  }
  const size_t found = std::min(size, piece_.size() - used_);
  std::memcpy(to, piece_.data() + used_, found);
  used_ += found;
  return found;
}

std::optional<ColumnRecords> next_columns(FedQueue& queue, const std::string& path) {
  FedQueue::Item item = queue.pop();
  if (auto* columns = std::get_if<ColumnRecords>(&item)) return std::move(*columns);
  if (const auto* failure = std::get_if<FedQueue::Failure>(&item)) {
    throw Error(ErrorCode::kDataFile, "cannot read " + path + ": " + failure->message);
  }
  if (std::holds_alternative<FedQueue::End>(item)) return std::nullopt;
  throw Error(ErrorCode::kInvalidArgument, path + ": text was fed where columns are read");
}

Feeds::Feeds(const Schema& schema, size_t lanes, bool fed, size_t lane_limit_bytes)
    : schema_(schema) {
  for (size_t i = 0; fed && i < lanes; ++i) {
    queues_.push_back(std::make_unique<FedQueue>(lane_limit_bytes));
  }
}

FedQueue& Feeds::at(size_t lane) {
  if (lane < queues_.size()) return *queues_[lane];
  throw Error(ErrorCode::kInvalidArgument,
              queues_.empty() ? "nothing can be fed to this reader; make it with fed=True"
                              : "lane " + std::to_string(lane) + " does not exist, there are " +
                                    std::to_string(queues_.size()));
}

bool Feeds::bytes(size_t lane, std::string_view bytes, const Wait& wait) {
  return at(lane).push_bytes(bytes, wait);
}

bool Feeds::columns(size_t lane, size_t rows, std::span<const ColumnValues> columns,
                    const Wait& wait) {
  FedQueue& queue = at(lane);
  return queue.push(records_of_columns(schema_, rows, columns), wait);
}

bool Feeds::end_of_file(size_t lane, const Wait& wait) {
  return at(lane).push(FedQueue::End{}, wait);
}

bool Feeds::failure(size_t lane, const std::string& message, const Wait& wait) {
  return at(lane).push(FedQueue::Failure{message}, wait);
}

void Feeds::stop() noexcept {
  for (const auto& queue : queues_) queue->stop();
}

}  // namespace cpudist::data
