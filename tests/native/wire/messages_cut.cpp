// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Markers, their answers, and what a server says of a snapshot.

#include <cstring>
#include <string>

#include "support/channel_fixture.h"
#include "support/check.h"
#include "support/messages_fixture.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

TEST(messages_cut_round_trip) {
  const Buffer marker = encode(wire::Cut{7, 250, wire::CutStep::kAbandon, "snap-7", 6});
  const wire::Cut cut = wire::decode_cut(view_of(marker));
  CHECK_EQ(cut.number, 7u);
  CHECK_EQ(cut.wait_ms, 250u);
  CHECK(cut.step == wire::CutStep::kAbandon);
  CHECK_EQ(cut.name, std::string("snap-7"));
  CHECK_EQ(cut.base, 6u);
  const Buffer answer = encode(wire::CutReply{7, true, 99, "snap-7", "because"});
  const wire::CutReply reply = wire::decode_cut_reply(view_of(answer));
  CHECK_EQ(reply.number, 7u);
  CHECK(reply.taken);
  CHECK_EQ(reply.digest, 99u);
  CHECK_EQ(reply.name, std::string("snap-7"));
  CHECK_EQ(reply.reason, std::string("because"));
  CHECK(!reply.taken_back);
  const Buffer back = encode(wire::CutReply{7, false, 0, "snap-7", "late", true});
  CHECK(wire::decode_cut_reply(view_of(back)).taken_back);
  const Buffer question = encode(wire::CutQuery{7, "token"});
  CHECK_EQ(wire::decode_cut_query(view_of(question)).number, 7u);
  CHECK_EQ(wire::decode_cut_query(view_of(question)).token, std::string("token"));
  CHECK(!wire::decode_cut_query(view_of(question)).take_back);
  CHECK(wire::decode_cut_query(view_of(encode(wire::CutQuery{7, {}, true}))).take_back);
}

TEST(messages_cut_status_round_trip) {
  const Buffer payload = encode(sample_cut_status());
  const wire::CutStatus found = wire::decode_cut_status(view_of(payload));
  const wire::CutStatus meant = sample_cut_status();
  CHECK(found.state == meant.state);
  CHECK_EQ(found.shard, meant.shard);
  CHECK_EQ(found.reason, meant.reason);
  CHECK_EQ(found.version.round, 12u);
  CHECK_EQ(found.version.samples, 300u);
  CHECK_EQ(found.version.steps, 41u);
  CHECK(found.table_steps == meant.table_steps);
  CHECK(found.block_steps == meant.block_steps);
  CHECK(found.members == meant.members);
  CHECK(found.present == meant.present);
  CHECK(found.lost == meant.lost);
  CHECK_EQ(found.files.size(), 2u);
  CHECK_EQ(found.files[0].name, meant.files[0].name);
  CHECK_EQ(found.files[0].table, 1u);
  CHECK_EQ(found.files[0].rows, 5u);
  CHECK_EQ(found.files[0].bytes, 300000u);
  CHECK(found.files[0].checksums == meant.files[0].checksums);
  CHECK_EQ(found.files[1].table, wire::kDenseFile);
  CHECK(found.files[1].checksums.empty());
  CHECK_EQ(found.base, 5u);
  CHECK(found.can_be_base);
}

TEST(messages_cut_refuses_what_cannot_be) {
  const uint32_t refused = code(ErrorCode::kProtocol);
  Buffer step = encode(wire::Cut{7, 250, {}, "a"});
  step.data()[16] = 3;
  CHECK_EQ(error_code([&] { wire::decode_cut(view_of(step)); }), refused);
  Buffer taken = encode(wire::CutReply{7, true, 0, "a", {}});
  taken.data()[8] = 2;
  CHECK_EQ(error_code([&] { wire::decode_cut_reply(view_of(taken)); }), refused);
  Buffer back = encode(wire::CutReply{7, true, 0, "a", {}});
  back.data()[12] = 2;
  CHECK_EQ(error_code([&] { wire::decode_cut_reply(view_of(back)); }), refused);
  Buffer question = encode(wire::CutQuery{7, {}});
  question.data()[8] = 2;
  CHECK_EQ(error_code([&] { wire::decode_cut_query(view_of(question)); }), refused);
  Buffer state = encode(sample_cut_status());
  state.data()[0] = 4;
  CHECK_EQ(error_code([&] { wire::decode_cut_status(view_of(state)); }), refused);
  wire::CutStatus status = sample_cut_status();
  status.files[0].checksums.push_back(9);  // one more than its bytes have
  const Buffer more = encode(status);
  CHECK_EQ(error_code([&] { wire::decode_cut_status(view_of(more)); }), refused);
  status.files[0].bytes += wire::kChecksumBytes;
  const Buffer right = encode(status);
  CHECK_EQ(error_code([&] { wire::decode_cut_status(view_of(right)); }), 0u);
  const std::string name(wire::kSnapshotNameBytesMax + 1, 'a');
  CHECK_EQ(error_code([&] { encode(wire::Cut{7, 250, {}, name}); }),
           code(ErrorCode::kInvalidArgument));
}

TEST(messages_cut_reasons_are_cut_and_not_lost) {
  const Buffer payload = encode(wire::CutReply{7, false, 0, "a", std::string(5000, 'x')});
  const std::string reason = wire::decode_cut_reply(view_of(payload)).reason;
  CHECK_EQ(reason.size(), wire::kCutReasonBytesMax);
  CHECK_EQ(reason.substr(reason.size() - 4), std::string(" ..."));
}

TEST(messages_names_of_snapshots_are_no_paths) {
  for (const char* name : {"snap-000000000012-beef", "a", "0", "s000-t001-0000.safetensors"}) {
    CHECK(wire::is_snapshot_name(name));
  }
  for (const char* name : {"", ".", "..", "a..b", "a/b", "/a", "-a", ".a", "A", "a b", "a\n"}) {
    CHECK(!wire::is_snapshot_name(name));
  }
  CHECK(wire::is_snapshot_name(std::string(wire::kSnapshotNameBytesMax, 'a')));
  CHECK(!wire::is_snapshot_name(std::string(wire::kSnapshotNameBytesMax + 1, 'a')));
  CHECK(!wire::is_snapshot_name(std::string("a\0b", 3)));
}
