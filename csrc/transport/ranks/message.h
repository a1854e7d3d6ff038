// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What travels ahead of every payload on a lane: a fixed number of bytes, because a receiver of a
// collective backend must know the size. docs/wire.md gives the format to the byte.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "wire/frame.h"

namespace cpudist::transport::ranks {

inline constexpr uint32_t kLaneMagic = 0x4d445043;  // "CPDM"
inline constexpr size_t kPrefixBytes = 16;
inline constexpr size_t kMessageBytes = kPrefixBytes + wire::kHeaderBytes;
// Payloads travel in pieces, so that a long one shows that the peer lives.
inline constexpr size_t kPieceBytes = 1u << 20;

enum class MessageKind : uint16_t {
  kFrame = 1,    // a frame header follows, then its payload
  kClose = 2,    // the sender has closed this connection
  kGoodbye = 3,  // the last message of the lane in this direction
};

// Which end of a connection a rank is.
enum class Side : uint16_t { kClient = 0, kServer = 1 };

struct Prefix {
  MessageKind kind = MessageKind::kFrame;
  Side to = Side::kServer;  // what the receiver is on this connection
  uint32_t connection = 0;  // counted by the client of this pair from 1
};

// Byte offsets: magic 0 u32, kind 4 u16, to 6 u16, connection 8 u32, CRC-32C of bytes 0..11 12 u32;
// then a frame header, or zeros.
using MessageBytes = std::array<uint8_t, kMessageBytes>;
void encode_prefix(const Prefix& prefix, uint8_t* bytes);
// Throws Error(kProtocol) on a wrong magic, checksum, kind or side.
Prefix decode_prefix(const uint8_t* bytes);

}  // namespace cpudist::transport::ranks
