// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Bad lines by each policy, and commands that do not end well.
#include <sys/wait.h>

#include "support/data_pump_fixture.h"

namespace cpudist::testing {
namespace {

using data::BadLinePolicy;
using data::ReaderOptions;

// Lines 3 and 5 are bad.
const std::string kLines = "1 0\n1 1\nrubbish\n1 2\n1 x\n1 3\n";

bool has_children() { return ::waitpid(-1, nullptr, WNOHANG) != -1; }

}  // namespace

TEST(data_pump_raises_bad_lines_in_their_place) {
  const Folder folder;
  const std::string path = folder.write("file", kLines);
  for (const uint64_t cut : {0, 6, 8}) {  // also where a lane begins within the file
    const auto reader =
        make_reader(id_options({path}, {{{0, 0, cut}, {0, cut, kLines.size()}}}, 2));
    CHECK(ids_of(*reader->next(kSoon).batch) == (Ids{0, 1}));
    const std::string text = message_of(ErrorCode::kBadRecord, [&] { reader->next(kSoon); });
    CHECK(text.starts_with(path + ":3:1: "));
    CHECK(says(text, "choose the policy 'skip' or 'quarantine'"));
  }
}

TEST(data_pump_gives_batches_of_other_lanes_before_an_error) {
  const Folder folder;
  const auto reader = make_reader(
      id_options({folder.write("a", id_lines(0, 3) + "x\n"), folder.write("b", id_lines(10, 13))},
                 {{{0}}, {{1}}}, 1));
  for (const int64_t id : {0, 10, 1, 11, 2, 12}) {
    CHECK(ids_of(*reader->next(kSoon).batch) == Ids{id});
  }
  message_of(ErrorCode::kBadRecord, [&] { reader->next(kSoon); });
}

TEST(data_pump_skips_bad_lines_and_tells_of_the_first) {
  const Folder folder;
  const std::string first = folder.write("a", kLines);
  const std::string second = folder.write("b", id_lines(10, 12));
  const std::string third = folder.write("c", "1 20\n\xEF\xBB\xBF\n");
  ReaderOptions options = id_options({first, second, third}, {{{0, 8}, {1}, {2}}, {{0, 0, 8}}}, 2);
  options.policy = BadLinePolicy::kSkip;
  const auto reader = make_reader(options);
  const Ids ids = joined(read_all(*reader).batches);
  CHECK_EQ(ids.size(), 7);
  const auto counts = reader->bad_lines().counts();
  CHECK_EQ(counts.size(), 2);
  CHECK_EQ(counts.at(0), 2);
  CHECK_EQ(counts.at(2), 1);
  const auto notices = reader->bad_lines().take_notices();
  CHECK_EQ(notices.size(), 2);
  CHECK(notices[0].starts_with(first + ":3:1: "));
  CHECK(notices[1].starts_with(third + ":2:1: "));
  CHECK(reader->bad_lines().take_notices().empty());
}

TEST(data_pump_quarantines_bad_lines_as_they_were) {
  const Folder folder;
  const std::string path =
      folder.write("file", "1 0\r\nbad one\r\n1 1\n" + std::string(300, 'x') + "\n1 y");
  ReaderOptions options = id_options({path}, {{{0}}}, 2);
  options.policy = BadLinePolicy::kQuarantine;
  options.quarantine = folder.path("bad");
  options.input.line_limit_bytes = 200;
  CHECK(joined(read_all(options).batches) == range(0, 2));
  std::istringstream lines(read_file(options.quarantine));
  std::string line;
  std::getline(lines, line);
  CHECK(line.starts_with("# " + path + ":2:1: "));
  std::getline(lines, line);
  CHECK_EQ(line, "bad one\r");
  std::getline(lines, line);
  CHECK_EQ(line, "# " + path + ":4:1: the line has 301 bytes, expected at most 200");
  std::getline(lines, line);
  CHECK(line.starts_with("# " + path + ":5:3: "));
  std::getline(lines, line);
  CHECK_EQ(line, "1 y");
  CHECK(!std::getline(lines, line));
}

TEST(data_pump_says_when_the_quarantine_file_takes_no_more) {
  const Folder folder;
  ReaderOptions options = id_options({folder.write("file", kLines)}, {{{0}}}, 1);
  options.policy = BadLinePolicy::kQuarantine;
  options.quarantine = "/dev/full";
  const std::string text = message_of(ErrorCode::kDataFile, [&] { read_all(options); });
  CHECK(says(text, "quarantine file /dev/full: No space left"));
  options.quarantine = folder.path("none/bad");
  message_of(ErrorCode::kDataFile, [&] { make_reader(options); });
  options.quarantine.clear();
  message_of(ErrorCode::kInvalidArgument, [&] { make_reader(options); });
}

TEST(data_pump_raises_headers_that_do_not_fit_whatever_the_policy) {
  const Folder folder;
  const std::string path = folder.write("file", "a,b\n1,2\n");
  ReaderOptions options = id_options({path}, {{{0}}}, 1);
  options.schema.format = data::Format::kCsv;
  options.schema.slots[0].columns = {"c"};
  options.policy = BadLinePolicy::kSkip;
  const std::string text = message_of(ErrorCode::kBadRecord, [&] { read_all(options); });
  CHECK(text.starts_with(path + ":1: "));
}

TEST(data_pump_reads_through_commands) {
  const Folder folder;
  ReaderOptions options =
      id_options({folder.write("a", "0\n1\n"), folder.write("b", "2\n3")}, {{{0}, {1}}}, 3);
  options.input.command.text = "sed 's/^/1 /'";
  CHECK(joined(read_all(options).batches) == range(0, 4));
  // More on stderr than a pipe holds, and a process that stays behind.
  options.input.command.text =
      "head -c 300000 /dev/zero >&2; sleep 100 > /dev/null & sed 's/^/1 /'";
  CHECK(joined(read_all(options).batches) == range(0, 4));
  CHECK(!has_children());
}

TEST(data_pump_names_the_command_that_failed) {
  const Folder folder;
  const std::string path = folder.write("a", "1 0\n1 1\n");
  ReaderOptions options = id_options({path}, {{{0}}}, 1);
  options.input.command.text =
      "cat; printf 'fir%s' st >&2; head -c 5000 /dev/zero | tr '\\0' x >&2; exit 3";
  const auto reader = make_reader(options);
  CHECK(ids_of(*reader->next(kSoon).batch) == Ids{0});
  CHECK(ids_of(*reader->next(kSoon).batch) == Ids{1});
  const std::string text = message_of(ErrorCode::kDataFile, [&] { reader->next(kSoon); });
  CHECK(says(text, "' on " + path + " ended with status 3; the end of its stderr:\n"));
  CHECK(!says(text, "first"));
  CHECK(text.ends_with("\n" + std::string(2048, 'x')));
  options.input.command.text = "kill -9 $$";
  CHECK(
      says(message_of(ErrorCode::kDataFile, [&] { read_all(options); }), "was killed by signal 9"));
  options.input.command.text = "no-such-command-at-all";
  CHECK(says(message_of(ErrorCode::kDataFile, [&] { read_all(options); }), "status 127"));
  options.input.command.text = "cat";
  options.input.files[0] = folder.path("none");
  CHECK(says(message_of(ErrorCode::kDataFile, [&] { read_all(options); }), "cannot open"));
  CHECK(!has_children());
}

TEST(data_pump_counts_the_lines_that_a_command_garbles) {
  const Folder folder;
  ReaderOptions options = id_options({folder.write("a", "1 0\n1 1\n")}, {{{0}}}, 1);
  options.input.command.text = "printf 'a print\\n'; cat; head -c 3000 /dev/zero";
  options.policy = BadLinePolicy::kSkip;
  const auto reader = make_reader(options);
  CHECK(joined(read_all(*reader).batches) == range(0, 2));
  CHECK_EQ(reader->bad_lines().counts().at(0), 2);
}

}  // namespace cpudist::testing
