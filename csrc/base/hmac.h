// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What proves that somebody knows a secret: HMAC-SHA256 of the system's libcrypto, which is opened
// when it is first asked for, random bytes of the kernel's, and a comparison whose time says
// nothing. No hash of our own, and nothing to install where no secret is set.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace cpudist {

inline constexpr size_t kMacBytes = 32;
inline constexpr size_t kNonceBytes = 32;
using Mac = std::array<uint8_t, kMacBytes>;
using Nonce = std::array<uint8_t, kNonceBytes>;

// Any thread. All but make_nonce throw Error(kAuthentication), naming the package, where there is
// no libcrypto.
void open_libcrypto();
Mac hmac_sha256(std::string_view secret, std::span<const uint8_t> data);
bool equal_macs(const Mac& a, const Mac& b);
// Bytes that nobody can foretell.
Nonce make_nonce();

}  // namespace cpudist
