// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// What every message looks like on the wire, to the byte: peers of one protocol version read each
// other whatever the code that writes them has become. A change here needs another version.

#include <string>
#include <vector>

#include "base/crc32c.h"
#include "support/check.h"
#include "support/messages_fixture.h"
#include "wire/frame.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

struct Golden {
  const char* name;
  size_t size_bytes;
  uint32_t crc;
  const char* hex;  // of short ones
};

// clang-format off
const std::vector<Golden> kGolden = {
    {"hello", 48, 0x626e32c3,
     "040000000200000001000000000000004d000000000000000500000000000000"
     "0c000000686f73742d61207069642031"},
    {"error", 16, 0xc5fbd595, "080000000000000004000000676f6e65"},
    {"probe", 32, 0x3695f982, "0100000003000000070000000000000001000000020000000300000000000000"},
    {"layout", 928, 0x25afbf5f, ""},
    {"layout with groups", 944, 0xb9aa6c55, ""},
    {"layout with a remote table", 1144, 0xba81b1e1, ""},
    {"layout with an open table", 1120, 0xce65242e, ""},
    {"norm", 16, 0x10f3e7a5, "03000000000000000000000000000040"},
    {"norms", 32, 0xa086b534,
     "03000000000000000000000000000040000000000000e03f000000000000f07f"},
    {"commits", 32, 0xa086b534,
     "03000000000000000000000000000040000000000000e03f000000000000f07f"},
    {"commit", 16, 0x10f3e7a5, "03000000000000000000000000000040"},
    {"join", 16, 0xbb7beee9, "01000000000000000900000000000000"},
    {"round", 24, 0xfe979725, "090000000000000000000000000000000000000000000000"},
    {"barrier", 40, 0xa5da485e,
     "02000000000000000000000000000000030000000000000002000000000000000500000000000000"},
    {"fetch", 48, 0xca6e4f93,
     "010000000100000001000000000000000300000000000000630000000000000000000000000000002a000000"
     "00000000"},
    {"push", 552, 0x92882671, ""},
    {"push with holds", 432, 0x287200ba, ""},
    {"push behind parts", 344, 0x1f9c1c23, ""},
    {"part", 112, 0x7b9128cc, ""},
    {"dense with rows", 200, 0x0cd210a6, ""},
    {"dense", 136, 0x57886423, ""},
    {"changes", 304, 0x3e2c304d, ""},
    {"pull", 112, 0x047839a5, ""},
    {"rows", 80, 0x37bc2354,
     "13000000000000000000000000000000000000000000803f0000004000004040000080400000a0400000c040"
     "0000e04000000041000000000000c8420000ca420000cc420000ce420000d0420000d242"},
    {"store", 440, 0x870e1a76, ""},
    {"run", 112, 0xbe07db63, ""},
    {"run of rows that are alike", 64, 0x9c2c8aa5,
     "0100000002000000050000000000000000000040000000000300000000000000000000000000000001000000"
     "0000000000000000000000000000003f000080bf"},
    {"fetch of a run", 24, 0x01bbf688,
     "010000000000000005000000000000000900000000000000"},
    {"cut", 48, 0x68e89bca,
     "0c00000000000000b80b00000000000002000000000000000b0000000000000007000000736e61702d313200"
     "00000000"},
    {"reply to a cut", 48, 0x3e3dfaea,
     "0c000000000000000100000001000000220000000000000007000000736e61702d3132000000000004000000"
     "6c617465"},
    {"query of a cut", 32, 0x56f24b22,
     "0000000000000000010000000000000007000000746f6b656e2d370000000000"},
    {"load", 200, 0xc87e1fb3, ""},
    {"query of a table", 8, 0x576c35e3, "0300000000000000"},
    {"counts of a table", 48, 0xa9a834ab,
     "0100000000000000020000000000000003000000000000000400000000000000"
     "05000000000000000600000000000000"},
    {"shrunk", 8, 0x7671b78e, "0700000000000000"},
    {"handshake", 80, 0x39259fcd,
     "02000000020000001111111111111111111111111111111111111111111111111111111111111111"
     "2222222222222222222222222222222222222222222222222222222222222222"
     "0000000000000000"},
    {"status of a cut", 312, 0x478961f0, ""},
};
// clang-format on

std::string hex_of(const Buffer& payload) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : view_of(payload)) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 0xf];
  }
  return text;
}

}  // namespace

TEST(messages_have_the_bytes_of_their_protocol_version) {
  CHECK_EQ(wire::kProtocolVersion, 10);
  const std::vector<Sample> samples = all_samples();
  CHECK_EQ(samples.size(), kGolden.size());
  for (size_t i = 0; i < samples.size(); ++i) {
    const Golden& expected = kGolden[i];
    const Buffer& found = samples[i].payload;
    CHECK_EQ(samples[i].name, std::string(expected.name));
    CHECK_EQ(found.size(), expected.size_bytes);
    if (expected.hex[0] != '\0') CHECK_EQ(hex_of(found), std::string(expected.hex));
    CHECK_EQ(crc32c(found.data(), found.size()), expected.crc);
  }
  CHECK_EQ(hex_of(wire::encode_pull_dense(22)), std::string("1600000000000000"));
  CHECK_EQ(hex_of(encode(wire::ProbeReply{})), std::string(32, '0'));
  CHECK_EQ(hex_of(encode(wire::RoundReply{9, true})),
           std::string("090000000000000001000000000000000000000000000000"));
  CHECK_EQ(hex_of(encode(wire::RoundReply{9, true, true})),
           std::string("090000000000000001000000000000000100000000000000"));
}
