// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "transport/ranks/message.h"
#include "base/crc32c.h"

#include <bit>
#include <cstring>
#include <string>

#include "base/errors.h"

namespace cpudist::transport::ranks {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

template <typename T>
void put(uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof(value));
}

template <typename T>
T get(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

[[noreturn]] void refuse(const char* what, uint64_t found) {
  throw Error(ErrorCode::kProtocol, std::string("a message of a lane has a wrong ") + what + ", " +
                                        std::to_string(found) +
                                        ": do all ranks run the same version?");
}

}  // namespace

void encode_prefix(const Prefix& prefix, uint8_t* bytes) {
  put<uint32_t>(bytes, kLaneMagic);
  put<uint16_t>(bytes + 4, static_cast<uint16_t>(prefix.kind));
  put<uint16_t>(bytes + 6, static_cast<uint16_t>(prefix.to));
  put<uint32_t>(bytes + 8, prefix.connection);
  put<uint32_t>(bytes + 12, crc32c(bytes, 12));
}

Prefix decode_prefix(const uint8_t* bytes) {
  const auto magic = get<uint32_t>(bytes);
  if (magic != kLaneMagic) refuse("magic", magic);
  const auto checksum = get<uint32_t>(bytes + 12);
  if (checksum != crc32c(bytes, 12)) refuse("checksum", checksum);
  const auto kind = get<uint16_t>(bytes + 4);
  if (kind < static_cast<uint16_t>(MessageKind::kFrame) ||
      kind > static_cast<uint16_t>(MessageKind::kGoodbye)) {
    refuse("kind", kind);
  }
  const auto to = get<uint16_t>(bytes + 6);
  if (to > static_cast<uint16_t>(Side::kServer)) refuse("side", to);
  return {static_cast<MessageKind>(kind), static_cast<Side>(to), get<uint32_t>(bytes + 8)};
}

}  // namespace cpudist::transport::ranks
