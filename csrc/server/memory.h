// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a server takes of memory, and its cap: values that are kept (rows, their index, what is made
// ahead of them, dense blocks, averages), pushes from their header to their update, and the free
// blocks of its pools, which go before anything is refused. So does what a snapshot takes: it is
// given up then, and its memory is free once its threads have seen that.
//
// Two kinds of refusal. Where pushes under way are in the way it is kOverloaded: the push may be
// sent again. Where it would not fit beside what is kept if it were the only one it is kFull, and
// no use to send it again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/buffer.h"
#include "server/counters.h"
#include "server/options.h"
#include "server/update/new_rows.h"

namespace cpudist::server {

inline constexpr size_t kPoolBytes = size_t{256} << 20;

// Thread safety: all members.
class ServerMemory {
 public:
  ServerMemory(const ServerOptions& options, const ServerCounters& counters);

  // What gives lent bytes up when there is too little room. Before any of the other members.
  void when_short(std::function<void()> give_up) { give_up_ = std::move(give_up); }

  bool limited() const { return cap_bytes_ != 0; }
  // Of replies.
  const std::shared_ptr<BufferPool>& pool() const { return pool_; }
  // Counts what tables and blocks keep, and what snapshots take.
  const std::shared_ptr<MemoryCap>& count() const { return count_; }
  uint64_t size_bytes() const;  // of everything that the cap counts

  // ---- pushes under way ----
  // Memory for a push, or nothing where there is no room; `waiting_bytes` wait for it besides those
  // of the pushes that are there.
  Buffer take(uint64_t size_bytes, uint64_t waiting_bytes = 0) const;
  // Whether a push may wait beside those that do.
  bool fits(uint64_t size_bytes) const;
  // Whether it would fit if it were the only one.
  bool ever_fits(uint64_t size_bytes) const;
  // Throws kOverloaded; kFull; or kInvalidArgument for a push that exceeds the cap by itself and
  // would be sent again for ever.
  [[noreturn]] void refuse(uint64_t size_bytes, bool sent_again) const;

  // Where there is too little room frees what is spare; if that is not enough, lent bytes are given
  // up.
  void trim() const noexcept { trim_for(0); }

  // ---- what is kept ----
  // For the values of a layout, before they are there. Throws kOverloaded.
  void check_layout(uint32_t param_set, uint64_t values_bytes, uint64_t gradients_bytes) const;
  // Counts the memory of new rows until they are kept. Throws kFull or kOverloaded.
  MemoryCap::Reservation reserve(const RowGrowth& growth) const;
  // The same as updates ask for it; null without a cap.
  RowMemory row_memory() const;

 private:
  uint64_t under_way() const;
  void trim_for(uint64_t size_bytes) const noexcept;
  std::string kept_text() const;
  std::string limit_text() const;

  const uint64_t cap_bytes_;
  const uint32_t shard_id_;
  const ServerCounters& counters_;
  const std::shared_ptr<MemoryCap> count_;
  const std::shared_ptr<BufferPool> pushes_;
  const std::shared_ptr<BufferPool> pool_;
  std::function<void()> give_up_;
  mutable std::mutex growing_;  // one at a time looks for room, and takes it
};

}  // namespace cpudist::server
