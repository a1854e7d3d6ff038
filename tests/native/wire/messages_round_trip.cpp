// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Every message says the same after encoding and decoding; what cannot be said is refused by the
// sender.

#include <cmath>
#include <limits>

#include "support/channel_fixture.h"
#include "support/check.h"
#include "support/messages_fixture.h"
#include "wire/primitives.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

template <typename T>
bool same(std::span<const T> found, const std::vector<T>& expected) {
  return std::vector<T>(found.begin(), found.end()) == expected;
}

bool all_bytes(std::span<const uint8_t> bytes, size_t size, uint8_t value) {
  return same(bytes, std::vector<uint8_t>(size, value));
}

}  // namespace

TEST(messages_primitives_round_trip) {
  wire::Writer writer;
  writer.u32(1);
  writer.u32(2);
  writer.text("");
  writer.text("abcd");
  writer.text("abcde");
  const uint16_t numbers[] = {7, 8, 9};
  writer.bytes(numbers, sizeof(numbers));
  writer.u64(3);
  writer.f64(-0.5);
  const Buffer payload = writer.finish();
  CHECK_EQ(payload.size() % 8, 0u);
  wire::Reader reader(view_of(payload));
  CHECK_EQ(reader.u32(), 1u);
  CHECK_EQ(reader.u32(), 2u);
  CHECK_EQ(reader.text(0), std::string());
  CHECK_EQ(reader.text(4), std::string("abcd"));
  CHECK_EQ(error_code([&] { wire::Reader(reader).text(4); }), code(ErrorCode::kProtocol));
  CHECK_EQ(reader.text(5), std::string("abcde"));
  CHECK(same(reader.array<uint16_t>(3), {7, 8, 9}));
  CHECK_EQ(error_code([&] { reader.expect_end(); }), code(ErrorCode::kProtocol));
  CHECK_EQ(reader.u64(), 3u);
  CHECK_EQ(reader.f64(), -0.5);
  CHECK_EQ(reader.remaining(), 0u);
  reader.expect_end();
  CHECK_EQ(error_code([&] { reader.u32(); }), code(ErrorCode::kProtocol));
}

TEST(messages_arrays_do_not_overflow) {
  const Buffer payload(64);
  for (const uint64_t count : {9ull, 1ull << 61, (1ull << 61) + 1, ~0ull, ~0ull / 8}) {
    wire::Reader reader(view_of(payload));
    CHECK_EQ(error_code([&] { reader.array<int64_t>(count); }), code(ErrorCode::kProtocol));
  }
}

TEST(messages_control_round_trip) {
  const wire::Hello hello =
      wire::decode_hello(view_of(encode(wire::Hello{4, 2, 1, 77, "host-a pid 1", 5})));
  CHECK_EQ(hello.trainer_count, 4u);
  CHECK_EQ(hello.server_count, 2u);
  CHECK_EQ(hello.shard_id, 1u);
  CHECK_EQ(hello.last_sequence, 77u);
  CHECK_EQ(hello.carried_out_before, 5u);
  CHECK_EQ(hello.host, std::string("host-a pid 1"));
  const wire::ErrorReply error =
      wire::decode_error(view_of(encode(wire::ErrorReply{ErrorCode::kFenced, "gone"})));
  CHECK(error.code == ErrorCode::kFenced && error.message == "gone");
  const wire::ProbeReply probe =
      wire::decode_probe_reply(view_of(encode(wire::ProbeReply{true, {1, 2, 3}, 7})));
  CHECK(probe.known && probe.waiting_for == (std::vector<uint32_t>{1, 2, 3}));
  CHECK_EQ(probe.stored_bytes, 7u);
  CHECK(!wire::decode_probe_reply(view_of(encode(wire::ProbeReply{}))).known);
  CHECK_EQ(wire::decode_push_norm(view_of(encode(wire::PushNorm{3, {2.0}}))).squared_norms.at(0),
           2.0);
  CHECK(std::isnan(
      wire::decode_push_norm(view_of(encode(wire::PushNorm{3, {NAN}}))).squared_norms.at(0)));
  CHECK_EQ(wire::decode_commit(view_of(encode(wire::Commit{3, {2.5}}))).norms.at(0), 2.5);
  const wire::Join join =
      wire::decode_join(view_of(encode(wire::Join{wire::JoinStep::kRelease, 9})));
  CHECK(join.step == wire::JoinStep::kRelease && join.round == 9);
  CHECK_EQ(wire::decode_round_reply(view_of(encode(wire::RoundReply{9}))).round, 9u);
  const wire::BarrierReply barrier =
      wire::decode_barrier_reply(view_of(encode(wire::BarrierReply{{{0, 3}, {2, 5}}})));
  CHECK(barrier.rounds == (std::vector<std::pair<uint32_t, uint64_t>>{{0, 3}, {2, 5}}));
  CHECK_EQ(wire::decode_table_query(view_of(encode(wire::TableQuery{4}))).table, 4u);
  const wire::TableCounts counts =
      wire::decode_table_counts(view_of(encode(wire::TableCounts{1, 2, 3, 4, 5, 6})));
  CHECK(counts.rows == 1 && counts.bytes == 2 && counts.created == 3);
  CHECK(counts.filtered == 4 && counts.evicted == 5 && counts.unknown_reads == 6);
  CHECK_EQ(wire::decode_shrunk(view_of(encode(wire::Shrunk{9}))).evicted, 9u);
  const Buffer asked = encode(wire::FetchRequest{true, 3, 1, sample_keys()});
  const wire::FetchRequest fetch = wire::decode_fetch(view_of(asked));
  CHECK(fetch.blocks && fetch.parameter == 3 && fetch.table == 1);
  CHECK(same(fetch.keys, sample_keys()));
}

