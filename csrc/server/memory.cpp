// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/memory.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace cpudist::server {
namespace {

// Of a pool under a cap, and without one.
size_t pool_bytes(uint64_t cap_bytes) {
  return cap_bytes == 0 ? kPoolBytes : std::min<uint64_t>(cap_bytes, kPoolBytes);
}

uint64_t beyond(uint64_t all, uint64_t some) { return all - std::min(all, some); }

std::string bytes(uint64_t count) { return std::to_string(count) + " bytes"; }

}  // namespace

ServerMemory::ServerMemory(const ServerOptions& options, const ServerCounters& counters)
    : cap_bytes_(options.memory_cap_bytes),
      shard_id_(options.shard_id),
      counters_(counters),
      count_(std::make_shared<MemoryCap>(cap_bytes_)),
      pushes_(std::make_shared<BufferPool>(pool_bytes(cap_bytes_), count_)),
      pool_(std::make_shared<BufferPool>(pool_bytes(cap_bytes_), count_)) {}

uint64_t ServerMemory::under_way() const {
  // Pushes of trainers in this process wait in memory that nobody reserved.
  return std::max(count_->used_bytes(), counters_.pending_bytes.load());
}

uint64_t ServerMemory::size_bytes() const {
  return count_->kept_bytes() + under_way() + count_->lent_bytes() + count_->spare_bytes();
}

void ServerMemory::trim_for(uint64_t size_bytes) const noexcept {
  if (!limited() || count_->has_room(size_bytes)) return;
  pushes_->trim();
  pool_->trim();
  if (give_up_ && count_->lent_bytes() > 0 && !count_->has_room(size_bytes)) give_up_();
}

// ---- pushes under way ----

Buffer ServerMemory::take(uint64_t size_bytes, uint64_t waiting_bytes) const {
  auto reservation = count_->reserve(size_bytes, counters_.pending_bytes.load() + waiting_bytes);
  if (!reservation) return Buffer();
  Buffer taken(static_cast<size_t>(size_bytes), pushes_, std::move(*reservation));
  trim_for(0);
  return taken;
}

bool ServerMemory::fits(uint64_t size_bytes) const {
  if (!limited()) return true;
  const uint64_t room = beyond(cap_bytes_, count_->kept_bytes());
  return size_bytes <= room && counters_.pending_bytes.load() <= room - size_bytes;
}

bool ServerMemory::ever_fits(uint64_t size_bytes) const {
  return !limited() || size_bytes <= beyond(cap_bytes_, count_->kept_bytes());
}

std::string ServerMemory::limit_text() const {
  return "memory_cap_bytes = " + std::to_string(cap_bytes_);
}

std::string ServerMemory::kept_text() const {
  return "server " + std::to_string(shard_id_) + " keeps " + bytes(count_->kept_bytes()) +
         " of rows, their index and dense values";
}

void ServerMemory::refuse(uint64_t size_bytes, bool sent_again) const {
  const std::string limit = limit_text();
  const std::string advice = "; set CPUDIST_SERVER_MEMORY_CAP_BYTES higher, or to 0";
  const std::string server = "server " + std::to_string(shard_id_);
  if (sent_again && size_bytes > cap_bytes_) {
    throw Error(ErrorCode::kInvalidArgument, "a push of " + bytes(size_bytes) + " never fits on " +
                                                 server + ": it exceeds " + limit + advice +
                                                 ", or merge fewer steps");
  }
  if (count_->kept_bytes() > 0 && !ever_fits(size_bytes)) {
    throw Error(ErrorCode::kFull, kept_text() + "; a push of " + bytes(size_bytes) +
                                      " does not fit beside them under " + limit +
                                      ", and never will. Set CPUDIST_SERVER_MEMORY_CAP_BYTES to " +
                                      std::to_string(count_->kept_bytes() + size_bytes) +
                                      " or more (0: no cap), or use more servers");
  }
  throw Error(ErrorCode::kOverloaded,
              "pushes that come in or wait hold " + bytes(under_way()) + " on " + server +
                  ", values " + bytes(count_->kept_bytes()) + "; with " + bytes(size_bytes) +
                  " more they exceed " + limit + advice);
}

// ---- what is kept ----

void ServerMemory::check_layout(uint32_t param_set, uint64_t values_bytes,
                                uint64_t gradients_bytes) const {
  const uint64_t needed = count_->kept_bytes() + values_bytes + gradients_bytes;
  if (!limited() || needed <= cap_bytes_) return;
  throw Error(ErrorCode::kOverloaded,
              "parameter set " + std::to_string(param_set) + " needs " + bytes(values_bytes) +
                  " for its rows, their index and dense values, and " + bytes(gradients_bytes) +
                  " for the dense gradients of one update; with the " +
                  bytes(count_->kept_bytes()) + " that server " + std::to_string(shard_id_) +
                  " keeps already they exceed " + limit_text() +
                  ". Set CPUDIST_SERVER_MEMORY_CAP_BYTES to more than " + std::to_string(needed) +
                  ", with room for the rows of pushes (0: no cap), or use more servers");
}

MemoryCap::Reservation ServerMemory::reserve(const RowGrowth& growth) const {
  trim_for(growth.bytes);
  const std::lock_guard lock(growing_);
  const uint64_t kept = count_->kept_bytes();
  // Whether this update's own pushes count as waiting, its policy decides.
  const uint64_t waiting = beyond(counters_.pending_bytes.load(), growth.own_waiting_bytes);
  const uint64_t others =
      std::max(beyond(count_->used_bytes(), growth.own_reserved_bytes), waiting);
  const uint64_t alone = kept + growth.bytes + growth.own_bytes;
  const bool full = alone > cap_bytes_;
  // Those that wait may wait for this one.
  if (!full && (alone + others <= cap_bytes_ || others <= waiting)) {
    return count_->reserve_anyhow(growth.bytes);
  }
  const std::string what = "table " + growth.table + ": " + std::to_string(growth.rows) +
                           " new rows need " + bytes(growth.bytes) +
                           " for records and index beside " + bytes(growth.own_bytes) +
                           " of gradients; " + kept_text();
  const std::string nothing = ". No row was made, and nothing of the update was applied here";
  if (!full) {
    throw Error(ErrorCode::kOverloaded, what + ", and other pushes under way hold " +
                                            bytes(others) + "; together they exceed " +
                                            limit_text() + nothing);
  }
  throw Error(ErrorCode::kFull,
              what + "; together they exceed " + limit_text() + ", and always will" + nothing +
                  ". Set CPUDIST_SERVER_MEMORY_CAP_BYTES to " + std::to_string(alone) +
                  " or more (0: no cap), or use more servers");
}

RowMemory ServerMemory::row_memory() const {
  if (!limited()) return nullptr;
  return [this](const RowGrowth& growth) { return reserve(growth); };
}

}  // namespace cpudist::server
