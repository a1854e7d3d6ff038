// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Runs of rows as they travel.

#include <span>
#include <vector>

#include "support/channel_fixture.h"
#include "support/check.h"
#include "support/messages_fixture.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

template <typename T>
bool has_values(std::span<const T> found, const std::vector<T>& expected) {
  return std::vector<T>(found.begin(), found.end()) == expected;
}

}  // namespace

TEST(messages_run_round_trip) {
  const wire::ParamSetLayout layout = sample_layout();
  const Buffer payload = sample_run();
  const wire::RunView run = wire::decode_run(view_of(payload), layout);
  CHECK_EQ(run.ref.table, 0u);
  CHECK_EQ(run.ref.begin, 10u);
  CHECK_EQ(run.ref.end, 16u);
  CHECK_EQ(run.ref.rows, 2u);
  CHECK_EQ(run.ref.step, 4u);
  CHECK(!run.ref.alike);
  CHECK(has_values(run.weights, {0, 1, 2, 3, 4, 5}));
  CHECK(has_values(run.state, {0, 0.5f, 1, 1.5f, 2, 2.5f}));
  CHECK(has_values(run.counts, {1, 2}));
  const Buffer short_payload = sample_run_alike();
  const wire::RunView alike = wire::decode_run(view_of(short_payload), layout);
  CHECK(alike.ref.alike);
  CHECK_EQ(alike.ref.rows, 3u);
  CHECK(has_values(alike.weights, {0.5f, -1}));
  CHECK(alike.state.empty() && alike.counts.empty());
  const auto request = wire::decode_fetch_run(view_of(encode(wire::FetchRun{1, 5, 9})), layout);
  CHECK_EQ(request.begin, 5u);
  CHECK_EQ(request.end, 9u);
}

TEST(messages_runs_that_no_table_has_are_refused) {
  const wire::ParamSetLayout layout = sample_layout();
  const auto refused = [&](auto change) {
    wire::RunRef ref{.table = 0, .dim = 3, .begin = 10, .end = 16, .rows = 2};
    change(ref);
    const Buffer payload = std::move(wire::layout_run(ref, nullptr).payload);
    return error_code([&] { wire::decode_run(view_of(payload), layout); }) ==
           code(ErrorCode::kProtocol);
  };
  CHECK(!refused([](wire::RunRef&) {}));
  CHECK(refused([](wire::RunRef& ref) { ref.table = 3; }));
  CHECK(refused([](wire::RunRef& ref) { ref.dim = 2; }));
  CHECK(refused([](wire::RunRef& ref) { ref.end = 9; }));
  CHECK(refused([](wire::RunRef& ref) { ref.end = 101; }));
  CHECK(refused([](wire::RunRef& ref) { ref.rows = 7; }));
  // So many keys would keep a server busy that nobody sends values for.
  CHECK(refused([](wire::RunRef& ref) {
    ref = {.table = 1, .dim = 2, .end = wire::kRunKeysMax + 1, .alike = true};
  }));
  const auto fetch = [&](wire::FetchRun request) {
    return error_code([&] { wire::decode_fetch_run(view_of(encode(request)), layout); });
  };
  CHECK_EQ(fetch({2, 0, 8}), code(ErrorCode::kProtocol));
  CHECK_EQ(fetch({2, 5, 4}), code(ErrorCode::kProtocol));
  CHECK_EQ(fetch({3, 0, 1}), code(ErrorCode::kProtocol));
}
