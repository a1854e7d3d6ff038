// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Records in memory: their order, permutations, epochs over them, and moving them.
#include <algorithm>
#include <map>

#include "support/data_pump_fixture.h"

namespace cpudist::testing {
namespace {

using data::Store;
using data::StoreReaderOptions;

data::LoadOptions load_options(std::vector<std::string> files,
                               std::vector<std::vector<Split>> lanes) {
  data::LoadOptions options;
  options.input.files = std::move(files);
  options.lanes = std::move(lanes);
  return options;
}

void load(Store& store, data::LoadOptions options) {
  store.start_load(std::move(options));
  store.wait_load(kSoon);
}

struct Epoch {
  std::vector<Ids> batches;
  std::vector<uint64_t> positions;
};

Epoch epoch_of(const Store& store, const StoreReaderOptions& options,
               std::optional<uint64_t> seed = {}) {
  const auto reader = store.reader(options, seed, data::BatchPool::create());
  Epoch epoch;
  while (true) {
    const data::StoreBatch made = reader->next(kSoon);
    if (!made.batch) return epoch;
    epoch.batches.push_back(ids_of(*made.batch));
    epoch.positions.push_back(made.records_before);
  }
}

StoreReaderOptions batches_of(size_t batch_size) {
  StoreReaderOptions options;
  options.batch_size = batch_size;
  return options;
}

Ids order_of(const Store& store) { return joined(epoch_of(store, batches_of(7)).batches); }

// A store with ids 0 to count - 1 from one file.
std::unique_ptr<Store> id_store(const Folder& folder, int64_t count) {
  auto store = std::make_unique<Store>(id_schema());
  load(*store, load_options({folder.write("ids", id_lines(0, count))}, {{{0}}}));
  return store;
}

}  // namespace

TEST(data_pump_store_keeps_the_order_of_files_whatever_the_lanes) {
  const Folder folder;
  const std::string first = id_lines(0, 50);
  const std::vector<std::string> files = {folder.write("a", first),
                                          folder.write("b", id_lines(50, 60)),
                                          folder.write("c", id_lines(60, 100))};
  const uint64_t size = first.size();
  const std::vector<std::vector<std::vector<Split>>> dealt = {
      {{{0}, {1}, {2}}},
      {{{2}, {0, 100, size}}, {{1}, {0, 0, 100}}},
      {{{0, 200, size}}, {{0, 60, 200}}, {{2}, {1}}, {}, {{0, 0, 60}}},
  };
  for (const auto& lanes : dealt) {
    Store store(id_schema());
    load(store, load_options(files, lanes));
    CHECK_EQ(store.records(), 100);
    CHECK(order_of(store) == range(0, 100));
    CHECK_EQ(store.size_bytes(), 100 * (3 + 1) * sizeof(uint64_t));
  }
}

TEST(data_pump_store_permutes_by_the_seed_alone) {
  const Folder folder;
  const auto store = id_store(folder, 500);
  store->permute(1);
  const Ids first = order_of(*store);
  CHECK(first != range(0, 500));
  Ids ids = first;
  std::sort(ids.begin(), ids.end());
  CHECK(ids == range(0, 500));
  store->permute(2);
  CHECK(order_of(*store) != first);
  store->permute(1);
  CHECK(order_of(*store) == first);
  const auto untouched = id_store(folder, 500);
  CHECK(order_of(*untouched) == range(0, 500));
  CHECK(joined(epoch_of(*untouched, batches_of(9), 1).batches) == first);
  CHECK(order_of(*untouched) == range(0, 500));
}

TEST(data_pump_store_permutations_are_uniform) {
  const Folder folder;
  const auto store = id_store(folder, 3);
  std::map<Ids, int> counts;
  for (uint64_t seed = 0; seed < 600; ++seed) {
    store->permute(seed);
    const auto reader = store->reader(batches_of(3), {}, data::BatchPool::create());
    ++counts[ids_of(*reader->next(kSoon).batch)];
  }
  // Each of 6 orders about 100 times; 6 standard deviations are 55.
  CHECK_EQ(counts.size(), 6);
  for (const auto& [order, count] : counts) CHECK(count > 45 && count < 155);
}

TEST(data_pump_store_goes_on_from_any_record) {
  const Folder folder;
  const auto store = id_store(folder, 103);
  store->permute(5);
  const Ids order = order_of(*store);
  StoreReaderOptions options = batches_of(10);
  for (const size_t threads : {1, 3}) {
    options.threads = threads;
    options.begin_record = 0;
    const Epoch whole = epoch_of(*store, options);
    CHECK_EQ(whole.batches.size(), 11);
    CHECK_EQ(whole.positions.back(), 103);
    for (size_t done = 0; done < whole.batches.size(); ++done) {
      options.begin_record = whole.positions[done];
      const auto middle = static_cast<std::ptrdiff_t>(whole.positions[done]);
      CHECK(joined(epoch_of(*store, options).batches) == Ids(order.begin() + middle, order.end()));
    }
  }
  options.begin_record = 0;
  options.drop_last = true;
  CHECK_EQ(epoch_of(*store, options).batches.size(), 10);
  options.begin_record = 104;
  message_of(ErrorCode::kInvalidArgument, [&] { epoch_of(*store, options); });
}

TEST(data_pump_store_batches_ahead_are_bounded) {
  const Folder folder;
  const auto store = id_store(folder, 5000);
  const auto pool = data::BatchPool::create();
  StoreReaderOptions options = batches_of(10);
  options.threads = 3;
  options.buffer_bytes = 5 * 10 * sizeof(int64_t);
  {
    const auto reader = store->reader(options, {}, pool);
    uint64_t given = 0;
    while (reader->next(kSoon).batch) ++given;
    CHECK_EQ(given, 500);
  }
  CHECK(pool->idle_bytes() <= options.buffer_bytes);
}

TEST(data_pump_store_stops_readers_and_loads) {
  const Folder folder;
  auto store = id_store(folder, 1000);
  StoreReaderOptions options = batches_of(10);
  options.threads = 2;
  options.buffer_bytes = 1;
  const auto reader = store->reader(options, {}, data::BatchPool::create());
  CHECK(reader->next(kSoon).batch != nullptr);
  reader->stop();
  message_of(ErrorCode::kClosed, [&] { reader->next(kSoon); });
  store = std::make_unique<Store>(id_schema());
  data::LoadOptions hanging = load_options({folder.path("ids")}, {{{0}}});
  hanging.input.command.text = "sleep 100";
  store->start_load(hanging);
  message_of(ErrorCode::kInvalidArgument, [&] { store->start_load(hanging); });
  const std::string text =
      message_of(ErrorCode::kTimeout, [&] { store->wait_load(data::Wait{0.05, {}}); });
  CHECK(says(text, "0 of 1 parts"));
  store->release();
  CHECK_EQ(store->records(), 0);
  store->wait_load(kSoon);
}

TEST(data_pump_store_loads_what_is_fed) {
  Store store(id_schema());
  data::LoadOptions options = load_options({"x", "y"}, {{{1}}, {{0}}});
  options.input.fed = true;
  store.start_load(options);
  data::Feeds& feeds = store.loader()->feeds();
  CHECK(feeds.bytes(0, id_lines(5, 9), kSoon));
  CHECK(feeds.end_of_file(0, kSoon));
  CHECK(feeds.bytes(1, id_lines(0, 5), kSoon));
  CHECK(feeds.end_of_file(1, kSoon));
  store.wait_load(kSoon);
  CHECK(order_of(store) == range(0, 9));
  CHECK_EQ(store.loader()->progress().splits_done, 2);
}

TEST(data_pump_store_load_fails_as_a_whole) {
  const Folder folder;
  Store store(id_schema());
  const std::string path = folder.write("bad", id_lines(0, 5) + "x\n");
  const auto lanes = std::vector<std::vector<Split>>{{{0}}, {{1}}};
  const auto options = load_options({path, folder.write("good", id_lines(0, 9))}, lanes);
  store.start_load(options);
  const std::string text = message_of(ErrorCode::kBadRecord, [&] { store.wait_load(kSoon); });
  CHECK(text.starts_with(path + ":6:1: "));
  CHECK_EQ(store.records(), 0);
  data::LoadOptions skipping = options;
  skipping.policy = data::BadLinePolicy::kSkip;
  load(store, skipping);
  CHECK_EQ(store.records(), 14);
  CHECK_EQ(store.loader()->bad_lines().counts().at(0), 1);
}

TEST(data_pump_store_hands_out_its_records_and_takes_others) {
  const Folder folder;
  const auto store = id_store(folder, 300);
  const data::Checksum before = store->checksum();
  store->permute(3);
  CHECK_EQ(store->checksum().sum, before.sum);
  auto reader = store->reader(batches_of(10), {}, data::BatchPool::create());
  message_of(ErrorCode::kInvalidArgument, [&] { store->take(); });
  reader.reset();
  data::StoreWalk walk = store->take();
  CHECK_EQ(store->records(), 0);
  std::vector<data::RecordBuffer> parts(2);
  uint64_t number = 0;
  while (const uint64_t* record = walk.next()) {
    CHECK_EQ(walk.number(), number);
    CHECK_EQ(record[data::kRecordHeaderWords], number);
    parts[number++ % 2].append(record);
  }
  CHECK_EQ(number, 300);
  store->adopt(std::move(parts));
  CHECK_EQ(store->checksum().sum, before.sum);
  CHECK_EQ(store->checksum().combined, before.combined);
  const Ids order = order_of(*store);
  CHECK_EQ(order[1], 2);
  CHECK_EQ(order[150], 1);
  store->release();
  CHECK_EQ(store->checksum().sum, 0);
}

}  // namespace cpudist::testing
