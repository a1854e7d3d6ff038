// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What stands between the plain payloads of a client and its links: which of them are coded.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "client/links/link.h"
#include "wire/codec/codec.h"
#include "wire/messages.h"

namespace cpudist::client {

struct SetState;
class Session;

// A payload as it goes to a server.
struct Outbound {
  Buffer payload;
  bool coded = false;
};

// Whether payloads to and from this server are coded: where values lose precision always, so that
// what is sent does not depend on where a server runs; else where bytes cross a network.
bool is_coded(const SetState& set, const Session& session, uint32_t server);

// Whether the rows of pushes are to stand in the order of their keys: so do coded ones. A norm is
// summed in that order on every link, so that its bits are the same.
bool orders_rows(const SetState& set, const Session& session, bool clips_norm);

// `values`: what the push was rounded to.
Outbound code_push(const SetState& set, const Session& session, uint32_t server, Buffer plain,
                   wire::WireDType values, const wire::Pool& pool);
// `asked`: whose keys it has; `exact`: the rows are wanted as the server has them.
Outbound code_pull_for(const SetState& set, const Session& session, uint32_t server, Buffer plain,
                       std::span<const wire::TableRef> asked, bool exact, const wire::Pool& pool);
Outbound pull_dense_from(const SetState& set, const Session& session, uint32_t server, bool exact);

// Makes the reply of a push or of a pull of dense values, with sections of `kind`, a plain one.
void decode_reply(const SetState& set, wire::SectionKind kind, Request* request,
                  const wire::Pool& pool);
// The rows of the reply of a pull; they live as long as it.
std::vector<std::span<const float>> rows_of_reply(const SetState& set,
                                                  std::span<const wire::TableRef> asked,
                                                  Request* request, const wire::Pool& pool,
                                                  wire::Version* version);

}  // namespace cpudist::client
