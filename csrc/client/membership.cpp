// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/membership.h"

#include <string>

namespace cpudist::client {

uint64_t agreed_round(const Membership& membership, std::span<const RequestPtr> replies) {
  uint64_t agreed = 0;
  if (!membership.counts_rounds()) return agreed;
  for (size_t i = 0; i < replies.size(); ++i) {
    const uint64_t round = wire::decode_round_reply(replies[i]->reply.payload.bytes()).round;
    if (i > 0 && round != agreed) {
      throw Error(ErrorCode::kProtocol,
                  std::string(name_of(replies[i]->header.kind)) +
                      ": servers disagree about the round: " + std::to_string(agreed) + " and " +
                      std::to_string(round));
    }
    agreed = round;
  }
  return agreed;
}

}  // namespace cpudist::client
