// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Checksums against published vectors, and frame headers to the byte.

#include <cstring>
#include <random>
#include <set>
#include <string>

#include "base/crc32c.h"
#include "support/channel_fixture.h"
#include "support/check.h"
#include "wire/frame.h"

using namespace cpudist;  // NOLINT
using cpudist::testing::code;
using cpudist::testing::error_code;

namespace {

std::vector<uint8_t> random_bytes(size_t size, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<uint8_t> bytes(size);
  for (auto& byte : bytes) byte = static_cast<uint8_t>(generator());
  return bytes;
}

wire::FrameHeader sample_header() {
  wire::FrameHeader header;
  header.kind = wire::FrameKind::kPush;
  header.run_id = 0x1122334455667788ull;
  header.epoch = 5;
  header.incarnation = 6;
  header.role = wire::Role::kTrainer;
  header.rank = 7;
  header.param_set = 8;
  header.request_id = 9;
  header.sequence = 10;
  header.length = 11;
  header.payload_crc = 12;
  return header;
}

// With the checksum made right again after a change.
template <typename Change>
uint32_t code_after(const Change& change, uint64_t limit = 1000) {
  auto bytes = wire::encode_header(sample_header());
  change(bytes);
  const uint32_t crc = crc32c(bytes.data(), 60);
  std::memcpy(bytes.data() + 60, &crc, 4);
  return error_code([&] { wire::decode_header(bytes.data(), limit); });
}

}  // namespace

TEST(wire_crc32c_matches_published_vectors) {
  // RFC 3720, appendix B.4, and the check value of the CRC catalogue.
  std::vector<uint8_t> bytes(32, 0);
  CHECK_EQ(crc32c("123456789", 9), 0xE3069283u);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x8A9136AAu);
  bytes.assign(32, 0xff);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x62A8AB43u);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(i);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x46DD794Eu);
  CHECK_EQ(crc32c_table(bytes.data(), 32), 0x46DD794Eu);
  CHECK_EQ(crc32c(nullptr, 0), 0u);
}

TEST(wire_crc32c_paths_agree_at_every_length_and_offset) {
  const auto bytes = random_bytes(40000, 1);
  for (const size_t size :
       {0, 1, 7, 8, 9, 63, 767, 768, 769, 1536, 5000, 12287, 12288, 12289, 13056, 25000, 39990}) {
    for (size_t offset = 0; offset < 9; ++offset) {
      const uint32_t whole = crc32c(bytes.data() + offset, size);
      CHECK_EQ(whole, crc32c_table(bytes.data() + offset, size));
      const size_t half = size / 3;  // in two parts
      const uint32_t first = crc32c(bytes.data() + offset, half);
      CHECK_EQ(crc32c(bytes.data() + offset + half, size - half, first), whole);
    }
  }
}

TEST(wire_header_survives_the_round_trip) {
  const wire::FrameHeader header = sample_header();
  const auto bytes = wire::encode_header(header);
  CHECK_EQ(std::memcmp(bytes.data(), "CPD1", 4), 0);
  CHECK_EQ(bytes[4], 10);
  CHECK_EQ(bytes[6], 8);
  CHECK_EQ(bytes[8], 0x88);
  CHECK_EQ(bytes[26], 7);
  CHECK_EQ(bytes[48], 11);
  const wire::FrameHeader back = wire::decode_header(bytes.data(), 11);
  CHECK(back.kind == header.kind && back.role == header.role);
  CHECK_EQ(back.run_id, header.run_id);
  CHECK_EQ(back.epoch, 5u);
  CHECK_EQ(back.incarnation, 6u);
  CHECK_EQ(back.rank, 7);
  CHECK_EQ(back.param_set, 8u);
  CHECK_EQ(back.request_id, 9u);
  CHECK_EQ(back.sequence, 10u);
  CHECK_EQ(back.length, 11u);
  CHECK_EQ(back.payload_crc, 12u);
  CHECK(!back.coded);
  wire::FrameHeader coded = header;
  coded.coded = true;
  const auto marked = wire::encode_header(coded);
  CHECK_EQ(marked[7], 0x80);
  CHECK(wire::decode_header(marked.data(), 11).coded);
  CHECK(wire::decode_header(marked.data(), 11).kind == header.kind);
}

TEST(wire_frame_kinds_stand_in_the_table_by_number) {
  using wire::FrameKind;
  std::set<std::string> names;
  for (size_t i = 0; i < wire::kFrameTraits.size(); ++i) {
    const wire::FrameTraits& traits = wire::kFrameTraits[i];
    CHECK_EQ(static_cast<size_t>(traits.kind), i + 1);
    CHECK(&wire::traits_of(traits.kind) == &traits);
    CHECK(names.insert(traits.name).second);
    const bool numbered = (traits.kind >= FrameKind::kOpen && traits.kind <= FrameKind::kGoodbye) ||
                          traits.kind == FrameKind::kStoreRun || traits.kind == FrameKind::kCut ||
                          traits.kind == FrameKind::kLoad || traits.kind == FrameKind::kShrink;
    CHECK_EQ(traits.sequenced, numbered);
    CHECK(numbered || !traits.waits);
  }
  CHECK_EQ(std::string(name_of(FrameKind::kPullDense)), "dense pull");
  for (const unsigned number : {0u, 34u, 0x7fffu}) {
    CHECK(!wire::known_frame_kind(number));
    const wire::FrameTraits& none = wire::traits_of(static_cast<FrameKind>(number));
    CHECK_EQ(std::string(none.name), "unknown");
    CHECK(!none.sequenced && !none.coded && !none.waits);
  }
}

TEST(wire_header_refuses_every_flipped_bit) {
  const auto good = wire::encode_header(sample_header());
  for (size_t bit = 0; bit < wire::kHeaderBytes * 8; ++bit) {
    auto bytes = good;
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1u << (bit % 8)));
    CHECK_EQ(error_code([&] { wire::decode_header(bytes.data(), UINT64_MAX); }),
             code(ErrorCode::kProtocol));
  }
}

TEST(wire_header_refuses_foreign_fields_with_a_right_checksum) {
  const uint32_t refused = code(ErrorCode::kProtocol);
  CHECK_EQ(code_after([](auto&) {}), 0u);
  CHECK_EQ(code_after([](auto& bytes) { bytes[0] = 'X'; }), refused);
  CHECK_EQ(code_after([](auto& bytes) { bytes[4] = 1; }), refused);
  CHECK_EQ(code_after([](auto& bytes) { bytes[6] = 0; }), refused);
  CHECK_EQ(code_after([](auto& bytes) { bytes[6] = 34; }), refused);
  CHECK_EQ(code_after([](auto& bytes) { bytes[24] = 0; }), refused);
  CHECK_EQ(code_after([](auto& bytes) { bytes[24] = 3; }), refused);
  CHECK_EQ(code_after([](auto&) {}, 10), refused);  // length 11 above the limit
}
