// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A parameter set at a cut: what is small is copied there and then, rows are frozen in their
// tables.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "table/store.h"
#include "wire/cut.h"
#include "wire/layout.h"

namespace cpudist::server {

// A dense block as it was.
struct FrozenBlock {
  uint32_t id = 0;
  std::string name;
  const char* dtype = "F32";
  uint64_t elements = 0;
  uint64_t state_bytes = 0;
  bool averaged = false;
  std::shared_ptr<table::BlockImage> image;
};

// Thread safety: all members.
class FrozenSet {
 public:
  // With `lock`, which is that of the set, held, exclusively until freeze() has returned. Throws
  // std::bad_alloc. Dense values of up to `copied_at_once` bytes are copied with the lock held; of
  // more, each block when it is about to change, or when it is its turn.
  FrozenSet(table::ParamStore& store, const wire::ParamSetLayout& layout,
            const wire::Version& version, std::shared_mutex& lock,
            const std::shared_ptr<table::ImageMemory>& memory, uint64_t copied_at_once);
  ~FrozenSet();
  FrozenSet(const FrozenSet&) = delete;
  FrozenSet& operator=(const FrozenSet&) = delete;

  // What it takes beside images of rows. False where the cap has no room for that.
  bool lend() noexcept;
  // The values of now are those of the cut. Throws std::bad_alloc, and nothing is frozen.
  void freeze();

  struct Table {
    uint32_t id = 0;
    std::string name;
    table::RecordShape shape;
    uint32_t rows_per_slab = 0;
    uint64_t records = 0;  // some may be of no row
  };
  const std::vector<Table>& tables() const { return tables_; }
  // Copies the blocks that are not copied. Throws as copy_slab.
  void copy_blocks();
  // The next slab of a table, as it was; 0: there is none. Throws Error(kSnapshot) where it cannot
  // be had any more.
  uint32_t copy_slab(uint32_t table, uint8_t* to);
  // Others need the memory: nothing more is kept, and what is not copied cannot be had.
  void give_up_for_memory() noexcept { memory_->fail(table::ImageMemory::Failure::kCap); }
  // The tables keep nothing for this any more.
  void release();
  // The tables go: they are not touched any more when this returns.
  void forget();

  // What the file of the blocks has, one after the other, beginning with `head`, which is filled.
  std::vector<std::span<const uint8_t>> block_file(std::string* head) const;
  // Steps and version; no files.
  const wire::CutStatus& status() const { return status_; }

 private:
  void describe_blocks(const wire::ParamSetLayout& layout);
  void freeze_blocks();
  void thaw() noexcept;
  [[noreturn]] void refuse(const std::string& why) const;
  void check_kept() const;

  table::ParamStore& store_;
  std::shared_mutex& lock_;
  const std::shared_ptr<table::ImageMemory> memory_;
  wire::CutStatus status_;
  std::vector<Table> tables_;
  std::vector<FrozenBlock> blocks_;
  const uint64_t copied_at_once_;
  uint64_t blocks_bytes_ = 0;
  uint64_t lent_bytes_ = 0;
  std::mutex mutex_;   // before the set's: held while the tables are used
  bool held_ = false;  // the tables keep rows for this
  std::vector<std::unique_ptr<table::RowImages>> images_;  // room for those of all tables
};

}  // namespace cpudist::server
