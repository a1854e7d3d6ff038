// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The sequence of batches: what it depends on, and that it can be taken up anywhere.
#include <algorithm>
#include <chrono>
#include <thread>

#include "support/data_pump_fixture.h"

namespace cpudist::testing {
namespace {

using data::ReaderOptions;

// One file cut into as many splits as lanes, at equal distances.
std::vector<std::vector<Split>> cut(uint64_t size_bytes, size_t lanes) {
  std::vector<std::vector<Split>> result;
  for (size_t lane = 0; lane < lanes; ++lane) {
    result.push_back({{0, size_bytes * lane / lanes, size_bytes * (lane + 1) / lanes}});
  }
  return result;
}

Ids sorted(Ids ids) {
  std::sort(ids.begin(), ids.end());
  return ids;
}

// Three files of 20, 7 and 30 lines over two lanes, the second file as two splits.
ReaderOptions three_files(const Folder& folder) {
  const std::string second = id_lines(100, 107);
  ReaderOptions options =
      id_options({folder.write("a", id_lines(0, 20)), folder.write("b", second),
                  folder.write("c", id_lines(200, 230))},
                 {{{0, 0, kNoEnd}, {1, 0, 17}}, {{1, 17, second.size()}, {2}}}, 4);
  return options;
}

void check_resume(const ReaderOptions& options) {
  const Pass whole = read_all(options);
  for (size_t done = 0; done < whole.batches.size(); ++done) {
    ReaderOptions again = options;
    again.position = whole.positions[done];
    const Pass rest = read_all(again);
    const auto middle = static_cast<std::ptrdiff_t>(done + 1);
    CHECK(rest.batches == std::vector<Ids>(whole.batches.begin() + middle, whole.batches.end()));
  }
}

}  // namespace

TEST(data_pump_reads_every_line_once_with_any_number_of_lanes) {
  const Folder folder;
  const std::string text = id_lines(0, 23);
  const std::string path = folder.write("file", text);
  for (size_t lanes = 1; lanes <= 5; ++lanes) {
    const Pass pass = read_all(id_options({path}, cut(text.size(), lanes), 3));
    CHECK(sorted(joined(pass.batches)) == range(0, 23));
    CHECK_EQ(pass.batches.size(), 8);
    for (size_t i = 0; i < 7; ++i) CHECK_EQ(pass.batches[i].size(), 3);
    CHECK_EQ(pass.batches[7].size(), 2);
  }
}

TEST(data_pump_takes_batches_from_lanes_in_turn) {
  const Folder folder;
  ReaderOptions options = id_options(
      {folder.write("a", id_lines(0, 5)), folder.write("b", id_lines(10, 17))}, {{{0}}, {{1}}}, 2);
  const std::vector<Ids> expected = {{0, 1}, {10, 11}, {2, 3}, {12, 13}, {14, 15}, {4, 16}};
  CHECK(read_all(options).batches == expected);
  options.drop_last = true;  // leaves out nothing: the last batch is full
  CHECK(read_all(options).batches == expected);
  options.batch_size = 5;
  CHECK(read_all(options).batches == (std::vector<Ids>{{0, 1, 2, 3, 4}, {10, 11, 12, 13, 14}}));
  options.drop_last = false;
  CHECK(read_all(options).batches.back() == (Ids{15, 16}));
}

// What is asked, or waited for, moves nothing: only a batch that is given does.
TEST(data_pump_position_is_that_of_the_last_batch_also_when_lanes_have_ended) {
  const Folder folder;
  const std::string many = folder.write("b", id_lines(10, 30));
  const auto reader =
      make_reader(id_options({folder.write("a", id_lines(0, 2)), many}, {{{0}}, {{1}}}, 2));
  while (true) {
    const data::Delivered delivered = reader->next(kSoon);
    const data::ReaderPosition position = reader->position();
    CHECK_EQ(position.turn, delivered.position.turn);
    CHECK_EQ(position.tail_delivered, delivered.position.tail_delivered);
    if (!delivered.batch) break;
  }
}

TEST(data_pump_sequence_does_not_depend_on_timing) {
  const Folder folder;
  ReaderOptions options = three_files(folder);
  const Pass whole = read_all(options);
  options.buffer_bytes = 1;  // one batch per lane
  const auto reader = make_reader(options);
  std::vector<Ids> slow;
  while (true) {
    if (slow.size() % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const data::Delivered delivered = reader->next(kSoon);
    if (!delivered.batch) break;
    slow.push_back(ids_of(*delivered.batch));
  }
  CHECK(slow == whole.batches);
}

TEST(data_pump_resumes_after_every_batch_in_order) {
  const Folder folder;
  check_resume(three_files(folder));
  ReaderOptions one = three_files(folder);
  one.batch_size = 1;
  check_resume(one);
  one.batch_size = 50;  // the tail only
  check_resume(one);
}

TEST(data_pump_resumes_after_every_batch_within_shuffled_windows) {
  const Folder folder;
  ReaderOptions options = three_files(folder);
  options.seed = 7;
  for (const size_t window : {4, 10, 1000}) {
    options.window_records = window;
    check_resume(options);
  }
}

TEST(data_pump_resumes_streams_of_commands) {
  const Folder folder;
  ReaderOptions options =
      id_options({folder.write("a", id_lines(0, 9)), folder.write("b", "\n" + id_lines(10, 16))},
                 {{{0}, {1}}}, 4);
  options.input.command.text = "cat";
  check_resume(options);
  options.seed = 1;
  options.window_records = 8;
  check_resume(options);
}

TEST(data_pump_windows_are_permuted_by_seed_lane_and_window) {
  const Folder folder;
  ReaderOptions options = id_options(
      {folder.write("a", id_lines(0, 64)), folder.write("b", id_lines(0, 64))}, {{{0}}, {{1}}}, 8);
  options.seed = 3;
  options.window_records = 30;  // becomes 32: whole batches
  const Pass pass = read_all(options);
  std::vector<Ids> windows(4);  // of lane 0, lane 1, lane 0, lane 1
  for (size_t i = 0; i < 16; ++i) {
    Ids& window = windows[i % 2 + i / 8 * 2];
    window.insert(window.end(), pass.batches[i].begin(), pass.batches[i].end());
  }
  for (size_t i = 0; i < 4; ++i) {
    const auto first = static_cast<int64_t>(i / 2 * 32);
    CHECK(sorted(windows[i]) == range(first, first + 32));
    CHECK(windows[i] != range(first, first + 32));
  }
  CHECK(windows[0] != windows[1]);
  for (int64_t& id : windows[2]) id -= 32;
  CHECK(windows[0] != windows[2]);
  CHECK(read_all(options).batches == pass.batches);
  options.seed = 4;
  CHECK(read_all(options).batches != pass.batches);
}

TEST(data_pump_reads_files_without_lines) {
  const Folder folder;
  const ReaderOptions options =
      id_options({folder.write("a", ""), folder.write("b", "\n \r\n"), folder.write("c", "1 5")},
                 {{{0}, {1}, {2}}, {}}, 4);
  CHECK(read_all(options).batches == (std::vector<Ids>{{5}}));
  CHECK(read_all(id_options({}, {{}}, 4)).batches.empty());
}

TEST(data_pump_reads_csv_headers_for_every_split) {
  const Folder folder;
  const std::string text = "other,id\n7,1\n7,2\n7,3\n7,4\n";
  const std::string path = folder.write("file", text);
  for (uint64_t at = 0; at <= text.size(); ++at) {
    ReaderOptions options = id_options({path}, {{{0, 0, at}, {0, at, text.size()}}}, 1);
    options.schema.format = data::Format::kCsv;
    options.schema.slots[0].columns = {"id"};
    CHECK(joined(read_all(options).batches) == range(1, 5));
    check_resume(options);
  }
}

TEST(data_pump_gives_each_batch_to_one_of_many_consumers) {
  const Folder folder;
  ReaderOptions options =
      id_options({folder.write("a", id_lines(0, 3000)), folder.write("b", id_lines(3000, 5000))},
                 {{{0}}, {{1}}}, 16);
  options.buffer_bytes = 1024;
  const auto reader = make_reader(options);
  std::vector<Pass> passes(3);
  std::vector<std::exception_ptr> errors(3);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      try {
        passes[i] = read_all(*reader);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Ids all;
  for (size_t i = 0; i < 3; ++i) {
    if (errors[i]) std::rethrow_exception(errors[i]);
    const Ids part = joined(passes[i].batches);
    all.insert(all.end(), part.begin(), part.end());
  }
  CHECK(sorted(all) == range(0, 5000));
}

TEST(data_pump_refuses_positions_of_other_readers) {
  const Folder folder;
  ReaderOptions options = three_files(folder);
  options.position = read_all(options).positions.front();
  options.position->lanes[0].split = 9;
  message_of(ErrorCode::kInvalidArgument, [&] { make_reader(options); });
  options.position->lanes.pop_back();
  const std::string text = message_of(ErrorCode::kInvalidArgument, [&] { make_reader(options); });
  CHECK(says(text, "with 1 lanes, this one has 2"));
}

}  // namespace cpudist::testing