TEST(messages_long_errors_are_cut_long_hosts_refused) {
  const std::string text(10000, 'x');
  const Buffer payload = encode(wire::ErrorReply{ErrorCode::kPeerLost, text});
  CHECK(payload.size() <= transport::ChannelLimits{}.pre_hello_limit_bytes);
  CHECK(wire::decode_error(view_of(payload)).message.ends_with("x ..."));
  CHECK_EQ(error_code([&] { encode(wire::Hello{1, 1, 0, 0, text}); }),
           code(ErrorCode::kInvalidArgument));
}

TEST(messages_layout_round_trip) {
  wire::ParamSetLayout layout = sample_layout();
  layout.trainer_groups = {0, 1, 0};
  const Buffer payload = encode(layout);
  const wire::ParamSetLayout back = wire::decode_layout(view_of(payload));
  CHECK(back.configs == layout.configs);
  CHECK(back.trainer_groups == layout.trainer_groups);
  CHECK(back.compensation.kind == wire::Compensation::kNone);
  CHECK_EQ(back.tables.size(), 3u);
  CHECK_EQ(back.tables[1].name, std::string("items"));
  CHECK_EQ(back.tables[1].rows, 1ull << 40);
  CHECK_EQ(back.blocks.size(), 4u);
  CHECK_EQ(back.blocks[2].offset, 6u);
  CHECK_EQ(back.blocks[2].row_width, 3u);
  CHECK(back.blocks[2].dtype == wire::DType::kFloat64);
  const Buffer again = encode(back);
  CHECK(same(view_of(again), {payload.data(), payload.data() + payload.size()}));

  wire::ParamSetLayout deltas = sample_layout();
  deltas.mode = wire::UpdateMode::kOnArrival;
  deltas.exchanges_deltas = true;
  const wire::ParamSetLayout same = wire::decode_layout(view_of(encode(deltas)));
  CHECK(same.mode == wire::UpdateMode::kOnArrival && same.exchanges_deltas);
}

TEST(messages_remote_tables_round_trip) {
  const wire::ParamSetLayout layout = sample_remote_layout();
  const Buffer payload = encode(layout);
  const wire::ParamSetLayout back = wire::decode_layout(view_of(payload));
  CHECK(!back.tables[0].remote && back.tables[1].remote && back.tables[2].remote);
  for (size_t i = 0; i < layout.tables.size(); ++i) {
    CHECK_EQ(back.tables[i].seed, layout.tables[i].seed);
    CHECK(back.tables[i].initial == layout.tables[i].initial);
    CHECK(back.tables[i].overrides == layout.tables[i].overrides);
  }
  const Buffer again = encode(back);
  CHECK(same(view_of(again), {payload.data(), payload.data() + payload.size()}));
}

TEST(messages_averages_round_trip_and_are_checked) {
  wire::ParamSetLayout layout = sample_layout();
  layout.average_decay = 0.999;
  CHECK_EQ(wire::decode_layout(view_of(encode(layout))).average_decay, 0.999);
  for (const double decay : {-0.1, 1.0, 2.0, std::numeric_limits<double>::quiet_NaN()}) {
    layout.average_decay = decay;
    CHECK_THROWS(encode(layout), Error);
  }
  layout.average_decay = 0.5;
  layout.mode = wire::UpdateMode::kOnArrival;
  layout.exchanges_deltas = true;
  CHECK_THROWS(encode(layout), Error);
}

