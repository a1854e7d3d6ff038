// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Lines out of bytes: every line once whatever the cuts, positions, and lines of all shapes.
#include <cstring>
#include <numeric>

#include "data/read/line_reader.h"
#include "support/data_pump_fixture.h"

namespace cpudist::testing {
namespace {

using data::Line;
using data::LineReader;

struct Found {
  std::string text;
  uint64_t begin = 0;
  bool too_long = false;
  bool operator==(const Found&) const = default;
};

// Bytes in memory, a few at a time.
class Pieces : public data::ByteSource {
 public:
  Pieces(std::string text, size_t piece) : text_(std::move(text)), piece_(piece) {}
  size_t read(char* to, size_t size) override {
    const size_t count = std::min({size, piece_, text_.size() - at_});
    std::memcpy(to, text_.data() + at_, count);
    at_ += count;
    return count;
  }

 private:
  std::string text_;
  size_t piece_;
  size_t at_ = 0;
};

std::vector<Found> lines_of(LineReader& reader) {
  std::vector<Found> found;
  Line line;
  while (reader.next(line)) found.push_back({std::string(line.text), line.begin, line.too_long});
  return found;
}

std::vector<Found> lines_of(const std::string& text, LineReader::Options options, size_t piece = 3,
                            size_t buffer_bytes = 16) {
  LineReader reader(buffer_bytes);
  const size_t begin = std::min<size_t>(LineReader::source_begin(options.begin), text.size());
  reader.open(std::make_unique<Pieces>(text.substr(begin), piece), options);
  return lines_of(reader);
}

const std::vector<std::string>& texts() {
  static const std::vector<std::string> all = {
      "",
      "\n",
      "a",
      "a\n",
      "a\nbc\n\ndef",
      "\n\n\n",
      "a\r\nbc\r\n",
      "\xEF\xBB\xBF"
      "first\nsecond\n",
      "\xEF\xBB\xBF",
      "a line that is longer than the buffer at first\nshort\nanother line of some length",
  };
  return all;
}

}  // namespace

TEST(data_pump_lines_lose_their_ends_and_a_byte_order_mark) {
  CHECK(lines_of("a\nbc\r\n\nd\re", {}) ==
        (std::vector<Found>{{"a", 0}, {"bc", 2}, {"", 6}, {"d\re", 7}}));
  CHECK(lines_of("\xEF\xBB\xBF"
                 "x\ny",
                 {}) == (std::vector<Found>{{"x", 3}, {"y", 5}}));
  CHECK(lines_of("\xEF\xBB\xBF", {}).empty());
  CHECK(lines_of("", {}).empty());
  CHECK(lines_of("\xEF\n", {}) == (std::vector<Found>{{"\xEF", 0}}));
}

TEST(data_pump_lines_belong_to_one_split_whatever_the_cuts) {
  for (const std::string& text : texts()) {
    const std::vector<Found> whole = lines_of(text, {});
    for (size_t first = 0; first <= text.size(); ++first) {
      for (size_t second = first; second <= text.size(); ++second) {
        std::vector<Found> found;
        for (const auto& [begin, end] : {std::pair{size_t{0}, first}, std::pair{first, second},
                                         std::pair{second, text.size()}}) {
          const auto part = lines_of(text, {begin, end, 1000}, 1 + second % 7);
          found.insert(found.end(), part.begin(), part.end());
        }
        CHECK(found == whole);
      }
    }
  }
}

TEST(data_pump_lines_can_be_read_on_from_every_offset) {
  for (const std::string& text : texts()) {
    const std::vector<Found> whole = lines_of(text, {});
    LineReader reader(16);
    reader.open(std::make_unique<Pieces>(text, 5), {});
    Line line;
    for (size_t given = 0; given <= whole.size(); ++given) {
      const std::vector<Found> rest(whole.begin() + static_cast<std::ptrdiff_t>(given),
                                    whole.end());
      CHECK(lines_of(text, {reader.offset(), kNoEnd, 1000}) == rest);
      CHECK_EQ(reader.next(line), given < whole.size());
    }
  }
}

TEST(data_pump_lines_over_the_limit_take_bounded_memory) {
  const std::string text =
      "short\n" + std::string(1 << 20, 'x') + "\nafter\n" + std::string(1 << 20, 'y');
  LineReader reader(64);
  LineReader::Options options;
  options.line_limit_bytes = 100;
  reader.open(std::make_unique<Pieces>(text, 50), options);
  const auto found = lines_of(reader);
  CHECK(found == (std::vector<Found>{{"short", 0},
                                     {"", 6, true},
                                     {"after", 6 + (1 << 20) + 1},
                                     {"", 6 + (1 << 20) + 7, true}}));
  CHECK(reader.memory_bytes() <= 256);
  // As long as allowed, and one byte more.
  CHECK_EQ(lines_of(std::string(100, 'z') + "\n", options).front().too_long, false);
  CHECK_EQ(lines_of(std::string(101, 'z') + "\n", options).front().too_long, true);
}

TEST(data_pump_lines_have_padding_behind_them) {
  const std::string text = "12345678\n1";
  LineReader reader(16);
  reader.open(std::make_unique<Pieces>(text, 100), {});
  Line line;
  unsigned sum = 0;
  while (reader.next(line)) {
    const char* end = line.text.data() + line.text.size();
    sum = std::accumulate(end, end + data::kLinePadding, sum);
  }
  CHECK(sum < 1u << 31);  // a sanitizer has looked at the bytes
}

TEST(data_pump_lines_of_files_that_shrink_or_are_none_are_errors) {
  const Folder folder;
  const data::StopSignal stop;
  const std::string path = folder.write("file", "1 1\n1 2\n");
  const std::string shrunk = message_of(ErrorCode::kDataFile, [&] {
    LineReader reader;
    reader.open(std::make_unique<data::FileRange>(path, 0, 100, stop), {0, 100, 1000});
    lines_of(reader);
  });
  CHECK(says(shrunk, path + " has shrunk"));
  CHECK(says(shrunk, "expected at least 100 bytes"));
  const std::string missing = message_of(
      ErrorCode::kDataFile, [&] { data::FileRange(folder.path("none"), 0, kNoEnd, stop); });
  CHECK(says(missing, "none: No such file"));
  const std::string no_file =
      message_of(ErrorCode::kDataFile, [&] { data::FileRange(folder.path(""), 0, kNoEnd, stop); });
  CHECK(says(no_file, "not a regular file"));
}

}  // namespace cpudist::testing
