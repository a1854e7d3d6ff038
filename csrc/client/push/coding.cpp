// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/push/coding.h"

#include <utility>

#include "client/session.h"
#include "client/state.h"

namespace cpudist::client {
namespace {

wire::Coding coding_of(const SetState& set, wire::WireDType values, bool exact) {
  return {values, exact ? wire::WireDType::kFloat32 : set.layout.pull_dtype};
}

}  // namespace

bool is_coded(const SetState& set, const Session& session, uint32_t server) {
  return is_lossy(set.layout) || session.over_network(server);
}

bool orders_rows(const SetState& set, const Session& session, bool clips_norm) {
  bool ordered = clips_norm;
  for (uint32_t s = 0; s < set.server_count; ++s) ordered = ordered || is_coded(set, session, s);
  return ordered;
}

Outbound code_push(const SetState& set, const Session& session, uint32_t server, Buffer plain,
                   wire::WireDType values, const wire::Pool& pool) {
  if (!is_coded(set, session, server)) return {std::move(plain), false};
  return {code_sections(wire::SectionKind::kPush, plain.bytes(), set.layout,
                        coding_of(set, values, false), pool),
          true};
}

Outbound code_pull_for(const SetState& set, const Session& session, uint32_t server, Buffer plain,
                       bool exact, const wire::Pool& pool) {
  if (!is_coded(set, session, server)) return {std::move(plain), false};
  const wire::Coding coding = coding_of(set, wire::WireDType::kFloat32, exact);
  return {code_pull(plain.bytes(), set.layout, coding, pool), true};
}

Outbound pull_dense_from(const SetState& set, const Session& session, uint32_t server, bool exact) {
  const uint64_t step = set.step_of_pull();
  if (!is_coded(set, session, server)) return {wire::encode_pull_dense(step), false};
  return {wire::encode_coded_pull_dense(coding_of(set, wire::WireDType::kFloat32, exact), step),
          true};
}

void decode_reply(const SetState& set, wire::SectionKind kind, Request* request,
                  const wire::Pool& pool) {
  if (!std::exchange(request->reply.header.coded, false)) return;
  wire::Decoded decoded = wire::decode_sections(kind, request->reply.payload.bytes(), set.layout,
                                                wire::allocate_from(pool));
  request->reply.payload = std::move(decoded.payload);
}

std::vector<std::span<const float>> rows_of_reply(std::span<const wire::TableRef> asked,
                                                  Request* request, const wire::Pool& pool,
                                                  wire::Version* version) {
  wire::Frame& reply = request->reply;
  if (!reply.header.coded) return wire::decode_rows(reply.payload.bytes(), asked, version);
  const auto plain = wire::plain_rows_in(reply.payload.bytes());
  if (!plain.empty()) return wire::decode_rows(plain, asked, version);
  reply.payload =
      wire::decode_coded_rows(reply.payload.bytes(), asked, wire::allocate_from(pool)).payload;
  reply.header.coded = false;
  return wire::decode_rows(reply.payload.bytes(), asked, version);
}

}  // namespace cpudist::client
