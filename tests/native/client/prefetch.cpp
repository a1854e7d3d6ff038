// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows of batches to come: what a push tells of them, what a server answers, and the trainer's
// marks.

#include <algorithm>
#include <cmath>
#include <vector>

#include "client/row_cache.h"
#include "support/messages_fixture.h"
#include "support/server_fixture.h"

namespace cpudist::testing {
namespace {

using client::TableCache;
using wire::HoldRefs;

// A push of one row of table 0 by a trainer that holds `held` as of `since` updates.
Buffer push_holding(const wire::ParamSetLayout& layout, uint64_t round, int64_t key,
                    const std::vector<int64_t>& held, uint64_t since, double clip_norm = 0.0) {
  wire::PushHeader header;
  header.round = round;
  header.clip_norm = clip_norm;
  header.configs = layout.configs;
  const wire::TableRef ref{0, 1, 4, 0, false, 0};
  wire::HoldRefs holds;
  holds.since = since;
  holds.tables = {wire::TableRef{0, held.size(), 4, 0, false, 0}};
  wire::FilledPush push = wire::layout_push(header, {}, std::span(&ref, 1), nullptr, &holds);
  push.keys[0][0] = key;
  std::fill_n(push.rows[0], 4, 1.0f);
  std::copy(held.begin(), held.end(), push.held[0]);
  return std::move(push.payload);
}

template <typename Call>
ErrorCode code_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  fail(__FILE__, __LINE__, "nothing was thrown");
}

std::vector<int64_t> keys_in(const wire::DenseView& dense) {
  if (dense.tables.empty()) return {};
  return {dense.tables[0].keys.begin(), dense.tables[0].keys.end()};
}

std::vector<int64_t> lookup(client::TableCache& cache, const std::vector<int64_t>& ids) {
  const auto found = cache.take_missing(std::span<const int64_t>(ids));
  return {found.begin(), found.end()};
}

}  // namespace

TEST(prefetch_reply_brings_held_rows_of_the_round_and_no_others) {
  World world(2);
  PushSpec plain;
  plain.tables[0] = {{5, 1.0f}};
  const auto first =
      world[0].ask(wire::FrameKind::kPush, push_holding(world.layout, 0, 7, {5, 6, 7}, 0));
  const auto second = world.push(1, plain);
  const wire::Frame reply = world[0].reply(first);
  const wire::DenseView dense = world.dense(reply);
  CHECK(keys_in(dense) == (std::vector<int64_t>{5, 7}));
  const auto row = world.row(5);
  CHECK_EQ(std::memcmp(dense.tables[0].rows.data(), row.data(), 16), 0);
  const wire::Frame other = world[1].reply(second);
  CHECK(world.dense(other).tables.empty());
}

TEST(prefetch_rows_of_earlier_rounds_come_only_to_who_has_not_seen_them) {
  World world(1);
  for (uint64_t round = 0; round < 3; ++round) {
    PushSpec spec;
    spec.round = round;
    spec.tables[0] = {{static_cast<int64_t>(round), 1.0f}};
    world[0].reply(world.push(0, spec));
  }
  const auto old =
      world[0].ask(wire::FrameKind::kPush, push_holding(world.layout, 3, 9, {0, 1, 2, 3}, 1));
  const wire::Frame behind = world[0].reply(old);
  CHECK(keys_in(world.dense(behind)) == (std::vector<int64_t>{1, 2}));
  const auto next =
      world[0].ask(wire::FrameKind::kPush, push_holding(world.layout, 4, 9, {0, 1, 2, 9}, 4));
  const wire::Frame newest = world[0].reply(next);
  CHECK(keys_in(world.dense(newest)) == (std::vector<int64_t>{9}));
}

