// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/snapshot/frozen.h"

#include <cstring>
#include <utility>

#include "base/errors.h"
#include "server/snapshot/tensors.h"

namespace cpudist::server {

using table::ImageMemory;

namespace {

constexpr const char* kClosed = "the parameter set was closed before its rows were written";

}  // namespace

FrozenSet::FrozenSet(table::ParamStore& store, const wire::ParamSetLayout& layout,
                     const wire::Version& version, std::shared_mutex& lock,
                     const std::shared_ptr<ImageMemory>& memory, uint64_t copied_at_once)
    : store_(store), lock_(lock), memory_(memory), copied_at_once_(copied_at_once) {
  status_.version = version;
  describe_blocks(layout);
  for (const auto& table : store.tables) {
    status_.table_steps.push_back(table->step());
    tables_.push_back({table->id(), table->spec().name, table->shape(), table->rows_per_slab(),
                       table->record_count()});
  }
}

FrozenSet::~FrozenSet() {
  release();
  if (memory_->cap() != nullptr) memory_->cap()->give_back(lent_bytes_);
}

bool FrozenSet::lend() noexcept {
  uint64_t size_bytes = blocks_bytes_;
  for (const auto& table : store_.tables) size_bytes += table->freeze_bytes();
  if (memory_->cap() == nullptr) return true;
  if (!memory_->cap()->lend(size_bytes)) return false;
  lent_bytes_ += size_bytes;
  return true;
}

void FrozenSet::freeze() {
  images_.reserve(store_.tables.size());  // to let go takes no memory
  try {
    freeze_blocks();
    for (const auto& table : store_.tables) table->freeze(memory_);
  } catch (...) {
    thaw();
    throw;
  }
  held_ = true;
}

void FrozenSet::thaw() noexcept {
  for (const auto& block : store_.blocks) {
    if (block != nullptr) block->thaw();
  }
  for (const auto& table : store_.tables) images_.push_back(table->thaw());
}

void FrozenSet::describe_blocks(const wire::ParamSetLayout& layout) {
  status_.block_steps.resize(layout.blocks.size());
  for (const auto& block : store_.blocks) {
    if (block == nullptr) continue;
    status_.block_steps[block->id()] = block->step();
    FrozenBlock one;
    one.id = block->id();
    one.name = block->spec().name;
    one.dtype = block->spec().dtype == wire::DType::kFloat64 ? "F64" : "F32";
    one.elements = block->weight().size() / size_of(block->spec().dtype);
    one.averaged = store_.averaging.on() && block->stored();
    one.state_bytes = block->state().size();
    one.image = std::make_shared<table::BlockImage>();
    one.image->updates = status_.version.round;
    one.image->memory = memory_;
    blocks_.push_back(std::move(one));
    blocks_bytes_ += block->image_bytes();
  }
}

void FrozenSet::freeze_blocks() {
  for (const FrozenBlock& one : blocks_) {
    table::DenseBlock& block = *store_.blocks[one.id];
    block.freeze(one.image);
    if (blocks_bytes_ > copied_at_once_) continue;
    block.keep();
    if (one.image->values == nullptr) throw std::bad_alloc();
  }
}

void FrozenSet::copy_blocks() {
  for (const FrozenBlock& block : blocks_) {
    const std::lock_guard use(mutex_);
    if (!held_) refuse(kClosed);
    const std::shared_lock lock(lock_);
    store_.blocks[block.id]->keep();
    check_kept();
  }
}

void FrozenSet::refuse(const std::string& why) const { throw Error(ErrorCode::kSnapshot, why); }

void FrozenSet::check_kept() const {
  switch (memory_->failure()) {
    case ImageMemory::Failure::kNone:
      return;
    case ImageMemory::Failure::kLimit:
      refuse("more rows changed before they were written than " +
             std::to_string(memory_->limit_bytes()) +
             " bytes have room for; set Server(snapshot_memory_bytes=) or "
             "CPUDIST_SERVER_SNAPSHOT_MEMORY_BYTES higher, or save to a faster disk");
    case ImageMemory::Failure::kMemory:
      refuse("no memory is left to keep rows that change before they are written");
    case ImageMemory::Failure::kDropped:
      refuse("rows were dropped before they were written, since others are loaded");
    case ImageMemory::Failure::kCap:
      refuse(
          "what it keeps until it is written, and pushes, have no room together under "
          "memory_cap_bytes = " +
          std::to_string(memory_->cap()->cap_bytes()) +
          "; set CPUDIST_SERVER_MEMORY_CAP_BYTES higher, or to 0 for no cap");
  }
}

uint32_t FrozenSet::copy_slab(uint32_t table, uint8_t* to) {
  const std::lock_guard use(mutex_);
  if (!held_) refuse(kClosed);
  const std::shared_lock lock(lock_);
  check_kept();
  return store_.tables[table]->copy_frozen(to);
}

void FrozenSet::release() {
  std::vector<std::unique_ptr<table::RowImages>> images;  // freed without the locks
  const std::lock_guard use(mutex_);
  if (!held_) return;
  held_ = false;
  const std::unique_lock lock(lock_);
  thaw();
  images.swap(images_);
}

void FrozenSet::forget() {
  const std::lock_guard use(mutex_);
  held_ = false;
}

std::vector<std::span<const uint8_t>> FrozenSet::block_file(std::string* head) const {
  std::vector<TensorEntry> entries;
  uint64_t end = 0;
  std::vector<std::span<const uint8_t>> pieces(1);
  // Those of 8 bytes first: all lie at multiples of their size then.
  for (const char* const dtype : {"F64", "F32"}) {
    for (const FrozenBlock& block : blocks_) {
      if (std::strcmp(block.dtype, dtype) != 0) continue;
      const uint8_t* from = block.image->values.get();
      const auto add = [&](const char* part, uint64_t elements) {
        TensorEntry entry{block.name + part, block.dtype, {elements}};
        place_tensor(&entry, &end);
        pieces.emplace_back(from, entry.end - entry.begin);
        from += entry.end - entry.begin;
        entries.push_back(std::move(entry));
      };
      add(".weight", block.elements);
      if (block.state_bytes > 0) add(".state", block.state_bytes / size_of_dtype(block.dtype));
      if (block.averaged) add(".average", block.elements);
    }
  }
  *head = tensors_head("torch_cpudist.dense", entries);
  pieces.front() = bytes_of(*head);
  return pieces;
}

}  // namespace cpudist::server
