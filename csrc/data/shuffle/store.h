// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A global shuffle of what stores hold: every record of every trainer's store goes to the store of
// one trainer, drawn by a seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "data/parse/schema.h"
#include "data/shuffle/exchange.h"
#include "data/store/store.h"

namespace cpudist::data {

// What a record is drawn by: itself (its trainer and number), its instance id, or the first id of
// one of the used slots; a record without an id goes by itself.
struct ShuffleKey {
  enum class Kind : uint8_t { kRecord, kInstance, kSlot } kind = Kind::kRecord;
  size_t used_slot = 0;  // counted among used slots; an integer one
};

// The first value of a used integer slot; nothing if the record has none there.
std::optional<int64_t> first_id(const Schema& schema, const uint64_t* record, size_t used_slot);

// Keeps what arrives by source, in slabs of their own size; the sink of an exchange.
class ShuffleSlabs {
 public:
  explicit ShuffleSlabs(uint32_t trainers) : sources_(trainers) {}
  void add(uint32_t source, std::span<const uint64_t> words);
  // All slabs, by source; ends the collecting.
  std::vector<Slab> take();

 private:
  struct Source {
    std::mutex mutex;
    RecordBuffer open;
    std::vector<Slab> slabs;
  };
  std::vector<Source> sources_;
};

// Gives the store's records away and takes what comes, over an exchange that is connected and has
// `slabs` as its sink. The store is empty if it throws: what send() and finish() throw, and
// kInternal if sums show that records were lost or doubled.
void shuffle_store(Store& store, ShuffleExchange& exchange, ShuffleSlabs& slabs, uint32_t rank,
                   uint32_t trainers, uint64_t seed, const ShuffleKey& key);

}  // namespace cpudist::data
