// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data/shuffle/store.h"

#include <string>
#include <utility>

#include "base/errors.h"
#include "kernels/hash.h"

namespace cpudist::data {
namespace {

// Another stream of numbers than those of instances and ids.
uint64_t own_key(uint32_t rank, uint64_t number) {
  return kernels::mix64(number + (static_cast<uint64_t>(rank) << 48));
}

uint64_t key_of(const Schema& schema, const ShuffleKey& key, const uint64_t* record, uint32_t rank,
                uint64_t number) {
  switch (key.kind) {
    case ShuffleKey::Kind::kRecord:
      break;
    case ShuffleKey::Kind::kInstance:
      return record[1];
    case ShuffleKey::Kind::kSlot:
      if (const auto id = first_id(schema, record, key.used_slot)) {
        return static_cast<uint64_t>(*id);
      }
      break;
  }
  return own_key(rank, number);
}

}  // namespace

std::optional<int64_t> first_id(const Schema& schema, const uint64_t* record, size_t used_slot) {
  const uint64_t* word = record + kRecordHeaderWords;
  size_t index = 0;
  for (const Slot& slot : schema.slots) {
    if (!slot.used) continue;
    const bool wanted = index++ == used_slot;
    if (slot.kind == SlotKind::kFloat) {
      if (wanted) return std::nullopt;
      continue;
    }
    const uint64_t count = slot.dim == kAnyNumber ? *word++ : slot.dim;
    if (wanted) {
      if (count == 0) return std::nullopt;
      return static_cast<int64_t>(*word);
    }
    word += count;
  }
  return std::nullopt;
}

void ShuffleSlabs::add(uint32_t source, std::span<const uint64_t> words) {
  Source& from = sources_.at(source);
  const std::lock_guard lock(from.mutex);
  for (size_t at = 0; at < words.size(); at += record_words(&words[at])) {
    from.open.append(&words[at]);
  }
  if (from.open.size_words() >= kSlabWords) {
    from.slabs.push_back(make_slab(from.open));
    from.open.clear();
  }
}

std::vector<Slab> ShuffleSlabs::take() {
  std::vector<Slab> all;
  for (Source& source : sources_) {
    const std::lock_guard lock(source.mutex);
    if (source.open.count() > 0) source.slabs.push_back(make_slab(source.open));
    source.open = RecordBuffer();
    for (Slab& slab : source.slabs) all.push_back(std::move(slab));
    source.slabs.clear();
  }
  return all;
}

void shuffle_store(Store& store, ShuffleExchange& exchange, ShuffleSlabs& slabs, uint32_t rank,
                   uint32_t trainers, uint64_t seed, const ShuffleKey& key) {
  const Schema& schema = store.schema();
  StoreWalk walk = store.take();
  while (const uint64_t* record = walk.next()) {
    const uint64_t drawn_by = key_of(schema, key, record, rank, walk.number());
    const uint32_t to = destination(seed, drawn_by, trainers);
    exchange.send(to, {record, record_words(record)});
  }
  const ShuffleTotals received = exchange.finish();
  store.adopt(slabs.take());
  if (store.records() != received.records) {
    store.release();
    throw Error(ErrorCode::kInternal, "global shuffle: " + std::to_string(received.records) +
                                          " records arrived, but another number of them was kept");
  }
}

}  // namespace cpudist::data
