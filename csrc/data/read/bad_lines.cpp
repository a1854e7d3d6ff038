// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/read/bad_lines.h"

#include <cerrno>
#include <iterator>
#include <tuple>
#include <utility>

#include "base/files.h"

namespace cpudist::data {

namespace {

std::string place(const std::string& file, uint64_t number, const LineError& error) {
  return file + ":" + std::to_string(number) + ":" + std::to_string(error.column) + ": " +
         error.message;
}

}  // namespace

BadLines::BadLines(BadLinePolicy policy, const std::string& quarantine)
    : policy_(policy), path_(quarantine) {
  if ((policy == BadLinePolicy::kQuarantine) == quarantine.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                quarantine.empty() ? "the policy 'quarantine' needs a file to write bad lines to"
                                   : "a quarantine file is for the policy 'quarantine' only");
  }
  if (quarantine.empty()) return;
  quarantine_ = files::open(quarantine, O_WRONLY | O_CREAT | O_APPEND, 0666);
  if (quarantine_.get() < 0) {
    throw Error(ErrorCode::kDataFile,
                "cannot open the quarantine file " + quarantine + ": " + system_text(errno));
  }
}

bool BadLines::needs_number(uint32_t file) const {
  if (policy_ != BadLinePolicy::kSkip) return true;
  const std::lock_guard lock(mutex_);
  return !counts_.contains(file);
}

void BadLines::report(uint32_t file, const std::string& path, uint64_t number,
                      const LineError& error, std::string_view raw, bool whole) {
  if (policy_ == BadLinePolicy::kRaise) {
    throw Error(ErrorCode::kBadRecord,
                place(path, number, error) +
                    "; mend the file or the schema, or choose the policy 'skip' or 'quarantine'");
  }
  const std::lock_guard lock(mutex_);
  if (policy_ == BadLinePolicy::kQuarantine) {
    std::string text = "# " + place(path, number, error) + "\n";
    if (whole) text.append(raw).append("\n");
    write(text);
  }
  if (counts_[file]++ == 0) notices_.push_back(place(path, number, error));
}

uint64_t BadLines::lines_before(uint32_t file, const std::string& path, uint64_t offset,
                                const StopSignal& stop) {
  uint64_t begin = 0;
  uint64_t lines = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto& known = lines_before_[file];
    const auto after = known.upper_bound(offset);
    if (after != known.begin()) std::tie(begin, lines) = *std::prev(after);
  }
  lines += count_newlines(path, begin, offset, stop);
  const std::lock_guard lock(mutex_);
  lines_before_[file][offset] = lines;
  return lines;
}

void BadLines::write(const std::string& text) {
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t count = files::write(quarantine_, text.data() + written, text.size() - written);
    if (count <= 0) {
      throw Error(ErrorCode::kDataFile, "cannot write to the quarantine file " + path_ + ": " +
                                            system_text(count < 0 ? errno : ENOSPC));
    }
    written += static_cast<size_t>(count);
  }
}

std::map<uint32_t, uint64_t> BadLines::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::vector<std::string> BadLines::take_notices() {
  const std::lock_guard lock(mutex_);
  return std::exchange(notices_, {});
}

}  // namespace cpudist::data
