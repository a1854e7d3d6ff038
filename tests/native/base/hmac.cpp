// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none

#include "base/hmac.h"

#include <string>
#include <string_view>

#include "support/check.h"

using namespace cpudist;  // NOLINT

namespace {

std::string hex_of(const Mac& mac) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : mac) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 0xf];
  }
  return text;
}

std::string mac_of_text(std::string_view secret, std::string_view text) {
  return hex_of(hmac_sha256(secret, {reinterpret_cast<const uint8_t*>(text.data()), text.size()}));
}

}  // namespace

// Test cases 2 and 6 of RFC 4231.
TEST(hmac_is_the_one_of_the_standard) {
  CHECK_EQ(mac_of_text("Jefe", "what do ya want for nothing?"),
           std::string("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"));
  CHECK_EQ(mac_of_text(std::string(131, '\xaa'),
                       "Test Using Larger Than Block-Size Key - Hash Key First"),
           std::string("60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"));
}

TEST(hmac_macs_are_equal_in_every_byte) {
  const Mac mac = hmac_sha256("Jefe", {});
  CHECK(equal_macs(mac, mac));
  for (size_t i = 0; i < mac.size(); ++i) {
    Mac other = mac;
    other[i] ^= 1;
    CHECK(!equal_macs(mac, other));
  }
}

TEST(hmac_nonces_are_new) {
  const Nonce first = make_nonce();
  CHECK(first != make_nonce());
  CHECK(first != Nonce{});
}
