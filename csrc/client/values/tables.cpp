// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/values/tables.h"

#include <memory>
#include <span>
#include <string>
#include <vector>

namespace cpudist::client {
namespace {

wire::TableQuery query_of(const SetState& set, uint32_t table) {
  if (table < set.layout.tables.size()) return {table};
  throw Error(ErrorCode::kInvalidArgument,
              "table " + std::to_string(table) + " of " + std::to_string(set.layout.tables.size()));
}

}  // namespace

wire::TableCounts table_counts(Shared& shared, const SetState& set, uint32_t table) {
  const wire::TableQuery query = query_of(set, table);
  const std::vector<RequestPtr> requests =
      shared.send_all(wire::FrameKind::kTableStats, set.id, [query] { return encode(query); });
  shared.session.wait(requests, Session::Caller::kBackground);
  wire::TableCounts sum;
  for (const RequestPtr& request : requests) {
    const wire::TableCounts counts = wire::decode_table_counts(request->reply.payload.bytes());
    sum.rows += counts.rows;
    sum.bytes += counts.bytes;
    sum.created += counts.created;
    sum.filtered += counts.filtered;
    sum.evicted += counts.evicted;
    sum.unknown_reads += counts.unknown_reads;
  }
  return sum;
}

uint64_t shrink(Shared& shared, const SetState& set, uint32_t table) {
  const wire::TableQuery query = query_of(set, table);
  // An interrupt may leave the request to the next call, which knows nothing of this one.
  const auto evicted = std::make_shared<uint64_t>(0);
  shared.run_all(
      wire::FrameKind::kShrink, set.id, [query] { return encode(query); },
      [evicted](std::span<const RequestPtr> replies) {
        for (const RequestPtr& reply : replies) {
          *evicted += wire::decode_shrunk(reply->reply.payload.bytes()).evicted;
        }
      });
  return *evicted;
}

}  // namespace cpudist::client
