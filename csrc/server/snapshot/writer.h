// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Writes what a parameter set was at a cut to files, while updates go on: docs/mechanisms.md,
// "Writing a snapshot".
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file_calls.h"
#include "base/memory_cap.h"
#include "server/snapshot/gone_keys.h"
#include "table/store.h"
#include "wire/cut.h"
#include "wire/layout.h"

namespace cpudist::server {

struct SnapshotOptions {
  uint32_t shard_id = 0;
  std::string host{};                     // for messages
  std::string directory{};                // empty: nowhere
  uint64_t memory_bytes = 512ull << 20;   // for rows that change before they are written
  uint64_t dense_at_once = 64ull << 20;   // bytes of dense values that begin() copies itself
  std::shared_ptr<files::Calls> files{};  // null: those of the system
  std::shared_ptr<MemoryCap> cap{};       // counts what a snapshot takes; null: nobody does
};

struct SnapshotJob {
  uint32_t param_set = 0;
  uint64_t number = 0;              // of the cut
  std::string name;                 // of the snapshot, and of its directory
  std::vector<uint32_t> members{};  // the trainers that have marked the cut
  // Number of the snapshot of this set since whose cut rows are written if they have changed, and
  // keys that have lost theirs; 0: all rows are.
  uint64_t base = 0;
};

// What is saved: a parameter set at the moment of the cut. All but the version is referred to until
// the snapshot is over, or forget() returns.
struct SnapshotSource {
  table::ParamStore& store;
  const wire::ParamSetLayout& layout;
  wire::Version version;
  // By table, of those whose rows may go; null elsewhere.
  std::vector<std::shared_ptr<GoneKeys>> gone{};
};

// One per server. Its thread begins with the first job, and writes one after the other, in the
// order of begin(). A set has one job at a time.
//
// Thread safety: all members. None is to be called with the lock of a set held but begin() and
// forget_bases().
class SnapshotWriter {
 public:
  explicit SnapshotWriter(SnapshotOptions options);
  ~SnapshotWriter();  // gives up what is being written
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // Where snapshots are: each is a directory in there, made if missing. Of this process only, never
  // from the wire. Empty: nowhere.
  void set_directory(std::string path);
  std::string directory() const;
  files::Calls& files() const;

  // With `lock`, which is that of the set, held exclusively: from here on the values of now are
  // kept until they are written. Throws Error(kSnapshot) where there is no directory or another one
  // of this set is not written, or where it is not known any more what has changed since the base,
  // kInvalidArgument for a name that is none, kOutOfMemory, kFull where the cap has no room for it;
  // nothing has changed then.
  void begin(SnapshotJob job, const SnapshotSource& source, std::shared_mutex& lock);

  // How far that snapshot is. Number 0: whether a file `token` lies in the directory.
  wire::CutStatus status(uint32_t param_set, uint64_t number, const std::string& token) const;

  // Ends it if it is being written, and has its files removed unless a manifest names them; nobody
  // knows it any more. Does not wait for that.
  void abandon(uint32_t param_set, uint64_t number);

  // Values of the set are changed, and not by updates, of which rows say when they were: none of
  // its snapshots so far, or that is being written, can be a base. May be called with the lock of
  // the set held.
  void forget_bases(uint32_t param_set);

  // Before a set goes: nothing of it is read any more when this returns.
  void forget(uint32_t param_set);

  // Before rows are changed, without a lock: where much is kept for a snapshot already, it is to
  // get on first; so long, at most.
  static constexpr Clock::duration kLongestWait = std::chrono::milliseconds(100);
  bool has_room() const;
  void wait_for_room(TimePoint latest = Clock::now() + kLongestWait);
  // Others need the memory: what is being written fails, and what waits to be.
  void give_up_for_memory() noexcept;
  uint64_t image_bytes() const;
  uint64_t waits() const;  // for room, ever

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cpudist::server
