// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The frame: a fixed 64-byte little-endian header and a payload. This file knows bytes only; what a
// payload means stands in control.h, layout.h, rows.h and push.h. docs/wire.md gives the format to
// the byte.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/buffer.h"
#include "wire/frame_kind.h"

namespace cpudist::wire {

inline constexpr uint64_t kPayloadLimitBytes = 1ull << 31;  // of one frame

inline constexpr uint32_t kMagic = 0x31445043;  // "CPD1"
inline constexpr uint16_t kProtocolVersion = 10;
inline constexpr size_t kHeaderBytes = 64;
inline constexpr uint32_t kNoParamSet = 0xffffffffu;  // in frames that are about none

// Which process sent a frame.
enum class Role : uint16_t { kServer = 1, kTrainer = 2 };

struct FrameHeader {
  FrameKind kind = FrameKind::kError;
  bool coded = false;  // the payload is coded (codec/codec.h), and so is to be the reply's
  uint64_t run_id = 0;
  uint32_t epoch = 0;        // membership number
  uint32_t incarnation = 0;  // of the trainer
  Role role = Role::kTrainer;
  uint16_t rank = 0;  // trainer rank or shard id of the sender
  uint32_t param_set = 0;
  uint64_t request_id = 0;   // a reply repeats its request's
  uint64_t sequence = 0;     // 0 = not sequenced
  uint64_t length = 0;       // payload bytes
  uint32_t payload_crc = 0;  // CRC-32C, 0 when the channel needs none
};

struct Frame {
  FrameHeader header;
  Buffer payload;
  bool dropped = false;  // its receiver had no memory for the payload
};

// Byte offsets: magic 0 u32, version 4 u16, kind 6 u16 with `coded` as its highest bit, run_id 8
// u64, epoch 16 u32, incarnation 20 u32, role 24 u16, rank 26 u16, param_set 28 u32, request_id 32
// u64, sequence 40 u64, length 48 u64, payload_crc 56 u32, header_crc 60 u32 (CRC-32C of bytes
// 0..59).
std::array<uint8_t, kHeaderBytes> encode_header(const FrameHeader& header);
// Throws Error(kProtocol) on a wrong magic, version, checksum, kind, role or a length above
// `payload_limit_bytes`; nothing is allocated before these checks.
FrameHeader decode_header(const uint8_t* bytes, uint64_t payload_limit_bytes);

}  // namespace cpudist::wire
