// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Bytes between the ranks of a group, as collective backends move them: one ordered stream per
// direction of a pair, messages of a size that both sides know, no tags. Implemented outside of the
// core (csrc/backends) and handed to it in a capsule, so both modules compile this file; it needs
// no symbol of either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace cpudist::transport {

// The capsule holds a std::shared_ptr<RankTransport>*. The number changes with this interface, so
// that modules of two builds refuse each other.
inline constexpr char kRankTransportCapsule[] = "torch_cpudist.RankTransport/1";

// A message under way. May be destroyed before it is done; its memory is then left alone.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Blocks until done, without a limit of its own. Empty, or what went wrong.
  virtual std::string wait() = 0;
};

// Thread safety: per peer and direction one thread; `cancel` any. Nothing throws but bad_alloc.
class RankTransport {
 public:
  virtual ~RankTransport() = default;
  virtual uint32_t rank() const = 0;
  virtual uint32_t size() const = 0;
  // How many messages of one direction of a pair may be under way: so many keep their order.
  virtual size_t at_once() const = 0;
  // Messages arrive in the order in which they were started. `owner` keeps the bytes alive as long
  // as the backend may touch them. A failure to start is told by wait().
  virtual std::unique_ptr<Transfer> start_send(uint32_t peer, const uint8_t* data,
                                               size_t size_bytes,
                                               std::shared_ptr<const void> owner) = 0;
  virtual std::unique_ptr<Transfer> start_receive(uint32_t peer, uint8_t* data, size_t size_bytes,
                                                  std::shared_ptr<void> owner) = 0;
  // Ends the transfers with this peer, those to come too: wait() then tells of it.
  virtual void cancel(uint32_t peer) noexcept = 0;
};

}  // namespace cpudist::transport
