// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Which rows have a slot, until when, and whose values stand there.

#include "client/geo/slot_keeper.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <unordered_set>

namespace cpudist::client {
namespace {

// Slots whose values servers take, or give, at once.
constexpr size_t kRefreshedRows = 32768;
// A budget that was exceeded is kept with this part of it to spare.
constexpr uint64_t kSparedParts = 8;

}  // namespace

SlotKeeper::SlotKeeper(ParamSet& set, std::vector<GeoTable>& tables, bool alone,
                       uint64_t cache_bytes)
    : owner_(set),
      set_(*owner_.state()),
      tables_(tables),
      alone_(alone),
      cache_bytes_(cache_bytes),
      retired_(tables.size()) {
  for (uint32_t t = 0; t < tables_.size(); ++t) {
    const auto held = lock(t);
    if (tables_[t].slots() != nullptr) set_.table(t).take_from(tables_[t].slots());
  }
}

SlotKeeper::~SlotKeeper() {
  for (uint32_t t = 0; t < tables_.size(); ++t) {
    const auto held = lock(t);
    set_.table(t).take_from(nullptr);
  }
}

GeoSlots& SlotKeeper::slots(uint32_t index) {
  set_.table(index);  // throws for one that is not there
  GeoTable& own = tables_[index];
  if (own.slots() != nullptr) return *own.slots();
  throw Error(ErrorCode::kInvalidArgument,
              "table '" + own.spec().name + "' is not remote: it has no slots");
}

std::unique_lock<std::mutex> SlotKeeper::lock(uint32_t index) {
  if (tables_[index].slots() == nullptr) return {};
  return std::unique_lock(set_.table(index).mutex);
}

void SlotKeeper::update(const TableGradient& gradient, const kernels::OptimizerConfig& config,
                        int64_t step) {
  GeoTable& own = tables_[gradient.table];
  TableCache& cache = set_.table(gradient.table);
  const size_t row_bytes = own.spec().dim * sizeof(float);
  std::vector<int64_t> absent;
  std::vector<int64_t> let_go;  // of these, those whose values the cache has let go
  std::vector<float> rows;
  {
    const auto held = lock(gradient.table);
    const auto keys = own.take_keys(cache, {gradient.keys, static_cast<size_t>(gradient.count)});
    rows.resize(keys.size() * own.spec().dim);
    for (const int64_t key : keys) {
      const float* const row = cache.find_row(key);
      if (row == nullptr) {
        let_go.push_back(key);
        continue;
      }
      std::memcpy(rows.data() + absent.size() * own.spec().dim, row, row_bytes);
      absent.push_back(key);
    }
  }
  if (!let_go.empty()) {
    owner_.fetch_rows(gradient.table, let_go, rows.data() + absent.size() * own.spec().dim);
    absent.insert(absent.end(), let_go.begin(), let_go.end());
  }
  const auto held = lock(gradient.table);
  own.slots()->add(absent, rows.data());
  own.update_slots(config, step, gradient.rows);
}

void SlotKeeper::forget_lookups() {
  for (uint32_t t = 0; t < tables_.size(); ++t) {
    if (tables_[t].slots() == nullptr) continue;
    const auto held = lock(t);
    set_.table(t).invalidate();
  }
}

void SlotKeeper::refresh() {
  for (uint32_t t = 0; t < tables_.size(); ++t) {
    GeoSlots* const own = tables_[t].slots();
    if (own == nullptr) continue;
    const std::vector<int64_t> all = own->keys();
    const size_t dim = tables_[t].spec().dim;
    std::vector<float> rows(std::min<size_t>(all.size(), kRefreshedRows) * dim);
    for (size_t begin = 0; begin < all.size(); begin += kRefreshedRows) {
      const auto keys = std::span(all).subspan(begin, std::min(kRefreshedRows, all.size() - begin));
      owner_.fetch_rows(t, keys, rows.data());
      const auto held = lock(t);
      set_.table(t).refresh();
      for (size_t i = 0; i < keys.size(); ++i) {
        const GeoSlots::Slot& slot = *own->find(keys[i]);
        std::copy_n(rows.data() + i * dim, dim, own->weight(slot));
        if (!alone_) std::copy_n(rows.data() + i * dim, dim, own->shadow(slot));
      }
    }
  }
}

void SlotKeeper::store_rows(uint32_t index, std::span<const int64_t> all) {
  const size_t dim = tables_[index].spec().dim;
  std::vector<float> rows(std::min<size_t>(all.size(), kRefreshedRows) * dim);
  for (size_t begin = 0; begin < all.size(); begin += kRefreshedRows) {
    const auto keys = all.subspan(begin, std::min(kRefreshedRows, all.size() - begin));
    for (size_t i = 0; i < keys.size(); ++i) {
      std::copy_n(tables_[index].row(keys[i], nullptr), dim, rows.data() + i * dim);
    }
    owner_.store_table(index, keys, rows.data(), nullptr, nullptr, 0);
  }
}

void SlotKeeper::store() {
  for (uint32_t t = 0; t < tables_.size(); ++t) {
    if (tables_[t].slots() != nullptr) store_rows(t, tables_[t].slots()->keys());
  }
}

void SlotKeeper::keep_budget() {
  choose_retired();
  for (uint32_t t = 0; t < tables_.size(); ++t) {
    if (!retired_[t].empty()) store_rows(t, retired_[t]);
  }
  free_retired();
  for (GeoTable& table : tables_) table.next_interval();
}

uint64_t SlotKeeper::size_bytes() const {
  uint64_t bytes = 0;
  for (const GeoTable& table : tables_) {
    if (table.slots() != nullptr) bytes += table.slots()->size() * table.slots()->slot_bytes();
  }
  return bytes;
}

void SlotKeeper::choose_retired() {
  keep_all();
  const uint64_t used = size_bytes();
  if (used <= cache_bytes_) return;
  // So much less that not every exchange has to look through all slots.
  uint64_t excess = used - (cache_bytes_ - cache_bytes_ / kSparedParts);
  std::map<uint32_t, uint64_t> bytes;  // by the interval of the last touch
  for (GeoTable& table : tables_) {
    GeoSlots* const own = table.slots();
    if (own == nullptr) continue;
    own->each([&](const GeoSlots::Slot& slot) {
      const uint32_t touched = GeoSlots::touched(slot);
      if (touched != table.interval()) bytes[touched] += own->slot_bytes();
    });
  }
  uint32_t last = 0;   // of this interval some go, of those before it all
  uint64_t quota = 0;  // bytes of it
  for (const auto& [interval, size] : bytes) {
    last = interval;
    quota = std::min(size, excess);
    if (size >= excess) break;
    excess -= size;
  }
  for (uint32_t t = 0; t < tables_.size(); ++t) {
    GeoSlots* const own = tables_[t].slots();
    if (own == nullptr) continue;
    std::vector<int64_t> some;
    own->each([&](const GeoSlots::Slot& slot) {
      const uint32_t touched = GeoSlots::touched(slot);
      if (touched == tables_[t].interval() || touched > last) return;
      (touched < last ? retired_[t] : some).push_back(slot.key);
    });
    // The lowest keys, so that which ones go is the same in every run.
    const uint64_t wanted = (quota + own->slot_bytes() - 1) / own->slot_bytes();
    const size_t count = std::min<size_t>(some.size(), wanted);
    std::nth_element(some.begin(), some.begin() + static_cast<std::ptrdiff_t>(count), some.end());
    retired_[t].insert(retired_[t].end(), some.begin(),
                       some.begin() + static_cast<std::ptrdiff_t>(count));
    quota -= std::min<uint64_t>(quota, count * own->slot_bytes());
  }
  // A trainer that is alone has servers take the values of all first.
  if (alone_) return;
  free_retired();
}

void SlotKeeper::keep_all() {
  for (auto& keys : retired_) keys.clear();
}

bool SlotKeeper::retires() const {
  return std::any_of(retired_.begin(), retired_.end(),
                     [](const std::vector<int64_t>& keys) { return !keys.empty(); });
}

void SlotKeeper::free_retired() {
  for (uint32_t t = 0; t < tables_.size(); ++t) {
    if (retired_[t].empty()) continue;
    const std::unordered_set<int64_t> chosen(retired_[t].begin(), retired_[t].end());
    const auto held = lock(t);
    retired_rows_ += tables_[t].slots()->free_if([&](const GeoSlots::Slot& slot) {
      return GeoSlots::touched(slot) != tables_[t].interval() && chosen.contains(slot.key);
    });
    std::erase_if(retired_[t],
                  [&](int64_t key) { return tables_[t].row(key, nullptr) == nullptr; });
  }
}

uint64_t SlotKeeper::count(uint32_t index) { return slots(index).size(); }

void SlotKeeper::read(uint32_t index, const SlotArrays& to) {
  GeoSlots& own = slots(index);
  const size_t elements = own.state_elements();
  size_t at = 0;
  own.each([&](const GeoSlots::Slot& slot) {
    to.keys[at] = slot.key;
    to.counts[at] = own.count(slot);
    if (elements > 0) std::copy_n(own.state(slot), elements, to.state + at * elements);
    ++at;
  });
}

void SlotKeeper::write(uint32_t index, uint64_t rows, const SlotArrays& from) {
  GeoSlots& own = slots(index);
  const size_t elements = own.state_elements();
  const size_t dim = tables_[index].spec().dim;
  std::vector<float> values(rows * dim);
  const std::span<const int64_t> keys(from.keys, rows);
  owner_.fetch_rows(index, keys, values.data());
  const auto held = lock(index);
  own.clear();
  tables_[index].forget_shadows();  // nor is a row touched that has no slot any more
  set_.table(index).invalidate();
  own.add(keys, values.data());
  for (size_t i = 0; i < rows; ++i) {
    const GeoSlots::Slot& slot = *own.find(keys[i]);
    own.set_count(slot, from.counts[i]);
    if (elements > 0) std::copy_n(from.state + i * elements, elements, own.state(slot));
  }
  tables_[index].forget_shadows();  // the servers have all of them
}

}  // namespace cpudist::client
