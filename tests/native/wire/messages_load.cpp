// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// What a server is told to load, and what it does not believe.

#include <functional>
#include <string>

#include "support/channel_fixture.h"
#include "support/check.h"
#include "support/messages_fixture.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

TEST(messages_load_round_trip) {
  const wire::ParamSetLayout layout = sample_layout();
  const wire::Load meant = sample_load();
  const Buffer payload = encode(meant);
  const wire::Load found = wire::decode_load(view_of(payload), layout);
  CHECK_EQ(found.table, 1u);
  CHECK(found.kind == wire::LoadKind::kReplace);
  CHECK_EQ(found.version.round, 5u);
  CHECK_EQ(found.version.samples, 160u);
  CHECK_EQ(found.version.steps, 10u);
  CHECK_EQ(found.seed, 77u);
  CHECK_EQ(found.table_step, 4u);
  CHECK_EQ(found.snapshot, meant.snapshot);
  CHECK_EQ(found.file, meant.file);
  CHECK_EQ(found.file_bytes, meant.file_bytes);
  CHECK_EQ(found.row_begin, 3u);
  CHECK_EQ(found.row_end, 1003u);
  CHECK(found.offsets == meant.offsets);
  CHECK(found.checksums == meant.checksums);
}

TEST(messages_load_that_cannot_be_is_refused) {
  const wire::ParamSetLayout layout = sample_layout();
  const auto refused = [&](const std::function<void(wire::Load&)>& change) {
    wire::Load load = sample_load();
    change(load);
    const Buffer payload = encode(load);
    try {
      wire::decode_load(view_of(payload), layout);
    } catch (const Error& error) {
      CHECK_EQ(error.code(), ErrorCode::kProtocol);
      return true;
    }
    return false;
  };
  CHECK(!refused([](wire::Load&) {}));
  for (const char* name : {"", "..", "../x", "a/b", "/etc/passwd", "A", ".x", "a..b", "-a"}) {
    CHECK(refused([&](wire::Load& load) { load.snapshot = name; }));
    CHECK(refused([&](wire::Load& load) { load.file = name; }));
  }
  CHECK(refused([](wire::Load& load) { load.table = 3; }));
  CHECK(refused([](wire::Load& load) { load.row_begin = 1004; }));
  CHECK(refused([](wire::Load& load) { load.checksums.pop_back(); }));
  CHECK(refused([](wire::Load& load) { load.checksums.push_back(0); }));
  CHECK(refused([](wire::Load& load) { load.file_bytes = ~uint64_t{0}; }));
  CHECK(refused([](wire::Load& load) { load.row_end = ~uint64_t{0} / 2; }));
  CHECK(refused([](wire::Load& load) { load.row_end = 30000; }));
  for (size_t column = 0; column < wire::kLoadColumns; ++column) {
    CHECK(refused([&](wire::Load& load) { load.offsets[column] = 299999; }));
    CHECK(refused([&](wire::Load& load) { load.offsets[column] = ~uint64_t{0} - 7; }));
    // Without keys and weights there are no rows; all else may be missing.
    CHECK_EQ(refused([&](wire::Load& load) { load.offsets[column] = 0; }), column < 2);
  }
  // Of no rows nothing is believed or used.
  CHECK(!refused([](wire::Load& load) {
    load.row_end = load.row_begin;
    load.file = "";
  }));
}
