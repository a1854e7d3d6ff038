// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "wire/cut.h"

#include <algorithm>

#include "wire/bulk.h"
#include "wire/fields.h"

namespace cpudist::wire {
namespace {

constexpr size_t kFileBytesMin = 40;  // of a description

bool is_letter_or_digit(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); }

void check_text(const std::string& text, size_t limit_bytes, const char* what) {
  if (text.size() <= limit_bytes) return;
  throw Error(ErrorCode::kInvalidArgument,
              std::string(what) + " of " + std::to_string(text.size()) +
                  " bytes, expected at most " + std::to_string(limit_bytes));
}

std::string shortened(const std::string& reason) {
  if (reason.size() <= kCutReasonBytesMax) return reason;
  return reason.substr(0, kCutReasonBytesMax - 4) + " ...";
}

// A list with its length before it.
template <typename V, typename List>
void counted(V& v, List& list) {
  const uint64_t count = v.count64(list);
  v.elements(list, count);
}

}  // namespace

template <typename V>
void fields(V& v, Of<V, Cut>& m) {
  v.number(m.number);
  v.number(m.wait_ms);
  v.choice(m.step, CutStep::kMark, CutStep::kAnnounce, "step of a cut");
  v.zero();
  v.number(m.base);
  v.text(m.name, kSnapshotNameBytesMax);
}

template <typename V>
void fields(V& v, Of<V, CutReply>& m) {
  v.number(m.number);
  v.flag32(m.taken, "a cut that was taken");
  v.flag32(m.taken_back, "a marker that was taken back");
  v.number(m.digest);
  v.text(m.name, kSnapshotNameBytesMax);
  v.text(m.reason, kCutReasonBytesMax);
}

template <typename V>
void fields(V& v, Of<V, CutQuery>& m) {
  v.number(m.number);
  v.flag32(m.take_back, "a marker that is to be taken back");
  v.zero();
  v.text(m.token, kSnapshotNameBytesMax);
}

template <typename V>
void fields(V& v, Of<V, CutFile>& m) {
  v.text(m.name, kSnapshotNameBytesMax);
  v.number(m.table);
  v.zero();
  v.number(m.rows);
  v.number(m.bytes);
  counted(v, m.checksums);
  if constexpr (!V::kWrites) {
    const uint64_t expected = m.bytes / kChecksumBytes + (m.bytes % kChecksumBytes != 0 ? 1 : 0);
    check_equal(m.checksums.size(), expected, "checksums of a file");
  }
}

template <typename V>
void fields(V& v, Of<V, CutStatus>& m) {
  v.choice(m.state, CutState::kUnknown, CutState::kFailed, "state of a cut");
  v.number(m.shard);
  v.text(m.reason, kCutReasonBytesMax);
  v.number(m.version.round);
  v.number(m.version.samples);
  v.number(m.version.steps);
  v.number(m.base);
  v.flag32(m.can_be_base, "whether a snapshot can be a base");
  v.zero();
  counted(v, m.table_steps);
  counted(v, m.block_steps);
  counted(v, m.members);
  counted(v, m.present);
  counted(v, m.lost);
  const uint64_t count = v.count64(m.files);
  v.items(m.files, count, kFileBytesMin, "files");
}

bool is_snapshot_name(std::string_view name) {
  if (name.empty() || name.size() > kSnapshotNameBytesMax) return false;
  if (!is_letter_or_digit(name.front()) || name.find("..") != std::string_view::npos) return false;
  return std::all_of(name.begin(), name.end(),
                     [](char c) { return is_letter_or_digit(c) || c == '-' || c == '.'; });
}

Buffer encode(const Cut& message) {
  check_text(message.name, kSnapshotNameBytesMax, "the name of a snapshot");
  return write_message(message);
}

Buffer encode(const CutReply& message) {
  check_text(message.name, kSnapshotNameBytesMax, "the name of a snapshot");
  // A reason is for people: a long one is cut rather than lost.
  CutReply shorter = message;
  shorter.reason = shortened(message.reason);
  return write_message(shorter);
}

Buffer encode(const CutQuery& message) {
  check_text(message.token, kSnapshotNameBytesMax, "the name of a file");
  return write_message(message);
}

Buffer encode(const CutStatus& message) {
  for (const CutFile& file : message.files) {
    check_text(file.name, kSnapshotNameBytesMax, "the name of a file");
  }
  if (message.reason.size() <= kCutReasonBytesMax) return write_message(message);
  CutStatus shorter = message;
  shorter.reason = shortened(message.reason);
  return write_message(shorter);
}

using Bytes = std::span<const uint8_t>;
Cut decode_cut(Bytes payload) { return read_message<Cut>(payload); }
CutReply decode_cut_reply(Bytes payload) { return read_message<CutReply>(payload); }
CutQuery decode_cut_query(Bytes payload) { return read_message<CutQuery>(payload); }
CutStatus decode_cut_status(Bytes payload) { return read_message<CutStatus>(payload); }

}  // namespace cpudist::wire
