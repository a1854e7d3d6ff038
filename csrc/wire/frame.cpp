// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Frame headers to bytes and back.

#include "wire/frame.h"
#include "base/crc32c.h"

#include <bit>
#include <cstring>
#include <string>

#include "base/errors.h"

namespace cpudist::wire {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are little-endian in place");

constexpr size_t kHeaderCrcOffset = 60;
constexpr unsigned kCodedBit = 0x8000u;  // of the field of the kind

template <typename T>
void put(uint8_t* bytes, size_t offset, T value) {
  std::memcpy(bytes + offset, &value, sizeof(T));
}

template <typename T>
T get(const uint8_t* bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes + offset, sizeof(T));
  return value;
}

std::string hex(uint64_t value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) {
    const auto digit = static_cast<size_t>((value >> shift) & 0xfu);
    if (digit != 0 || !text.empty() || shift == 0) text += kDigits[digit];
  }
  return "0x" + text;
}

[[noreturn]] void refuse_frame(const std::string& what) { throw Error(ErrorCode::kProtocol, what); }

}  // namespace

std::array<uint8_t, kHeaderBytes> encode_header(const FrameHeader& header) {
  std::array<uint8_t, kHeaderBytes> bytes{};
  uint8_t* out = bytes.data();
  put<uint32_t>(out, 0, kMagic);
  put<uint16_t>(out, 4, kProtocolVersion);
  const unsigned coded = header.coded ? kCodedBit : 0;
  put<uint16_t>(out, 6, static_cast<uint16_t>(static_cast<unsigned>(header.kind) | coded));
  put<uint64_t>(out, 8, header.run_id);
  put<uint32_t>(out, 16, header.epoch);
  put<uint32_t>(out, 20, header.incarnation);
  put<uint16_t>(out, 24, static_cast<uint16_t>(header.role));
  put<uint16_t>(out, 26, header.rank);
  put<uint32_t>(out, 28, header.param_set);
  put<uint64_t>(out, 32, header.request_id);
  put<uint64_t>(out, 40, header.sequence);
  put<uint64_t>(out, 48, header.length);
  put<uint32_t>(out, 56, header.payload_crc);
  put<uint32_t>(out, kHeaderCrcOffset, crc32c(out, kHeaderCrcOffset));
  return bytes;
}

FrameHeader decode_header(const uint8_t* bytes, uint64_t payload_limit_bytes) {
  const auto magic = get<uint32_t>(bytes, 0);
  if (magic != kMagic) {
    refuse_frame("not a torch_cpudist frame: expected magic " + hex(kMagic) + ", found " +
                 hex(magic));
  }
  const auto version = get<uint16_t>(bytes, 4);
  if (version != kProtocolVersion) {
    refuse_frame("expected protocol version " + std::to_string(kProtocolVersion) + ", found " +
                 std::to_string(version) + ": install the same torch_cpudist everywhere");
  }
  const auto found_crc = get<uint32_t>(bytes, kHeaderCrcOffset);
  const uint32_t expected_crc = crc32c(bytes, kHeaderCrcOffset);
  if (found_crc != expected_crc) {
    refuse_frame("frame header is damaged: expected checksum " + hex(expected_crc) + ", found " +
                 hex(found_crc));
  }
  const auto field = get<uint16_t>(bytes, 6);
  const unsigned kind = field & ~kCodedBit;
  if (!known_frame_kind(kind)) refuse_frame("unknown frame kind " + std::to_string(kind));
  const auto role = get<uint16_t>(bytes, 24);
  if (role != static_cast<uint16_t>(Role::kServer) &&
      role != static_cast<uint16_t>(Role::kTrainer)) {
    refuse_frame("unknown role " + std::to_string(role) + " in a frame header");
  }
  FrameHeader header;
  header.length = get<uint64_t>(bytes, 48);
  if (header.length > payload_limit_bytes) {
    refuse_frame("frame payload of " + std::to_string(header.length) +
                 " bytes is above the limit of " + std::to_string(payload_limit_bytes));
  }
  header.kind = static_cast<FrameKind>(kind);
  header.coded = (field & kCodedBit) != 0;
  header.run_id = get<uint64_t>(bytes, 8);
  header.epoch = get<uint32_t>(bytes, 16);
  header.incarnation = get<uint32_t>(bytes, 20);
  header.role = static_cast<Role>(role);
  header.rank = get<uint16_t>(bytes, 26);
  header.param_set = get<uint32_t>(bytes, 28);
  header.request_id = get<uint64_t>(bytes, 32);
  header.sequence = get<uint64_t>(bytes, 40);
  header.payload_crc = get<uint32_t>(bytes, 56);
  return header;
}

}  // namespace cpudist::wire
