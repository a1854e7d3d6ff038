// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The cut of a snapshot: the marker that every trainer sends between two of its pushes, what it is
// answered with, and how far a server is with writing what was cut.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/buffer.h"
#include "wire/layout.h"

namespace cpudist::wire {

// Of the names of snapshots, and of files in their directory.
inline constexpr size_t kSnapshotNameBytesMax = 96;
inline constexpr size_t kCutReasonBytesMax = 3072;
// What one checksum of a file covers; the last one what is left.
inline constexpr uint64_t kChecksumBytes = 256 * 1024;
// In a file's description: it has no rows of a table but the dense blocks.
inline constexpr uint32_t kDenseFile = 0xffffffffu;

enum class CutStep : uint32_t {
  kMark = 0,      // the sender's marker
  kAbandon = 1,   // no marker: what is open, being written or written of this number is dropped
  kAnnounce = 2,  // no marker yet: from now on replies to pushes ask for markers of this number
};

struct Cut {  // kCut
  uint64_t number = 0;
  uint64_t wait_ms = 0;  // after the first marker or announcement: the cut is given up
  CutStep step = CutStep::kMark;
  std::string name;  // of the snapshot, from the trainer that opens the cut; others send none
  // Of the snapshot since whose cut rows are to be written if they have changed, from the trainer
  // that knows which ones are committed; 0 names none. All rows are if no marker names one.
  uint64_t base = 0;
};

struct CutReply {  // once the cut is taken or given up; to other steps at once, and not taken
  uint64_t number = 0;
  bool taken = false;
  // Of which pushes of which trainers were applied before the cut, and who has marked it. Servers
  // have cut at one moment if they say the same.
  uint64_t digest = 0;
  std::string name;         // as the opener gave it
  std::string reason;       // why it was not taken
  bool taken_back = false;  // the marker, by who sent it, who may mark this number again
};

struct CutQuery {  // kCutStatus
  uint64_t number = 0;
  // With number 0: whether a file of this name lies in the server's directory of snapshots. Without
  // a name: who would take part in a cut of now.
  std::string token;
  // The marker of who asks is to be answered if it waits for others: it is taken back.
  bool take_back = false;
};

enum class CutState : uint32_t {
  kUnknown = 0,  // no such cut here, or it was abandoned
  kWriting = 1,
  kDone = 2,
  kFailed = 3,
};

struct CutFile {
  std::string name;
  uint32_t table = kDenseFile;
  uint64_t rows = 0;
  uint64_t bytes = 0;
  std::vector<uint32_t> checksums;  // CRC-32C of every kChecksumBytes
};

struct CutStatus {  // reply to kCutStatus
  CutState state = CutState::kUnknown;
  uint32_t shard = 0;
  std::string reason;                 // of kFailed
  Version version;                    // as of the cut, as all that follows
  std::vector<uint64_t> table_steps;  // of every table of the layout
  std::vector<uint64_t> block_steps;  // of every block of the layout; 0 where another server's
  std::vector<uint32_t> members;      // trainers whose markers made the cut, or would make one
  // Of a cut of now, of all trainers that the server has met and waits for at its end: those that
  // are there, and those that are lost and may come back.
  std::vector<uint32_t> present;
  std::vector<uint32_t> lost;
  std::vector<CutFile> files;
  uint64_t base = 0;         // what was written are the changes since that cut; 0: all rows
  bool can_be_base = false;  // this server knows what has changed since this cut
};

// Letters a-z, digits, '-' and '.', beginning with a letter or digit, without "..", at most
// kSnapshotNameBytesMax: what may become the name of a directory or file.
bool is_snapshot_name(std::string_view name);

Buffer encode(const Cut& message);
Buffer encode(const CutReply& message);
Buffer encode(const CutQuery& message);
Buffer encode(const CutStatus& message);

// Throw Error(kProtocol). Names are what came: who uses one asks is_snapshot_name first.
Cut decode_cut(std::span<const uint8_t> payload);
CutReply decode_cut_reply(std::span<const uint8_t> payload);
CutQuery decode_cut_query(std::span<const uint8_t> payload);
CutStatus decode_cut_status(std::span<const uint8_t> payload);

}  // namespace cpudist::wire