TEST(messages_remote_tables_are_checked_on_both_sides) {
  using Op = kernels::InitialOp;
  const auto refused = [](const auto& change) {
    wire::ParamSetLayout layout = sample_remote_layout();
    change(layout, layout.tables[1]);
    return error_code([&] { encode(layout); }) == code(ErrorCode::kInvalidArgument);
  };
  CHECK(!refused([](auto&, auto&) {}));
  CHECK(!refused([](auto&, auto& t) { t.rows = (1ull << 62) - 1; }));
  CHECK(refused([](auto&, auto& t) { t.rows = 1ull << 62; }));
  CHECK(refused([](auto&, auto& t) { t.remote = false; }));
  CHECK(!refused([](auto&, auto& t) { t = {t.name, t.rows, t.dim, t.group}; }));
  CHECK(refused([](auto&, auto& t) { t = {t.name, t.rows, t.dim, t.group, false, 1}; }));
  CHECK(refused([](auto&, auto& t) { t.initial[0] = {Op::kMul, 2, 0}; }));
  CHECK(refused([](auto&, auto& t) { t.initial.resize(9, {Op::kFill, 0, 0}); }));
  CHECK(refused([](auto&, auto& t) { t.overrides.resize(17, {0, 1, 0}); }));
  CHECK(refused([](auto&, auto& t) { t.overrides[0] = {0, t.rows + 1, 0}; }));
  // Of trainers that step rows by themselves, which servers must neither refuse nor evict.
  CHECK(!refused([](auto& l, auto&) {
    l.average_decay = 0;
    l.exchanges_deltas = true;
  }));
  CHECK(refused([](auto& l, auto& t) {
    l.average_decay = 0;
    l.exchanges_deltas = true;
    t.max_rows = 9;
  }));
}

TEST(messages_layout_limits_hold_on_both_sides) {
  const auto refused = [](const auto& change) {
    wire::ParamSetLayout layout = sample_layout();
    change(layout);
    return error_code([&] { encode(layout); }) == code(ErrorCode::kInvalidArgument);
  };
  CHECK(refused([](auto& l) { l.tables[0].dim = 0; }));
  CHECK(refused([](auto& l) { l.tables[0].dim = 65537; }));
  CHECK(refused([](auto& l) { l.tables[0].rows = 1ull << 62; }));
  CHECK(refused([](auto& l) { l.tables[0].group = 2; }));
  CHECK(refused([](auto& l) { l.tables[0].name = std::string(4097, 'n'); }));
  CHECK(refused([](auto& l) { l.blocks[0].elements = 1ull << 40; }));
  CHECK(refused([](auto& l) { l.blocks[0].offset = 1ull << 40; }));
  CHECK(refused([](auto& l) { l.blocks[0].dtype = static_cast<wire::DType>(3); }));
  CHECK(refused([](auto& l) { l.blocks[0].row_width = 0; }));
  CHECK(refused([](auto& l) { l.blocks[1].row_width = 4; }));
  CHECK(refused([](auto& l) { l.blocks[0].group = 2; }));
  CHECK(refused([](auto& l) { l.configs[0].lr = NAN; }));
  CHECK(refused([](auto& l) { l.max_staleness = 3; }));  // of rounds
  const auto exchanging = [&](auto&& change) {
    return !refused([&](auto& l) {
      l.exchanges_deltas = true;
      change(l);
    });
  };
  CHECK(exchanging([](auto&) {}));
  CHECK(exchanging([](auto& l) { l.mode = wire::UpdateMode::kOnArrival; }));
  CHECK(!exchanging([](auto& l) {
    l.mode = wire::UpdateMode::kOnArrival;
    l.max_staleness = 3;
  }));
  CHECK(!exchanging([](auto& l) { l.trainer_groups = {0, 1}; }));
  CHECK(!exchanging([](auto& l) {
    l.mode = wire::UpdateMode::kOnArrival;
    l.compensation = {wire::Compensation::kConstant, 0.5, 0.0, 0.0};
  }));
  CHECK(!refused([](auto&) {}));
  const auto compensated = [&](wire::UpdateMode mode, wire::DelayCompensation compensation) {
    return !refused([&](auto& l) {
      l.mode = mode;
      l.compensation = compensation;
    });
  };
  constexpr auto kArrival = wire::UpdateMode::kOnArrival;
  CHECK(compensated(kArrival, {wire::Compensation::kConstant, 0.5, 0, 0}));
  CHECK(compensated(kArrival, {wire::Compensation::kAdaptive, 2, 0, 1e-7}));
  CHECK(!compensated(wire::UpdateMode::kRounds, {wire::Compensation::kConstant, 0.5, 0, 0}));
  CHECK(!compensated(kArrival, {wire::Compensation::kNone, 0.5, 0, 0}));
  CHECK(!compensated(kArrival, {wire::Compensation::kConstant, -0.5, 0, 0}));
  CHECK(!compensated(kArrival, {wire::Compensation::kConstant, INFINITY, 0, 0}));
  CHECK(!compensated(kArrival, {wire::Compensation::kConstant, 0.5, 0.9, 0}));
  CHECK(!compensated(kArrival, {wire::Compensation::kAdaptive, 2, 1, 1e-7}));
  CHECK(!compensated(kArrival, {wire::Compensation::kAdaptive, 2, NAN, 1e-7}));
  CHECK(!compensated(kArrival, {wire::Compensation::kAdaptive, 2, 0.9, 0}));
  CHECK(!compensated(kArrival, {static_cast<wire::Compensation>(3), 0, 0, 0}));
  Buffer payload = encode(sample_layout());
  payload.data()[56] = 200;  // the kind of the first configuration
  CHECK_EQ(error_code([&] { wire::decode_layout(view_of(payload)); }), code(ErrorCode::kProtocol));
}