TEST(prefetch_rows_come_with_the_answer_to_a_commit_early_or_late) {
  World world(2);
  const auto first =
      world[0].ask(wire::FrameKind::kPush, push_holding(world.layout, 0, 3, {3, 4}, 0, 1.0));
  const auto second =
      world[1].ask(wire::FrameKind::kPush, push_holding(world.layout, 0, 4, {4, 5}, 0, 1.0));
  const double norm =
      std::sqrt(wire::decode_push_norm(view(world[0].reply(first).payload)).squared_norms.at(0));
  world[1].reply(second);
  const auto early = world[0].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, {norm}}));
  const wire::Frame early_reply = world[0].reply(early);
  const auto late = world[1].ask(wire::FrameKind::kCommit, encode(wire::Commit{0, {norm}}));
  const wire::Frame late_reply = world[1].reply(late);
  CHECK(keys_in(world.dense(early_reply)) == (std::vector<int64_t>{3, 4}));
  CHECK(keys_in(world.dense(late_reply)) == (std::vector<int64_t>{4}));
}

TEST(prefetch_of_a_row_that_was_never_stored_is_refused) {
  World world(1);
  Buffer bad = push_holding(world.layout, 0, 3, {63, 64}, 0);
  CHECK_EQ(code_of([&] { wire::decode_push(view_of(bad), world.layout); }), ErrorCode::kProtocol);
}

TEST(prefetch_holds_round_trip) {
  const wire::ParamSetLayout layout = sample_layout();
  const Buffer payload = sample_holding_push(layout);
  const wire::PushView push = wire::decode_push(view_of(payload), layout);
  CHECK_EQ(push.holds.since, 11u);
  CHECK_EQ(push.holds.kept_from, 13u);
  CHECK(push.holds.used == (std::vector<uint64_t>{7, 9}));
  CHECK_EQ(push.holds.tables.size(), sample_tables().size());
  CHECK_EQ(push.holds.tables[0].table, sample_tables()[0].table);
  const auto held = push.holds.tables[0].keys;
  CHECK(std::equal(held.begin(), held.end(), sample_keys().begin(), sample_keys().end()));
}

TEST(prefetch_marks_tell_what_is_current_on_its_way_and_held) {
  std::vector<uint16_t> owners(cpudist::kernels::kBucketCount, 0);
  client::TableCache cache(wire::TableSpec{"words", 10, 1, 0}, 7, owners, 1);
  std::vector<float> weight(10, 0.0f);
  cache.bind(weight.data());
  const std::vector<int64_t> ids{1, 2, 2, 3};
  CHECK(lookup(cache, {1}) == (std::vector<int64_t>{1}));
  std::vector<int64_t> keys;
  std::vector<int64_t> pulled;
  cache.take_coming(std::span<const int64_t>(ids), false, &keys, &pulled);
  CHECK(keys == (std::vector<int64_t>{1, 2, 3}));
  CHECK(pulled == (std::vector<int64_t>{2, 3}));
  // A second batch does not ask again.
  std::vector<int64_t> again;
  std::vector<int64_t> again_pulled;
  cache.take_coming(std::span<const int64_t>(ids), false, &again, &again_pulled);
  CHECK(again_pulled.empty());
  std::vector<uint32_t> inverse(1);
  std::vector<int64_t> unique(1);
  const std::vector<int64_t> two{2};
  CHECK_EQ(code_of([&] { cache.take_pulled(two, unique.data(), inverse.data()); }),
           ErrorCode::kUnpulledRow);
  CHECK_EQ(cache.want(std::span<const int64_t>(two)), 1u);
  CHECK(cache.wants_any(pulled));
  const std::vector<float> rows{20.0f, 30.0f};
  cache.place(pulled, rows.data());
  CHECK(lookup(cache, {2}).empty());
  CHECK_EQ(cache.take_hits(), 1u);
  CHECK(!cache.all_current(keys));
  cache.keep(keys);
  cache.invalidate();
  cache.hold(keys);
  CHECK(lookup(cache, {1, 2, 3, 4}) == (std::vector<int64_t>{4}));
  CHECK_EQ(cache.take_hits(), 3u);
  CHECK_EQ(weight[2], 20.0f);
  CHECK_EQ(weight[3], 30.0f);
  cache.invalidate();
  cache.await(pulled);
  cache.drop(keys);
  CHECK(lookup(cache, {2, 3}) == (std::vector<int64_t>{2, 3}));
}

}  // namespace cpudist::testing
