// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// What layouts say of open tables, admission and eviction, and what both ends refuse to say.

#include <algorithm>
#include <cmath>

#include "support/channel_fixture.h"
#include "support/check.h"
#include "support/messages_fixture.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

TEST(messages_open_tables_round_trip) {
  const wire::ParamSetLayout layout = sample_open_layout();
  const Buffer payload = encode(layout);
  const wire::ParamSetLayout back = wire::decode_layout(view_of(payload));
  for (size_t i = 0; i < layout.tables.size(); ++i) {
    CHECK_EQ(back.tables[i].open, layout.tables[i].open);
    CHECK_EQ(back.tables[i].unknown_zeros, layout.tables[i].unknown_zeros);
    CHECK_EQ(back.tables[i].max_rows, layout.tables[i].max_rows);
    CHECK(back.tables[i].overrides == layout.tables[i].overrides);
    CHECK(back.tables[i].admission == layout.tables[i].admission);
    CHECK(back.tables[i].eviction == layout.tables[i].eviction);
  }
  const Buffer again = encode(back);
  CHECK(std::ranges::equal(view_of(again), view_of(payload)));
}

TEST(messages_open_tables_are_checked_on_both_sides) {
  using wire::AdmissionKind;
  using wire::EvictionOrder;
  const auto refused = [](const auto& change) {
    wire::ParamSetLayout layout = sample_remote_layout();
    change(layout.tables[1]);
    return error_code([&] { encode(layout); }) == code(ErrorCode::kInvalidArgument);
  };
  const auto of_static = [&](const auto& change) {
    return refused([&](auto& t) {
      t = {t.name, t.rows, t.dim, t.group};
      change(t);
    });
  };
  CHECK(!of_static([](auto&) {}));
  CHECK(of_static([](auto& t) { t.open = true; }));
  CHECK(of_static([](auto& t) { t.unknown_zeros = true; }));
  CHECK(of_static([](auto& t) { t.max_rows = 1; }));
  CHECK(of_static([](auto& t) { t.admission = {AdmissionKind::kProbability, 0, 0.5, 0}; }));
  CHECK(of_static([](auto& t) { t.eviction = {.on = true, .unseen_steps = 1}; }));

  CHECK(!refused([](auto& t) { t.open = true; }));
  CHECK(!refused([](auto& t) { t.max_rows = 1; }));
  CHECK(refused([](auto& t) { t.max_rows = 1ull << 62; }));
  CHECK(refused([](auto& t) { t.overrides = {{~0ull, 0, 0}}; }));  // of a table that is not open

  const auto admission = [&](AdmissionKind kind, uint32_t count, double p, uint64_t sketch) {
    return refused([&](auto& t) { t.admission = {kind, count, p, sketch}; });
  };
  CHECK(!admission(AdmissionKind::kAll, 0, 1, 0));
  CHECK(admission(AdmissionKind::kAll, 1, 1, 0));
  CHECK(admission(AdmissionKind::kAll, 0, 0.5, 0));
  CHECK(admission(AdmissionKind::kAll, 0, 1, 64));
  CHECK(!admission(AdmissionKind::kCount, 1, 1, 64));
  CHECK(!admission(AdmissionKind::kCount, 15, 1, 1 << 20));
  CHECK(admission(AdmissionKind::kCount, 0, 1, 64));
  CHECK(admission(AdmissionKind::kCount, 16, 1, 64));
  CHECK(admission(AdmissionKind::kCount, 3, 0.5, 64));
  CHECK(admission(AdmissionKind::kCount, 3, 1, 0));
  CHECK(admission(AdmissionKind::kCount, 3, 1, 100));
  CHECK(admission(AdmissionKind::kCount, 3, 1, 1ull << 40));
  CHECK(!admission(AdmissionKind::kProbability, 0, 1, 0));
  CHECK(admission(AdmissionKind::kProbability, 0, 0, 0));
  CHECK(admission(AdmissionKind::kProbability, 0, 1.5, 0));
  CHECK(admission(AdmissionKind::kProbability, 0, NAN, 0));
  CHECK(admission(AdmissionKind::kProbability, 1, 0.5, 0));
  CHECK(admission(static_cast<AdmissionKind>(3), 0, 1, 0));

  const auto eviction = [&](const wire::Eviction& given) {
    return refused([&](auto& t) { t.eviction = given; });
  };
  CHECK(!eviction({.on = true, .unseen_ms = 1}));
  CHECK(!eviction({.on = true, .min_count = 1}));
  CHECK(!eviction({.on = true, .max_rows = 1, .order = EvictionOrder::kLfu}));
  CHECK(eviction({.on = true}));
  CHECK(eviction({.unseen_steps = 1}));
  CHECK(eviction({.on = true, .unseen_steps = 1, .order = EvictionOrder::kLfu}));
  CHECK(eviction({.on = true, .max_rows = 1, .order = static_cast<EvictionOrder>(2)}));
  CHECK(eviction({.on = true, .max_rows = 1ull << 62}));
  CHECK(!eviction({.on = true, .unseen_steps = (1ull << 31) - 1}));
  CHECK(eviction({.on = true, .unseen_steps = 1ull << 31}));
  CHECK(refused([](auto& t) {  // one bound refuses, the other evicts
    t.max_rows = 1;
    t.eviction = {.on = true, .max_rows = 1};
  }));
}

TEST(messages_of_deltas_take_remote_tables_whose_rows_stay) {
  using wire::AdmissionKind;
  const auto refused = [](const auto& change) {
    wire::ParamSetLayout layout = sample_remote_layout();
    layout.mode = wire::UpdateMode::kOnArrival;
    layout.exchanges_deltas = true;
    layout.average_decay = 0;
    change(layout.tables[1]);
    return error_code([&] { encode(layout); }) == code(ErrorCode::kInvalidArgument);
  };
  CHECK(!refused([](auto&) {}));
  CHECK(!refused([](auto& t) { t.open = true; }));
  CHECK(refused([](auto& t) { t.unknown_zeros = true; }));
  CHECK(refused([](auto& t) { t.max_rows = 9; }));
  CHECK(refused([](auto& t) { t.admission = {AdmissionKind::kProbability, 0, 0.5, 0}; }));
  CHECK(refused([](auto& t) { t.eviction = {.on = true, .unseen_steps = 1}; }));
}
