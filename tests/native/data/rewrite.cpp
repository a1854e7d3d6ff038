// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Records that are made of others: those of an instance as one, and with exchanged slots.
#include "data/store/rewrite.h"

#include <algorithm>
#include <set>

#include "support/data_pump_fixture.h"

namespace cpudist::testing {
namespace {

using data::Store;

// `1 <instance>`, a bag, one id, two integers that are dense, three floats, one float.
data::Schema schema_of_all() {
  data::Schema schema;
  schema.instance_ids = true;
  schema.slots.resize(6);
  const std::vector<const char*> names = {"bag", "left out", "id", "whole", "floats", "label"};
  const std::vector<uint32_t> dims = {data::kAnyNumber, 1, 1, 2, 3, 1};
  for (size_t i = 0; i < names.size(); ++i) {
    schema.slots[i].name = names[i];
    schema.slots[i].dim = dims[i];
    if (i >= 4) schema.slots[i].kind = data::SlotKind::kFloat;
  }
  schema.slots[1].used = false;
  return schema;
}

// A line whose values say which record it is; the bag has `ids` of them.
std::string line_of(const std::string& instance, int64_t number, int64_t ids) {
  const std::string n = std::to_string(number);
  std::string bag = std::to_string(ids);
  for (int64_t i = 0; i < ids; ++i) bag += " " + std::to_string(10 * number + i);
  return "1 " + instance + " " + bag + " 1 0 1 " + n + " 2 " + n + " -" + n + " 3 " + n + " 0.5 " +
         n + " 1 " + n + "\n";
}

std::unique_ptr<Store> store_of(const Folder& folder, const std::string& lines) {
  auto store = std::make_unique<Store>(schema_of_all());
  data::LoadOptions options;
  options.input.files = {folder.write("all", lines)};
  options.lanes = {{{0}}};
  store->start_load(std::move(options));
  store->wait_load(kSoon);
  return store;
}

struct Whole {
  Ids ints;
  std::vector<float> floats;
  std::vector<uint64_t> instances;
};

// All records as one batch.
Whole whole_of(const Store& store) {
  data::StoreReaderOptions options;
  options.batch_size = 1 << 20;
  const auto reader = store.reader(options, {}, data::BatchPool::create());
  const data::StoreBatch made = reader->next(kSoon);
  Whole whole;
  if (!made.batch) return whole;
  const data::Batch& batch = *made.batch;
  whole.ints = ids_of(batch);
  whole.floats.assign(batch.floats.data(), batch.floats.data() + batch.floats.size());
  for (size_t i = 0; i < batch.instance_ids.size(); ++i) {
    whole.instances.push_back(static_cast<uint64_t>(batch.instance_ids.data()[i]));
  }
  return whole;
}

}  // namespace

TEST(data_store_merges_the_records_of_an_instance) {
  const Folder folder;
  const auto store =
      store_of(folder, line_of("a", 1, 2) + line_of("b", 2, 0) + line_of("a", 3, 1) +
                           line_of("c", 4, 1) + line_of("a", 5, 0) + line_of("b", 6, 2));
  store->permute(3);
  CHECK_EQ(store->merge_by_instance(0), 0);
  CHECK_EQ(store->records(), 3);
  const Whole whole = whole_of(*store);
  // The bag and its offsets, the id, the dense integers.
  CHECK(whole.ints == (Ids{10, 11, 30, 60, 61, 40, 0, 3, 5, 6, 1, 2, 4, 1, -1, 2, -2, 4, -4}));
  CHECK(whole.floats == (std::vector<float>{1, 0.5, 1, 2, 0.5, 2, 4, 0.5, 4, 1, 2, 4}));
  CHECK_EQ(std::set(whole.instances.begin(), whole.instances.end()).size(), 3);
  const data::Checksum before = store->checksum();
  CHECK_EQ(store->merge_by_instance(0), 0);
  CHECK_EQ(store->checksum().sum, before.sum);
}

TEST(data_store_leaves_out_instances_of_another_number_of_records) {
  const Folder folder;
  const auto store =
      store_of(folder, line_of("a", 1, 2) + line_of("b", 2, 0) + line_of("a", 3, 1) +
                           line_of("b", 4, 1) + line_of("b", 5, 0) + line_of("c", 6, 2));
  CHECK_EQ(store->merge_by_instance(2), 4);
  CHECK_EQ(store->records(), 1);
  CHECK(whole_of(*store).ints == (Ids{10, 11, 30, 0, 3, 1, 1, -1}));
  CHECK_EQ(store->merge_by_instance(2), 1);
  CHECK_EQ(store->records(), 0);
  CHECK(whole_of(*store).ints.empty());
}

TEST(data_store_merges_more_than_a_slab) {
  const Folder folder;
  std::string lines;
  for (int64_t i = 0; i < 40000; ++i) lines += line_of(std::to_string(i % 20000), i, i % 3);
  const auto store = store_of(folder, lines);
  CHECK_EQ(store->merge_by_instance(2), 0);
  CHECK_EQ(store->records(), 20000);
  const Whole whole = whole_of(*store);
  const int64_t* ids = whole.ints.data() + whole.ints.size() - 20000 * 3;
  for (int64_t i = 0; i < 20000; ++i) CHECK_EQ(ids[i], i);
  CHECK_EQ(whole.ints.size(), 20000 * 3 + 20001 + 39999);
}

TEST(data_store_exchanges_slots_and_restores_them) {
  const Folder folder;
  constexpr int64_t kRecords = 30000;
  std::string lines;
  for (int64_t i = 1; i <= kRecords; ++i) lines += line_of(std::to_string(i), i, i % 3);
  const auto store = store_of(folder, lines);
  store->permute(5);
  const Whole before = whole_of(*store);
  const uint64_t size_bytes = store->size_bytes();
  store->exchange_slots({0, 3}, 7);  // the bag and the floats
  CHECK(store->slots_exchanged());
  CHECK(store->size_bytes() > size_bytes);
  const Whole after = whole_of(*store);
  CHECK(after.instances == before.instances);
  const size_t others = kRecords * 3;
  CHECK(std::equal(before.ints.end() - others, before.ints.end(), after.ints.end() - others));
  const auto labels = static_cast<size_t>(kRecords * 3);
  CHECK(std::equal(before.floats.begin() + labels, before.floats.end(),
                   after.floats.begin() + labels));
  Ids bag(after.ints.begin(), after.ints.end() - others - kRecords - 1);
  Ids bag_before(before.ints.begin(), before.ints.end() - others - kRecords - 1);
  CHECK(bag != bag_before);
  std::sort(bag.begin(), bag.end());
  std::sort(bag_before.begin(), bag_before.end());
  CHECK(bag == bag_before);
  // One record's values stay together, and few are where they were.
  const int64_t* offsets = after.ints.data() + bag.size();
  size_t stayed = 0;
  for (size_t i = 0; i < kRecords; ++i) {
    const auto number = static_cast<int64_t>(after.floats[3 * i]);
    stayed += number == static_cast<int64_t>(before.floats[3 * i]) ? 1 : 0;
    CHECK_EQ(offsets[i + 1] - offsets[i], number % 3);
    if (number % 3 > 0) CHECK_EQ(after.ints[static_cast<size_t>(offsets[i])], 10 * number);
  }
  CHECK(stayed < 20);
  store->exchange_slots({0, 3}, 7);  // from the values that were loaded
  CHECK(whole_of(*store).ints == after.ints);
  store->exchange_slots({0, 3}, 8);
  CHECK(whole_of(*store).ints != after.ints);
  message_of(ErrorCode::kInvalidArgument, [&] { store->merge_by_instance(0); });
  message_of(ErrorCode::kInvalidArgument, [&] { store->take(); });
  message_of(ErrorCode::kInvalidArgument, [&] { store->exchange_slots({5}, 0); });
  store->restore_slots();
  store->restore_slots();
  CHECK(whole_of(*store).ints == before.ints);
  CHECK(whole_of(*store).floats == before.floats);
  CHECK_EQ(store->size_bytes(), size_bytes);
}

}  // namespace cpudist::testing
