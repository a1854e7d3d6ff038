// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A trainer's part in the cut of a snapshot; docs/mechanisms.md, "The cut".
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/links/link.h"
#include "client/session.h"
#include "wire/cut.h"

namespace cpudist::client {

struct CutAnswer {
  uint64_t number = 0;
  bool taken = false;       // by all servers, at one moment
  std::string name;         // as the opener gave it
  std::string reason;       // why it was not taken
  bool taken_back = false;  // on all servers: the same number may be marked again
  // It was on some, and on others it was too late for that: nobody else can know it.
  bool torn = false;
  // By server: what was pushed before it, and who has marked; 0 where not all have.
  std::vector<uint64_t> digests;
};

// Throws kInvalidArgument for a number, name or base that cannot be one. `name`: empty for who did
// not ask for the cut. `base`: see wire::Cut.
wire::Cut make_cut(uint64_t number, const std::string& name, uint64_t wait_ms,
                   wire::CutStep step = wire::CutStep::kMark, uint64_t base = 0);

// Has servers answer this trainer's marker of that cut if it waits for others: it may be given
// again once replies to pushes ask for it. Any thread, while another one waits for the answer.
void take_marker_back(Session& session, uint32_t param_set, uint64_t number);

// What the servers' answers are together. Throws kProtocol.
CutAnswer join_answers(uint64_t number, std::span<const RequestPtr> replies);

}  // namespace cpudist::client
