// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/store/store.h"

#include <algorithm>
#include <bit>
#include <span>
#include <string>
#include <utility>

#include "data/store/random.h"
#include "data/store/rewrite.h"
#include "kernels/hash.h"

namespace cpudist::data {

namespace {

uint64_t hash_of(const uint64_t* record, size_t words) {
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15ULL;
  uint64_t hash = words;
  for (size_t i = 0; i < words; ++i) hash = std::rotl((hash ^ record[i]) * kFactor, 29);
  return kernels::mix64(hash);
}

}  // namespace

const uint64_t* StoreWalk::next() {
  while (slab_ < slabs_.size() && in_slab_ == slabs_[slab_].records) {
    slabs_[slab_++] = {};
    word_ = in_slab_ = 0;
  }
  if (slab_ == slabs_.size()) return nullptr;
  const uint64_t* record = slabs_[slab_].words.get() + word_;
  word_ += record_words(record);
  ++in_slab_;
  number_ = given_++;
  return record;
}

Store::Store(Schema schema)
    : schema_(std::move(schema)),
      content_(std::make_shared<Content>()),
      order_(std::make_shared<const Order>()) {
  schema_.check();
}

void Store::require_empty() const {
  if (loading_) {
    throw Error(ErrorCode::kInvalidArgument, "a load is going on: wait for it, or release()");
  }
  if (content_->records != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "the store holds " + std::to_string(content_->records) + " records: release() it first");
  }
}

void Store::require_loaded(const char* what) const {
  if (loading_) {
    throw Error(ErrorCode::kInvalidArgument, "a load is going on: wait for it, or release()");
  }
  if (original_) {
    throw Error(
        ErrorCode::kInvalidArgument,
        std::string("slots have the values of other records: restore_slots() before ") + what);
  }
}

void Store::start_load(LoadOptions options) {
  const std::lock_guard lock(mutex_);
  require_empty();
  loader_ = std::make_shared<StoreLoader>(schema_, std::move(options));
  loading_ = true;
}

void Store::wait_load(const Wait& wait) {
  const std::shared_ptr<StoreLoader> loader = this->loader();
  if (!loader) return;
  std::optional<Error> failed;
  try {
    loader->wait(wait);
  } catch (const Error& error) {
    const bool goes_on =
        error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kInterrupted;
    if (goes_on) throw;
    failed = error;
    loader->stop();
  }
  const std::lock_guard lock(mutex_);
  if (loader_ == loader && loading_) {
    loading_ = false;
    if (!failed) {
      content_ = std::make_shared<Content>(make_content(loader->take_slabs()));
      order_ = std::make_shared<const Order>(order_of(*content_));
    }
  }
  if (failed) throw Error(*failed);
}

std::shared_ptr<StoreLoader> Store::loader() const {
  const std::lock_guard lock(mutex_);
  return loader_;
}

uint64_t Store::records() const {
  const std::lock_guard lock(mutex_);
  return content_->records;
}

uint64_t Store::size_bytes() const {
  const std::lock_guard lock(mutex_);
  const uint64_t words = content_->size_words + (original_ ? original_->size_words : 0);
  return words * sizeof(uint64_t) + order_->size() * sizeof(const uint64_t*);
}

std::shared_ptr<const Order> Store::permuted(const Content& content, uint64_t seed) {
  Order order = order_of(content);
  Random random({seed});
  shuffle(std::span(order), random);
  return std::make_shared<const Order>(std::move(order));
}

// What permutes by a seed does so by the number of records alone.
std::shared_ptr<const Order> Store::order_by(const Content& content, std::optional<uint64_t> seed) {
  if (seed) return permuted(content, *seed);
  return std::make_shared<const Order>(order_of(content));
}

// An order points into its content: both are made before either is replaced.
void Store::replace(std::shared_ptr<Content> content, std::shared_ptr<Content> original,
                    std::optional<uint64_t> seed) {
  std::shared_ptr<const Order> order = order_by(*content, seed);
  content_ = std::move(content);
  original_ = std::move(original);
  order_seed_ = seed;
  order_ = std::move(order);
}