TEST(messages_push_round_trip) {
  const wire::ParamSetLayout layout = sample_layout();
  const Buffer payload = sample_push(layout);
  const wire::PushView push = wire::decode_push(view_of(payload), layout);
  CHECK_EQ(push.header.round, 17u);
  CHECK_EQ(push.header.step, 5u);
  CHECK_EQ(push.header.weight, 2.5);
  CHECK_EQ(push.header.samples, 1000u);
  CHECK_EQ(push.header.steps, 7u);
  CHECK_EQ(push.header.clip_value, 0.5);
  CHECK_EQ(push.header.clip_norm, 1.5);
  CHECK(same(push.header.configs, layout.configs));
  CHECK_EQ(push.blocks.size(), 3u);
  CHECK_EQ(push.blocks[1].block, 2u);
  CHECK(all_bytes(push.blocks[0].values, 20, 0x11));
  CHECK(all_bytes(push.blocks[1].values, 24, 0x22));
  CHECK_EQ(push.tables.size(), 3u);
  CHECK(same(push.tables[0].keys, sample_keys()));
  CHECK_EQ(push.tables[0].rows.size(), 9u);
  CHECK_EQ(push.tables[1].rows[5], 105.0f);
  CHECK(push.tables[2].keys.empty() && push.tables[2].rows.empty());
}

TEST(messages_rows_and_dense_round_trip) {
  const wire::ParamSetLayout layout = sample_layout();
  const Buffer dense = sample_dense();
  const wire::DenseView view = wire::decode_dense(view_of(dense), layout);
  CHECK_EQ(view.version.round, 18u);
  CHECK_EQ(view.cut_wanted, 12u);
  CHECK(all_bytes(view.blocks[1].values, 24, 0x77));
  const Buffer pull = sample_pull();
  uint64_t step = 0;
  const auto tables = wire::decode_pull(view_of(pull), layout, &step);
  CHECK_EQ(step, 21u);
  const Buffer wanted = wire::encode_pull_dense(22);
  CHECK_EQ(wire::decode_pull_dense(view_of(wanted)), 22u);
  CHECK_EQ(wire::decode_pull_dense({}), 0u);
  CHECK_EQ(error_code([&] { wire::decode_pull_dense(view_of(pull)); }), code(ErrorCode::kProtocol));
  const auto half = view_of(wanted).first(4);
  CHECK_EQ(error_code([&] { wire::decode_pull_dense(half); }), code(ErrorCode::kProtocol));
  CHECK_EQ(tables.size(), 3u);
  CHECK_EQ(tables[1].table, 1u);
  CHECK(same(tables[1].keys, sample_keys()));
  const Buffer rows = sample_rows();
  wire::Version version;
  const auto values = wire::decode_rows(view_of(rows), sample_tables(), &version);
  CHECK_EQ(version.round, 19u);
  CHECK_EQ(values[0].size(), 9u);
  CHECK_EQ(values[1][4], 104.0f);
}

