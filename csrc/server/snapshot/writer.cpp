// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/snapshot/writer.h"

#include <mutex>
#include <utility>

#include "base/errors.h"

namespace cpudist::server {

struct SnapshotWriter::Impl {
  uint32_t shard_id = 0;
  std::mutex mutex;
  std::string directory;
};

SnapshotWriter::SnapshotWriter(uint32_t shard_id) : impl_(std::make_unique<Impl>()) {
  impl_->shard_id = shard_id;
}

SnapshotWriter::~SnapshotWriter() = default;

void SnapshotWriter::set_directory(std::string path) {
  const std::lock_guard lock(impl_->mutex);
  impl_->directory = std::move(path);
}

void SnapshotWriter::begin(SnapshotJob job, const SnapshotSource& source, std::shared_mutex& lock) {
  static_cast<void>(source);
  static_cast<void>(lock);
  throw Error(ErrorCode::kInvalidArgument, "snapshot " + job.name + ": server " +
                                               std::to_string(impl_->shard_id) +
                                               " has no snapshot directory");
}

void SnapshotWriter::abandon(uint32_t param_set, uint64_t number) {
  static_cast<void>(param_set);
  static_cast<void>(number);
}

void SnapshotWriter::forget(uint32_t param_set) { static_cast<void>(param_set); }

}  // namespace cpudist::server
