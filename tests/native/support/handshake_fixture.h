// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Who proves what to whom in tests of handshakes.

#pragma once

#include <memory>
#include <string>

#include "wire/handshake/handshake.h"

namespace cpudist::testing {

inline const std::string kSecret = "0123456789abcdef0123456789abcdef";
inline const std::string kOtherSecret = "0123456789abcdef0123456789abcdeF";

// Where the server of these tests listens.
inline const std::string kAddress = "tcp:10.0.0.1:4000";

inline wire::Identity a_trainer(uint16_t rank = 3, uint64_t run_id = 7) {
  return {run_id, 0, 1, wire::Role::kTrainer, rank};
}

inline wire::Identity a_server(uint16_t shard = 0, uint64_t run_id = 7) {
  return {run_id, 0, 0, wire::Role::kServer, shard};
}

inline std::shared_ptr<const wire::Credentials> with_key(
    const wire::Identity& own, const std::string& secret = kSecret,
    wire::Purpose purpose = wire::Purpose::kServers) {
  return wire::make_credentials(secret, own, purpose);
}

inline wire::Frame copy_of(const wire::Frame& frame) {
  return {frame.header, frame.payload.share()};
}

}  // namespace cpudist::testing