void Store::permute(uint64_t seed) {
  const std::lock_guard lock(mutex_);
  order_ = permuted(*content_, seed);
  order_seed_ = seed;
}

uint64_t Store::merge_by_instance(size_t size) {
  const std::lock_guard lock(mutex_);
  require_loaded("records are merged");
  if (!schema_.instance_ids) {
    throw Error(ErrorCode::kInvalidArgument, "the records have no instance ids to be merged by");
  }
  Merged merged = merged_by_instance(schema_, *content_, size);
  replace(std::make_shared<Content>(make_content(std::move(merged.slabs))), nullptr, std::nullopt);
  return merged.left_out;
}

void Store::exchange_slots(const std::vector<size_t>& used_slots, uint64_t seed) {
  const std::lock_guard lock(mutex_);
  if (loading_) require_loaded("slots are exchanged");
  const size_t used = static_cast<size_t>(std::count_if(
      schema_.slots.begin(), schema_.slots.end(), [](const Slot& slot) { return slot.used; }));
  for (const size_t slot : used_slots) {
    if (slot < used) continue;
    throw Error(ErrorCode::kInvalidArgument, "slot " + std::to_string(slot) + " of " +
                                                 std::to_string(used) +
                                                 " used ones does not exist");
  }
  const std::shared_ptr<Content> original = original_ ? original_ : content_;
  auto exchanged = std::make_shared<Content>(
      make_content(with_slots_exchanged(schema_, *original, used_slots, seed)));
  replace(std::move(exchanged), original, order_seed_);
}

void Store::restore_slots() {
  const std::lock_guard lock(mutex_);
  if (!original_) return;
  replace(original_, nullptr, order_seed_);
}

bool Store::slots_exchanged() const {
  const std::lock_guard lock(mutex_);
  return original_ != nullptr;
}

std::unique_ptr<StoreReader> Store::reader(const StoreReaderOptions& options,
                                           std::optional<uint64_t> seed,
                                           std::shared_ptr<BatchPool> pool) const {
  const std::lock_guard lock(mutex_);
  return std::make_unique<StoreReader>(
      schema_, content_, seed ? permuted(*content_, *seed) : order_, options, std::move(pool));
}

Checksum Store::checksum() const {
  std::shared_ptr<const Content> content;
  {
    const std::lock_guard lock(mutex_);
    content = content_;
  }
  Checksum result;
  for (const Slab& slab : content->slabs) {
    const uint64_t* record = slab.words.get();
    for (size_t i = 0; i < slab.records; ++i) {
      const uint64_t hash = hash_of(record, record_words(record));
      result.sum += hash;
      result.combined ^= hash;
      record += record_words(record);
    }
  }
  return result;
}

StoreWalk Store::take() {
  const std::lock_guard lock(mutex_);
  if (original_) require_loaded("records are moved");
  if (loading_ || content_.use_count() > 1) {
    throw Error(ErrorCode::kInvalidArgument,
                loading_
                    ? "a load is going on: wait for it"
                    : "records cannot be moved while readers of the store are there; stop them");
  }
  std::vector<Slab> slabs = std::move(content_->slabs);
  content_ = std::make_shared<Content>();
  order_ = std::make_shared<const Order>();
  order_seed_.reset();
  return StoreWalk(std::move(slabs));
}

void Store::adopt(std::vector<Slab> slabs) {
  const std::lock_guard lock(mutex_);
  require_empty();
  content_ = std::make_shared<Content>(make_content(std::move(slabs)));
  order_ = std::make_shared<const Order>(order_of(*content_));
}

void Store::adopt(std::vector<RecordBuffer> buffers) {
  std::vector<Slab> slabs;
  for (RecordBuffer& buffer : buffers) {
    slabs.push_back(make_slab(buffer));
    buffer = RecordBuffer();
  }
  adopt(std::move(slabs));
}

void Store::release() {
  std::shared_ptr<StoreLoader> loader;
  {
    const std::lock_guard lock(mutex_);
    loader = std::move(loader_);
    loading_ = false;
    content_ = std::make_shared<Content>();
    original_ = nullptr;
    order_ = std::make_shared<const Order>();
    order_seed_.reset();
  }
  if (loader) loader->stop();
}

}  // namespace cpudist::data
