// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What happens with lines that are no records. Any thread may report.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "data/parse/parser.h"
#include "data/read/byte_source.h"

namespace cpudist::data {

enum class BadLinePolicy : uint8_t {
  kRaise,       // an error, kBadRecord
  kSkip,        // counted
  kQuarantine,  // counted and written to a file
};

class BadLines {
 public:
  // `quarantine`: a file that is appended to, made if it is not there; for kQuarantine only.
  // Throws Error: kInvalidArgument, kDataFile.
  explicit BadLines(BadLinePolicy policy, const std::string& quarantine = {});

  // Whether a report needs the number of the line, which may cost a pass over the file before it.
  bool needs_number(uint32_t file) const;
  // `number` from 1, or 0 if not needed. The quarantine file gets a line `# file:line:column:
  // message` and then `raw`, nothing of which is kept of an over-long line (`whole` false).
  void report(uint32_t file, const std::string& path, uint64_t number, const LineError& error,
              std::string_view raw, bool whole);

  // Line ends before a byte of a file. Counts on from the nearest byte before it that it was asked
  // for, so that bad lines all over a file cost one pass over it and not one each.
  uint64_t lines_before(uint32_t file, const std::string& path, uint64_t offset,
                        const StopSignal& stop);

  // By the number of the file.
  std::map<uint32_t, uint64_t> counts() const;
  // "file:line:column: message" of the first bad line of each file, once.
  std::vector<std::string> take_notices();

 private:
  void write(const std::string& text);

  const BadLinePolicy policy_;
  const std::string path_;
  Descriptor quarantine_;
  mutable std::mutex mutex_;
  std::map<uint32_t, uint64_t> counts_;
  std::vector<std::string> notices_;
  std::map<uint32_t, std::map<uint64_t, uint64_t>> lines_before_;  // by file and offset
};

}  // namespace cpudist::data
