// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/values/load.h"

#include <string>
#include <vector>

namespace cpudist::client {

void load(Shared& shared, const SetState& set, uint32_t server, const wire::Load& what) {
  if (server >= set.server_count) {
    throw Error(ErrorCode::kInvalidArgument, "load: server " + std::to_string(server) + " of " +
                                                 std::to_string(set.server_count));
  }
  const auto send = [&] {
    return std::vector<RequestPtr>{
        shared.session.send(server, wire::FrameKind::kLoad, set.id, encode(what))};
  };
  shared.run(send, [](std::span<const RequestPtr>) {});
}

}  // namespace cpudist::client
