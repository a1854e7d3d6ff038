// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Memory that runs out in a reader thread: whoever waits for its batches is told, and nothing ends.
#include <algorithm>
#include <string>

#include "support/data_pump_fixture.h"
#include "support/failing_new.h"

namespace cpudist::testing {
namespace {

using data::Store;

// Whether `read` gives `expected`, or kOutOfMemory. Counts the second.
template <typename Read>
void gives_all_or_tells(const Read& read, const Ids& expected, int64_t* told) {
  try {
    CHECK(read() == expected);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kOutOfMemory);
    CHECK(std::string(error.what()).find("no memory left") != std::string::npos);
    ++*told;
  }
}

Ids in_order(Ids ids) {
  std::sort(ids.begin(), ids.end());
  return ids;
}

}  // namespace

TEST(data_pump_out_of_memory_takes_the_place_of_a_batch) {
  const Folder folder;
  const data::ReaderOptions options = id_options(
      {folder.write("a", id_lines(0, 9)), folder.write("b", id_lines(9, 16))}, {{{0}}, {{1}}}, 4);
  int64_t told = 0;
  at_every_allocation([&](int64_t nth) {
    const FailingNewElsewhere failing(nth);
    gives_all_or_tells([&] { return in_order(joined(read_all(options).batches)); }, range(0, 16),
                       &told);
    return failing.happened();
  });
  CHECK(told > 5);
}

TEST(data_pump_out_of_memory_ends_a_load) {
  const Folder folder;
  data::LoadOptions options;
  options.input.files = {folder.write("ids", id_lines(0, 20))};
  options.lanes = {{{0}}};
  int64_t told = 0;
  at_every_allocation([&](int64_t nth) {
    Store store(id_schema());
    const FailingNewElsewhere failing(nth);
    const auto load = [&] {
      store.start_load(options);
      store.wait_load(kSoon);
      return range(0, static_cast<int64_t>(store.records()));
    };
    gives_all_or_tells(load, range(0, 20), &told);
    return failing.happened();
  });
  CHECK(told > 5);
}

TEST(data_pump_out_of_memory_in_an_epoch_over_a_store) {
  const Folder folder;
  data::LoadOptions options;
  options.input.files = {folder.write("ids", id_lines(0, 20))};
  options.lanes = {{{0}}};
  Store store(id_schema());
  store.start_load(std::move(options));
  store.wait_load(kSoon);
  int64_t told = 0;
  at_every_allocation([&](int64_t nth) {
    const FailingNewElsewhere failing(nth);
    const auto epoch = [&] {
      data::StoreReaderOptions made;
      made.batch_size = 6;
      const auto reader = store.reader(made, {}, data::BatchPool::create());
      Ids ids;
      while (const auto batch = reader->next(kSoon).batch) {
        const Ids more = ids_of(*batch);
        ids.insert(ids.end(), more.begin(), more.end());
      }
      return ids;
    };
    gives_all_or_tells(epoch, range(0, 20), &told);
    return failing.happened();
  });
  CHECK(told > 5);
}

}  // namespace cpudist::testing
