// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Records kept in memory, in the order of files and lines or in a permutation of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "data/parse/records.h"
#include "data/read/batch_pool.h"
#include "data/store/load.h"
#include "data/store/reader.h"

namespace cpudist::data {

// What does not depend on the order of records. Those of parts are added and xored.
struct Checksum {
  uint64_t sum = 0;
  uint64_t combined = 0;  // by xor
};

// Hands out every record with its number (in the order of files and lines) and frees what it has
// passed. Used by one thread.
class StoreWalk {
 public:
  explicit StoreWalk(std::vector<Slab> slabs) : slabs_(std::move(slabs)) {}

  // Null at the end. Valid until the next call.
  const uint64_t* next();
  uint64_t number() const { return number_; }  // of the record that next() gave

 private:
  std::vector<Slab> slabs_;
  size_t slab_ = 0;
  size_t word_ = 0;
  size_t in_slab_ = 0;
  uint64_t given_ = 0;
  uint64_t number_ = 0;
};

// Any thread; calls that change what is held exclude each other.
class Store {
 public:
  // Throws Error(kInvalidArgument).
  explicit Store(Schema schema);

  const Schema& schema() const { return schema_; }

  // Begins to read files by threads of its own; the store must be empty. Throws Error.
  void start_load(LoadOptions options);
  // Waits until all is read; the store holds it then. Throws Error: of the load (nothing is
  // held then), kTimeout, kInterrupted (it goes on). Nothing to wait for: returns at once.
  void wait_load(const Wait& wait);
  // The load that is going on, or the last one: to feed it, and for its bad lines and progress.
  // Null before, and after release().
  std::shared_ptr<StoreLoader> loader() const;

  uint64_t records() const;
  uint64_t size_bytes() const;  // of the records and of their order
  // Orders records by the seed; the same records and seed give the same order, whatever the order
  // was. Readers that there are keep theirs. Costs a random access to memory per record.
  void permute(uint64_t seed);

  // One pass over the records, in the store's order, or in that which permute() makes of a seed.
  std::unique_ptr<StoreReader> reader(const StoreReaderOptions& options,
                                      std::optional<uint64_t> seed,
                                      std::shared_ptr<BatchPool> pool) const;

  // Makes one record of those of each instance id (rewrite.h), in the order of files and lines;
  // returns how many were left out. Readers that there are keep theirs. Memory meanwhile: both.
  // Throws Error(kInvalidArgument): the schema has no instance ids, a load goes on, or slots are
  // exchanged.
  uint64_t merge_by_instance(size_t size);
  // Exchanges values of slots among records (rewrite.h), from what was loaded, whatever was
  // exchanged before; the order of records stays. Both are held until restore_slots().
  void exchange_slots(const std::vector<size_t>& used_slots, uint64_t seed);
  void restore_slots();
  bool slots_exchanged() const;

  Checksum checksum() const;
  // All records, which the store holds no more. Throws Error(kInvalidArgument) while readers
  // are there.
  StoreWalk take();
  // What an empty store is to hold, in this order.
  void adopt(std::vector<Slab> slabs);
  void adopt(std::vector<RecordBuffer> buffers);
  // Ends a load and lets all records go. Readers that there are keep them until they end.
  void release();

 private:
  void require_empty() const;                   // with the lock
  void require_loaded(const char* what) const;  // with the lock
  static std::shared_ptr<const Order> permuted(const Content& content, uint64_t seed);
  static std::shared_ptr<const Order> order_by(const Content& content,
                                               std::optional<uint64_t> seed);
  // With the lock; all or, where memory runs out, nothing.
  void replace(std::shared_ptr<Content> content, std::shared_ptr<Content> original,
               std::optional<uint64_t> seed);

  const Schema schema_;
  mutable std::mutex mutex_;
  std::shared_ptr<Content> content_;
  std::shared_ptr<Content> original_;  // while slots are exchanged
  std::shared_ptr<const Order> order_;
  std::optional<uint64_t> order_seed_;  // that it was permuted by
  std::shared_ptr<StoreLoader> loader_;
  bool loading_ = false;
};

}  // namespace cpudist::data