TEST(messages_changes_round_trip) {
  const wire::ParamSetLayout layout = sample_layout();
  const Buffer payload = sample_changes();
  const wire::ChangesView changes = wire::decode_changes(view_of(payload), layout);
  CHECK_EQ(changes.header.version.round, 20u);
  CHECK_EQ(changes.header.version.samples, 300u);
  CHECK_EQ(changes.header.version.steps, 41u);
  CHECK_EQ(changes.header.cut_wanted, 12u);
  CHECK_EQ(changes.header.members, 3u);
  CHECK(changes.header.more);
  CHECK_EQ(changes.blocks.size(), 3u);
  CHECK(all_bytes(changes.blocks[1].values, 24, 0x22));
  CHECK_EQ(changes.tables.size(), 3u);
  CHECK(same(changes.tables[1].keys, sample_keys()));
  CHECK_EQ(changes.tables[1].rows[5], 105.0f);
  CHECK(changes.tables[2].keys.empty());
}

TEST(messages_store_round_trip) {
  const wire::ParamSetLayout layout = sample_layout();
  const Buffer payload = sample_store();
  const wire::StoreView store = wire::decode_store(view_of(payload), layout);
  CHECK_EQ(store.tables.size(), 3u);
  CHECK(same(store.tables[0].keys, sample_keys()));
  CHECK_EQ(store.tables[0].step, 4u);
  CHECK_EQ(store.tables[0].state[8], 4.0f);
  CHECK(same(store.tables[0].counts, {1, 2, 3}));
  CHECK(store.tables[1].state.empty() && store.tables[1].counts.empty());
  CHECK_EQ(store.tables[1].weights[5], 105.0f);
  CHECK_EQ(store.blocks.size(), 3u);
  CHECK_EQ(store.blocks[0].step, 1u);
  CHECK(all_bytes(store.blocks[0].weights, 20, 0x33));
  CHECK(all_bytes(store.blocks[0].state, 20, 0x44));
  CHECK(store.blocks[1].state.empty());
}

TEST(messages_senders_must_sort_their_ids) {
  auto blocks = sample_blocks();
  std::swap(blocks[0], blocks[1]);
  auto tables = sample_tables();
  tables[1].table = 0;
  const uint32_t refused = code(ErrorCode::kInvalidArgument);
  CHECK_EQ(error_code([&] { wire::layout_dense(0, blocks, nullptr); }), refused);
  CHECK_EQ(error_code([&] { wire::layout_pull(tables, nullptr); }), refused);
  CHECK_EQ(error_code([&] { wire::layout_push({}, blocks, {}, nullptr); }), refused);
  CHECK_EQ(error_code([&] { wire::layout_store({}, tables, nullptr); }), refused);
}

TEST(messages_too_long_for_a_frame_are_refused_before_memory_is_taken) {
  const uint32_t refused = code(ErrorCode::kInvalidArgument);
  const std::vector<wire::BlockRef> blocks = {{0, wire::kPayloadLimitBytes, 0, 0}};
  CHECK_EQ(error_code([&] { wire::layout_push({}, blocks, {}, nullptr); }), refused);
  CHECK_EQ(error_code([&] { wire::layout_dense(0, blocks, nullptr); }), refused);
  CHECK_EQ(error_code([&] { wire::layout_store(blocks, {}, nullptr); }), refused);
}

TEST(messages_buckets_are_dealt_in_turn) {
  CHECK_EQ(wire::owner_of_bucket(7, 3), 0u);
  CHECK_EQ(wire::owner_of_bucket(4095, 3), 2u);
  for (const uint32_t servers : {1u, 3u, 20u}) {
    std::vector<int> owned(servers);
    for (uint32_t bucket = 0; bucket < 4096; ++bucket) {
      const uint32_t owner = wire::owner_of_bucket(bucket, servers);
      ++owned.at(owner);
      CHECK(bucket == 0 || owner >= wire::owner_of_bucket(bucket - 1, servers));
    }
    const auto [least, most] = std::minmax_element(owned.begin(), owned.end());
    CHECK(*most - *least <= 1);
  }
  CHECK_EQ(error_code([] { wire::owner_of_bucket(7, 0); }), code(ErrorCode::kInvalidArgument));
}
