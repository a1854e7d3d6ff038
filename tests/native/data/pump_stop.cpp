// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Bounds and ends: memory, recycling, deadlines, and stopping whatever a thread waits for.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "support/data_pump_fixture.h"

namespace cpudist::testing {
namespace {

using data::ReaderOptions;
using data::Wait;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

TEST(data_pump_holds_no_more_than_its_buffer) {
  const Folder folder;
  ReaderOptions options = id_options({folder.write("a", id_lines(0, 20000))}, {{{0}}}, 100);
  options.buffer_bytes = 100 * 8 * 5;  // five batches
  const auto pool = data::BatchPool::create();
  std::weak_ptr<data::Batch> first;
  {
    data::Reader reader(options, pool);
    std::vector<data::Delivered> kept;
    for (int i = 0; i < 10; ++i) kept.push_back(reader.next(kSoon));
    first = kept.front().batch;
    kept.clear();
    CHECK(first.expired());
    CHECK(pool->idle_bytes() > 0);
    CHECK(pool->idle_bytes() <= options.buffer_bytes);
    read_all(reader);
  }
  CHECK(pool->idle_bytes() <= options.buffer_bytes);
}

TEST(data_pump_uses_the_memory_of_batches_again) {
  const Folder folder;
  const ReaderOptions options = id_options({folder.write("a", id_lines(0, 400))}, {{{0}}}, 100);
  const auto pool = data::BatchPool::create();
  for (int epoch = 0; epoch < 3; ++epoch) {
    data::Reader reader(options, pool);
    CHECK_EQ(joined(read_all(reader).batches).size(), 400);
  }
  // Four batches ahead, one at the consumer and one in the making.
  CHECK(pool->idle_bytes() <= 6 * 100 * 8);
  // One that was in the making at the end may have none.
  std::vector<decltype(pool->take())> kept;
  for (int i = 0; i < 6; ++i) kept.push_back(pool->take());
  CHECK(std::any_of(kept.begin(), kept.end(),
                    [](const auto& batch) { return batch->ints.capacity() >= 100; }));
}

TEST(data_pump_stops_while_a_lane_waits_for_room) {
  const Folder folder;
  ReaderOptions options = id_options({folder.write("a", id_lines(0, 1000))}, {{{0}}}, 10);
  options.buffer_bytes = 1;
  const auto reader = make_reader(options);
  CHECK(reader->next(kSoon).batch != nullptr);
  reader->stop();
  message_of(ErrorCode::kClosed, [&] { reader->next(kSoon); });
  reader->stop();
}

TEST(data_pump_stops_while_a_command_hangs) {
  const Folder folder;
  ReaderOptions options = id_options({folder.write("a", "")}, {{{0}}}, 1);
  options.input.command.text = "sleep 100 & sleep 100";
  const auto start = Clock::now();
  const auto reader = make_reader(options);
  const std::string text = message_of(ErrorCode::kTimeout, [&] { reader->next(Wait{0.05, {}}); });
  CHECK(says(text, "no batch within 0.05 s: lane 0 of 1 reads "));
  CHECK(says(text, "(split 1 of 1) through 'sleep 100 & sleep 100'"));
  reader->stop();
  CHECK(seconds_since(start) < 20);
}

TEST(data_pump_ends_a_command_that_writes_nothing) {
  const Folder folder;
  ReaderOptions options = id_options({folder.write("a", "")}, {{{0}}}, 1);
  options.input.command = {"echo why >&2; echo 1 7; sleep 100 & sleep 100", 0.2};
  const auto reader = make_reader(options);
  CHECK(ids_of(*reader->next(kSoon).batch) == Ids{7});
  const std::string text = message_of(ErrorCode::kDataFile, [&] { reader->next(kSoon); });
  CHECK(says(text, "the command 'echo why >&2; echo 1 7; sleep 100 & sleep 100' on "));
  CHECK(says(text, "/a wrote nothing for 0.2 s, and was killed with all that it started; "));
  CHECK(says(text, "set command_timeout_s higher; the end of its stderr:\nwhy"));
  const std::vector<std::string> notices = reader->notices().take();
  CHECK_EQ(notices.size(), 1);
  CHECK(says(notices.front(), "/a writes nothing for 0.1 s; it is killed after 0.2 s "));
  CHECK(!reader->notices().any());
}

TEST(data_pump_ends_what_keeps_the_output_of_a_command_that_has_ended) {
  const Folder folder;
  data::LoadOptions options;
  options.input.files = {folder.write("a", "")};
  options.input.command = {"sleep 100 & echo 1 7", 0.2};
  options.lanes = {{{0}}};
  data::Store store(id_schema());
  store.start_load(options);
  const std::string text = message_of(ErrorCode::kDataFile, [&] { store.wait_load(kSoon); });
  CHECK(says(text, "/a has ended, but something that it started keeps its output open and "));
  CHECK(says(text, "wrote nothing for 0.2 s, and was killed"));
}

TEST(data_pump_ends_a_command_that_goes_on_behind_its_output) {
  const Folder folder;
  ReaderOptions options = id_options({folder.write("a", "")}, {{{0}}}, 1);
  options.input.command = {"echo 1 7; exec sleep 100 >&-", 0.2};
  const auto reader = make_reader(options);
  CHECK(ids_of(*reader->next(kSoon).batch) == Ids{7});
  const std::string text = message_of(ErrorCode::kDataFile, [&] { reader->next(kSoon); });
  CHECK(says(text, "/a has closed its output and did not end within 0.2 s, and was killed"));
}

TEST(data_pump_gives_a_slow_consumers_command_all_the_time) {
  const Folder folder;
  ReaderOptions options = id_options({folder.write("a", id_lines(0, 200000))}, {{{0}}}, 100);
  options.input.command = {"cat", 5.0};
  options.buffer_bytes = 1;
  const auto reader = make_reader(options);
  CHECK(reader->next(kSoon).batch != nullptr);
  let_pass(std::chrono::milliseconds(100));  // with a full pipe, which is no silence of the command
  CHECK(!reader->notices().any());
  CHECK_EQ(joined(read_all(*reader).batches).size(), 200000 - 100);
}

TEST(data_pump_stops_while_nothing_is_fed) {
  const Folder folder;
  ReaderOptions options = id_options({"fed"}, {{{0}}}, 1);
  options.input.fed = true;
  const auto reader = make_reader(options);
  std::exception_ptr failed;
  std::thread consumer([&] {
    try {
      message_of(ErrorCode::kClosed, [&] { reader->next(kSoon); });
    } catch (...) {
      failed = std::current_exception();
    }
  });
  reader->stop();
  consumer.join();
  if (failed) std::rethrow_exception(failed);
  CHECK(!reader->feeds().bytes(0, "1 1\n", kSoon));
  CHECK(!reader->feeds().end_of_file(0, kSoon));
}

TEST(data_pump_stops_feeders_that_wait_for_room) {
  ReaderOptions options = id_options({"fed"}, {{{0}}}, 1);
  options.input.fed = true;
  options.buffer_bytes = 64;
  const auto reader = make_reader(options);
  std::atomic<bool> taken{true};
  std::thread feeder([&] { taken = reader->feeds().bytes(0, id_lines(0, 10000), kSoon); });
  CHECK(reader->next(kSoon).batch != nullptr);
  reader->stop();
  feeder.join();
  CHECK(!taken.load());
}

TEST(data_pump_waits_can_be_interrupted) {
  ReaderOptions options = id_options({"fed"}, {{{0}}}, 1);
  options.input.fed = true;
  const auto reader = make_reader(options);
  int asked = 0;
  message_of(ErrorCode::kInterrupted,
             [&] { reader->next(Wait{20.0, [&] { return ++asked == 2; }}); });
  CHECK_EQ(asked, 2);
  CHECK(reader->feeds().bytes(0, "1 4\n", kSoon));
  CHECK(ids_of(*reader->next(kSoon).batch) == Ids{4});
}

TEST(data_pump_reads_what_is_fed_file_after_file) {
  ReaderOptions options = id_options({"x", "y", "z"}, {{{0}, {1}}, {{2}}}, 2);
  options.input.fed = true;
  const auto reader = make_reader(options);
  data::Feeds& feeds = reader->feeds();
  CHECK(feeds.bytes(0, "1 0\n1 ", kSoon));
  CHECK(feeds.bytes(0, "1\n1 2", kSoon));
  CHECK(feeds.end_of_file(0, kSoon));
  CHECK(feeds.bytes(0, "1 3\n", kSoon));
  CHECK(feeds.end_of_file(0, kSoon));
  CHECK(feeds.end_of_file(1, kSoon));
  CHECK(joined(read_all(*reader).batches) == range(0, 4));
  CHECK(!feeds.bytes(0, "1 9\n", kSoon));
  message_of(ErrorCode::kInvalidArgument, [&] { feeds.bytes(2, "", kSoon); });
}

TEST(data_pump_gives_a_feeders_failure_in_its_place) {
  ReaderOptions options = id_options({"x.gz"}, {{{0}}}, 1);
  options.input.fed = true;
  const auto reader = make_reader(options);
  CHECK(reader->feeds().bytes(0, "1 0\n1 1\n1 2", kSoon));
  CHECK(reader->feeds().failure(0, "the compressed file is cut off", kSoon));
  CHECK(ids_of(*reader->next(kSoon).batch) == Ids{0});
  CHECK(ids_of(*reader->next(kSoon).batch) == Ids{1});
  for (int i = 0; i < 2; ++i) {
    const std::string text = message_of(ErrorCode::kDataFile, [&] { reader->next(kSoon); });
    CHECK_EQ(text, "cannot read x.gz: the compressed file is cut off");
  }
}

TEST(data_pump_takes_columns_as_records) {
  data::Schema schema = id_schema();
  data::Slot bag;
  bag.name = "bag";
  data::Slot dense;
  dense.name = "dense";
  dense.kind = data::SlotKind::kFloat;
  dense.dim = 3;
  schema.slots.push_back(bag);
  schema.slots.push_back(dense);
  ReaderOptions options = id_options({"f"}, {{{0}}}, 2);
  options.schema = schema;
  options.input.fed = true;
  options.policy = data::BadLinePolicy::kSkip;
  const auto reader = make_reader(options);
  const Ids ids = {1, 2, 3};
  const Ids bags = {7, 8, 9};
  const Ids offsets = {0, 2, 2, 3};
  const std::vector<float> floats = {1, 2, 3, 4, 0.0f / 0.0f, 6, 7, 8, 9};
  std::vector<data::ColumnValues> columns = {{ids, {}, {}}, {bags, {}, offsets}, {{}, floats, {}}};
  CHECK(reader->feeds().columns(0, 3, columns, kSoon));
  const data::Delivered delivered = reader->next(kSoon);
  CHECK(ids_of(*delivered.batch) == (Ids{1, 3, 7, 8, 9, 0, 2, 3}));
  const float* found = delivered.batch->floats.data();
  CHECK(std::vector<float>(found, found + 6) == (std::vector<float>{1, 2, 3, 7, 8, 9}));
  CHECK_EQ(delivered.position.lanes[0].offset, 3);
  CHECK_EQ(reader->bad_lines().counts()[0], 1);
  const auto notices = reader->bad_lines().take_notices();
  CHECK(says(notices.front(), "f:2:1: slot 'dense': expected a finite number"));
  columns[1].offsets = {};
  message_of(ErrorCode::kInvalidArgument, [&] { reader->feeds().columns(0, 3, columns, kSoon); });
}

}  // namespace cpudist::testing
