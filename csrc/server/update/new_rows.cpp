// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/update/new_rows.h"

#include <algorithm>
#include <functional>
#include <span>

#include "base/errors.h"

namespace cpudist::server {
namespace {

constexpr size_t kRowsPerTask = 64;

}  // namespace

void NewRows::plan(const Pushes& pushes, table::ParamStore& store) {
  wanted_.clear();
  for (const auto& [rank, push] : pushes) {
    for (size_t i = 0; i < push.view.tables.size(); ++i) {
      const wire::TableSection& section = push.view.tables[i];
      const SectionRows& rows = push.sections[i];
      if (rows.missing.empty()) continue;
      Wanted* wanted = find_table(section.table);
      if (wanted == nullptr) {
        wanted = &wanted_.emplace_back();
        wanted->table = section.table;
      }
      for (const uint32_t at : rows.missing) wanted->keys.push_back(section.keys[rows.order[at]]);
      wanted->ends.push_back(wanted->keys.size());
      wanted->counts.push_back(push.view.header.weight > 0 ? 1 : 0);
    }
  }
  for (Wanted& wanted : wanted_) find(wanted, *store.tables[wanted.table], deduper_);
  for (const Wanted& wanted : wanted_) {
    store.tables[wanted.table]->check_bound(wanted.absent.size());
  }
  if (std::all_of(wanted_.begin(), wanted_.end(),
                  [](const Wanted& wanted) { return wanted.absent.empty(); })) {
    return;
  }
  const auto reserved = reserve(pushes, store);
  for (const Wanted& wanted : wanted_) store.tables[wanted.table]->make_room(wanted.absent);
}

MemoryCap::Reservation NewRows::reserve(const Pushes& pushes,
                                        const table::ParamStore& store) const {
  if (!memory_) return {};
  try {
    return memory_(growth(pushes, store));
  } catch (const Error&) {
    // What was made ahead spares time only.
    uint64_t freed = 0;
    for (const auto& table : store.tables) freed += table->give_up_ahead();
    if (freed == 0) throw;
  }
  return memory_(growth(pushes, store));
}

RowGrowth NewRows::growth(const Pushes& pushes, const table::ParamStore& store) const {
  RowGrowth growth;
  uint64_t most = 0;
  for (const Wanted& wanted : wanted_) {
    const table::Table& table = *store.tables[wanted.table];
    const uint64_t bytes = table.growth_bytes(wanted.absent);
    growth.rows += wanted.absent.size();
    growth.bytes += bytes;
    if (bytes >= most) growth.table = table.spec().name;
    most = std::max(most, bytes);
  }
  for (const auto& [rank, push] : pushes) {
    growth.own_bytes += push.payload.size();
    growth.own_waiting_bytes += push.pending.size_bytes();
    growth.own_reserved_bytes += push.payload.reserved_bytes();
  }
  return growth;
}

NewRows::Wanted* NewRows::find_table(uint32_t table) {
  const auto found = std::find_if(wanted_.begin(), wanted_.end(),
                                  [table](const Wanted& wanted) { return wanted.table == table; });
  return found == wanted_.end() ? nullptr : &*found;
}

void NewRows::find(Wanted& wanted, table::Table& table, kernels::KeyDeduper& deduper) {
  const size_t count = wanted.keys.size();
  wanted.distinct.resize(count);
  wanted.inverse.resize(count);
  wanted.distinct.resize(
      deduper.run(wanted.keys.data(), count, wanted.distinct.data(), wanted.inverse.data()));
  wanted.records.resize(wanted.distinct.size());
  // Another push may have made it since, or somebody stored it.
  table.find(wanted.distinct, wanted.records.data(), nullptr);
  if (!table.admission().admits_all()) {
    table.begin_admission();
    wanted.admitted.plan(
        {wanted.distinct, wanted.records, wanted.inverse, wanted.ends, wanted.counts},
        table.admission());
  }
  for (size_t i = 0; i < wanted.distinct.size(); ++i) {
    if (wanted.records[i] != table::RowIndex::kNone || !wanted.admitted.makes(i)) continue;
    wanted.absent.push_back(wanted.distinct[i]);
  }
  wanted.made.reserve(wanted.absent.size());
}

void NewRows::make(Pushes& pushes, table::ParamStore& store, UpdatePool& pool) noexcept {
  for (Wanted& wanted : wanted_) {
    table::Table& table = *store.tables[wanted.table];
    make_rows(wanted, table, pool);
    wanted.admitted.commit(wanted.distinct, &table.admission());
  }
  for (auto& [rank, push] : pushes) {
    for (size_t i = 0; i < push.view.tables.size(); ++i) {
      SectionRows& rows = push.sections[i];
      if (!rows.missing.empty()) tell(*find_table(push.view.tables[i].table), &rows);
    }
  }
  wanted_.clear();
}

void NewRows::make_rows(Wanted& wanted, table::Table& table, UpdatePool& pool) noexcept {
  for (size_t i = 0; i < wanted.distinct.size(); ++i) {
    if (wanted.records[i] != table::RowIndex::kNone || !wanted.admitted.makes(i)) continue;
    wanted.records[i] = table.make(wanted.distinct[i]);
    wanted.made.push_back(wanted.records[i]);
  }
  const auto begin_some = [&wanted, &table](size_t task) {
    const size_t first = task * kRowsPerTask;
    const size_t count = std::min(kRowsPerTask, wanted.made.size() - first);
    table.begin({wanted.made.data() + first, count});
  };
  // By reference: it is called without memory of its own.
  pool.run((wanted.made.size() + kRowsPerTask - 1) / kRowsPerTask, std::ref(begin_some));
}

void NewRows::tell(Wanted& wanted, SectionRows* rows) noexcept {
  bool drops = false;
  for (const uint32_t at : rows->missing) {
    const size_t key = wanted.told++;
    drops = drops || wanted.admitted.drops(key);
    if (wanted.admitted.drops(key)) continue;  // also where a later push of the update makes it
    rows->records[at] = static_cast<int32_t>(wanted.records[wanted.inverse[key]]);
  }
  rows->missing.clear();
  if (drops) drop_missing(rows);
}

}  // namespace cpudist::server
