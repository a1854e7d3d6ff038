// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/push_memory.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/errors.h"

namespace cpudist::server {

PushMemory::PushMemory(const ServerOptions& options, const ServerCounters& counters)
    : cap_bytes_(options.memory_cap_bytes),
      shard_id_(options.shard_id),
      counters_(counters),
      held_(std::make_shared<MemoryCap>(cap_bytes_)),
      pool_(std::make_shared<BufferPool>(std::min<uint64_t>(cap_bytes_, kPoolBytes))) {}

Buffer PushMemory::take(uint64_t size_bytes, uint64_t waiting_bytes) const {
  auto reservation = held_->reserve(size_bytes, counters_.pending_bytes.load() + waiting_bytes);
  if (!reservation) return Buffer();
  return Buffer(static_cast<size_t>(size_bytes), pool_, std::move(*reservation));
}

bool PushMemory::fits(uint64_t size_bytes) const {
  if (!limited()) return true;
  const uint64_t waiting = counters_.pending_bytes.load();
  return size_bytes <= cap_bytes_ && waiting <= cap_bytes_ - size_bytes;
}

void PushMemory::refuse(uint64_t size_bytes, bool sent_again) const {
  const std::string limit = "memory_cap_bytes = " + std::to_string(cap_bytes_) +
                            "; set CPUDIST_SERVER_MEMORY_CAP_BYTES higher, or to 0";
  const std::string server = "server " + std::to_string(shard_id_);
  if (sent_again && size_bytes > cap_bytes_) {
    throw Error(ErrorCode::kInvalidArgument,
                "a push of " + std::to_string(size_bytes) + " bytes never fits on " + server +
                    ": it exceeds " + limit + ", or merge fewer steps");
  }
  const uint64_t held = std::max(counters_.pending_bytes.load(), held_->used_bytes());
  throw Error(ErrorCode::kOverloaded,
              "pushes that come in or wait hold " + std::to_string(held) + " bytes on " + server +
                  "; with " + std::to_string(size_bytes) + " more they exceed " + limit);
}

}  // namespace cpudist::server
