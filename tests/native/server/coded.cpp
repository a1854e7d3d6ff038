// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A server that is sent coded frames: what they do, and how they are answered.

#include "support/server_fixture.h"
#include "wire/codec/codec.h"
#include "wire/codec/values.h"

namespace cpudist::testing {
namespace {

Buffer coded_push(const World& world, const PushSpec& spec, const wire::Coding& coding) {
  return code_sections(wire::SectionKind::kPush, view(make_push(world.layout, spec)), world.layout,
                       coding, nullptr);
}

// Sends a coded frame; returns its request id.
uint64_t send_coded(Trainer& trainer, wire::FrameKind kind, Buffer payload, uint64_t sequence) {
  wire::FrameHeader header = trainer.header(kind, 0, trainer.next_request(), sequence);
  header.coded = true;
  trainer.deliver(header, std::move(payload));
  return header.request_id;
}

PushSpec some_gradients() {
  PushSpec spec;
  spec.blocks[0] = {1, 0.5, 0.25, 0.125};
  spec.blocks[1] = {0.1, 0.2, 0.3};
  spec.tables[0] = {{40, 0.5f}, {3, 1.0f}};
  return spec;
}

}  // namespace

TEST(server_takes_coded_pushes_beside_plain_ones) {
  World coded(2);
  World plain(2);
  const uint64_t first =
      send_coded(coded[0], wire::FrameKind::kPush, coded_push(coded, some_gradients(), {}),
                 coded[0].sequence() + 1);
  const uint64_t second = coded.push(1, some_gradients());
  plain.push(0, some_gradients());
  const uint64_t other = plain.push(1, some_gradients());
  // The answer has the form of the push.
  const wire::Frame answer = coded[0].reply(first);
  CHECK(answer.header.coded);
  const wire::Decoded decoded = wire::decode_sections(
      wire::SectionKind::kDense, view(answer.payload), coded.layout, wire::allocate_from(nullptr));
  const wire::Frame uncoded = coded[1].reply(second);
  CHECK(!uncoded.header.coded);
  CHECK_EQ(decoded.payload.size(), uncoded.payload.size());
  CHECK_EQ(std::memcmp(decoded.payload.data(), uncoded.payload.data(), uncoded.payload.size()), 0);
  const wire::Frame expected = plain[1].reply(other);
  CHECK_EQ(std::memcmp(expected.payload.data(), uncoded.payload.data(), uncoded.payload.size()), 0);
  CHECK(coded.row(40) == plain.row(40));
  CHECK(coded.row(3) == plain.row(3));
  CHECK_EQ(coded.server.stats().pending_bytes, 0);
  // The same number again: the recorded answer, coded as it was.
  const uint64_t again =
      send_coded(coded[0], wire::FrameKind::kPush, coded_push(coded, some_gradients(), {}),
                 coded[0].sequence() + 1);
  CHECK(coded[0].reply(again).header.coded);
  CHECK_EQ(coded.server.stats().duplicates, 1);
}

TEST(server_codes_an_answer_as_the_plain_one_would_be) {
  for (const wire::WireDType dtype :
       {wire::WireDType::kFloat32, wire::WireDType::kBFloat16, wire::WireDType::kFloat16}) {
    World world(2);
    const wire::Coding coding{wire::WireDType::kInt8, dtype};
    const uint64_t first =
        send_coded(world[0], wire::FrameKind::kPush, coded_push(world, some_gradients(), coding),
                   world[0].sequence() + 1);
    const uint64_t second = world.push(1, some_gradients());
    const wire::Frame plain = world[1].reply(second);
    const Buffer meant = code_sections(wire::SectionKind::kDense, view(plain.payload), world.layout,
                                       {dtype, dtype}, nullptr);
    const wire::Frame found = world[0].reply(first);
    CHECK(found.header.coded);
    CHECK_EQ(found.payload.size(), meant.size());
    CHECK_EQ(std::memcmp(found.payload.data(), meant.data(), meant.size()), 0);
  }
}

TEST(server_answers_coded_pulls_in_the_dtype_asked_for) {
  World world(1);
  const std::vector<wire::TableRef> refs = {{0, 3, 4, 0, false, 0}};
  wire::FilledKeys pull = wire::layout_pull(refs, nullptr);
  std::copy_n(std::vector<int64_t>{2, 33, 63}.begin(), 3, pull.keys[0]);
  for (const wire::WireDType dtype :
       {wire::WireDType::kFloat32, wire::WireDType::kBFloat16, wire::WireDType::kFloat16}) {
    const wire::Coding coding{wire::WireDType::kFloat32, dtype};
    const uint64_t id = send_coded(world[0], wire::FrameKind::kPullRows,
                                   code_pull(view(pull.payload), world.layout, coding, nullptr), 0);
    const wire::Frame answer = world[0].reply(id);
    CHECK(answer.header.coded);
    const wire::Decoded decoded =
        wire::decode_coded_rows(view(answer.payload), refs, wire::allocate_from(nullptr));
    CHECK(decoded.coding.values == dtype);
    wire::Version version;
    const auto rows = wire::decode_rows(view(decoded.payload), refs, &version);
    std::vector<float> expected = world.row(33);
    round_rows(dtype, expected.data(), 1, 4);
    CHECK(std::equal(expected.begin(), expected.end(), rows[0].begin() + 4));

    const uint64_t dense = send_coded(world[0], wire::FrameKind::kPullDense,
                                      wire::encode_coded_pull_dense(coding, 0), 0);
    const wire::Decoded values =
        wire::decode_sections(wire::SectionKind::kDense, view(world[0].reply(dense).payload),
                              world.layout, wire::allocate_from(nullptr));
    const wire::DenseView found = wire::decode_dense(view(values.payload), world.layout);
    CHECK_EQ(found.blocks.size(), 2);
    const std::vector<float> exact = world.floats(0);  // whole numbers, exact in all of them
    CHECK_EQ(std::memcmp(found.blocks[0].values.data(), exact.data(), 16), 0);
  }
}

TEST(server_closes_on_coded_frames_that_are_none) {
  const auto refused = [](wire::FrameKind kind, const std::vector<uint8_t>& bytes) {
    World world(1);
    Buffer payload(bytes.size());
    std::copy(bytes.begin(), bytes.end(), payload.data());
    const bool sequenced =
        kind != wire::FrameKind::kPullRows && kind != wire::FrameKind::kPullDense;
    try {
      send_coded(world[0], kind, std::move(payload), sequenced ? world[0].sequence() + 1 : 0);
    } catch (const Error& error) {
      return error.code() == ErrorCode::kProtocol;
    }
    return false;
  };
  CHECK(refused(wire::FrameKind::kPush, std::vector<uint8_t>(40, 0)));
  CHECK(refused(wire::FrameKind::kPush, {}));
  CHECK(refused(wire::FrameKind::kPullRows, std::vector<uint8_t>(8, 7)));
  CHECK(refused(wire::FrameKind::kPullDense, {0, 3, 0, 0, 0, 0, 0, 0}));  // weights are no int8
  CHECK(refused(wire::FrameKind::kLeave, {}));                            // is never coded
}

TEST(server_counts_decoded_pushes_under_its_cap) {
  server::ServerOptions options = server_options(1);
  wire::ParamSetLayout layout = small_layout();
  layout.tables[0].rows = 10'000;
  PushSpec spec;
  for (int64_t key = 0; key < 10'000; ++key) spec.tables[0].push_back({key, 1.0f});
  const uint64_t plain_bytes = make_push(layout, spec).size();
  for (const bool fits : {true, false}) {
    options.memory_cap_bytes =
        values_bytes(layout, options) + (fits ? plain_bytes : plain_bytes - 8);
    World world(layout, options);
    Buffer payload = coded_push(world, spec, {wire::WireDType::kInt8, wire::WireDType::kFloat32});
    CHECK(payload.size() * 3 < plain_bytes);
    const uint64_t id =
        send_coded(world[0], wire::FrameKind::kPush, std::move(payload), world[0].sequence() + 1);
    if (fits) {
      world[0].reply(id);
    } else {
      CHECK(contains(world[0].error(id, ErrorCode::kFull), std::to_string(plain_bytes)));
    }
    CHECK_EQ(world.server.stats().pending_bytes, 0);
  }
}

}  // namespace cpudist::testing
