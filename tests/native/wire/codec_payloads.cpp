// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Coded payloads: what comes out is what went in, but for the order of keys and the dtype of
// values; bytes from strangers are refused.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <random>

#include "support/channel_fixture.h"
#include "support/check.h"
#include "support/messages_fixture.h"
#include "wire/codec/codec.h"
#include "wire/codec/values.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT
using wire::SectionKind;

namespace {

constexpr wire::WireDType kEvery[] = {wire::WireDType::kFloat32, wire::WireDType::kBFloat16,
                                      wire::WireDType::kFloat16, wire::WireDType::kInt8};

const wire::Allocate kHeap = wire::allocate_from(nullptr);

std::map<int64_t, std::vector<float>> rows_of(const wire::TableSection& section, size_t dim) {
  std::map<int64_t, std::vector<float>> rows;
  for (size_t i = 0; i < section.keys.size(); ++i) {
    const float* row = section.rows.data() + i * dim;
    rows[section.keys[i]].assign(row, row + dim);
  }
  return rows;
}

void check_sections(const std::vector<wire::TableSection>& found,
                    const std::vector<wire::TableSection>& expected,
                    const wire::ParamSetLayout& layout, wire::WireDType dtype) {
  CHECK_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    CHECK_EQ(found[i].table, expected[i].table);
    CHECK(std::is_sorted(found[i].keys.begin(), found[i].keys.end()));
    const size_t dim = layout.tables[found[i].table].dim;
    auto meant = rows_of(expected[i], dim);
    for (auto& [key, row] : meant) round_rows(dtype, row.data(), 1, dim);
    CHECK(rows_of(found[i], dim) == meant);
  }
}

void check_blocks(const std::vector<wire::DenseSection>& found,
                  const std::vector<wire::DenseSection>& expected,
                  const wire::ParamSetLayout& layout, wire::WireDType dtype) {
  CHECK_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    CHECK_EQ(found[i].block, expected[i].block);
    const wire::BlockSpec& spec = layout.blocks[found[i].block];
    std::vector<uint8_t> meant(expected[i].values.begin(), expected[i].values.end());
    meant.reserve(1);
    if (spec.dtype == wire::DType::kFloat32) {
      round_block(dtype, reinterpret_cast<float*>(meant.data()), spec.elements);
    }
    CHECK(std::equal(meant.begin(), meant.end(), found[i].values.begin(), found[i].values.end()));
  }
}

Buffer code(wire::SectionKind kind, const Buffer& plain, wire::WireDType dtype) {
  return code_sections(kind, view_of(plain), sample_layout(), {dtype, wire::WireDType::kBFloat16},
                       nullptr);
}

struct CodedSample {
  std::string name;
  Buffer payload;
  std::function<void(std::span<const uint8_t>)> decode;
};

std::vector<CodedSample> coded_samples() {
  const auto layout = std::make_shared<wire::ParamSetLayout>(sample_layout());
  std::vector<CodedSample> samples;
  const auto add = [&](const std::string& name, wire::SectionKind kind, const Buffer& plain) {
    for (const wire::WireDType dtype : kEvery) {
      samples.push_back({name + " " + name_of(dtype), code(kind, plain, dtype),
                         [layout, kind](std::span<const uint8_t> bytes) {
                           wire::decode_sections(kind, bytes, *layout, kHeap);
                         }});
    }
  };
  add("push", wire::SectionKind::kPush, sample_push(*layout));
  add("push with holds", wire::SectionKind::kPush, sample_holding_push(*layout));
  add("push behind parts", wire::SectionKind::kPush, sample_parted_push(*layout));
  add("dense", wire::SectionKind::kDense, sample_dense());
  add("dense with rows", wire::SectionKind::kDense, sample_dense_with_rows());
  add("changes", wire::SectionKind::kChanges, sample_changes());
  samples.push_back(
      {"rows",
       code_rows(view_of(sample_rows()), sample_tables(), {wire::WireDType::kFloat16, {}}, nullptr),
       [](std::span<const uint8_t> bytes) {
         wire::decode_coded_rows(bytes, sample_tables(), kHeap);
       }});
  std::vector<wire::TableRef> refs = {{.table = 1, .row_count = 3, .dim = 2}};
  wire::FilledKeys pull = wire::layout_pull(refs, nullptr, 21);
  std::copy_n(std::vector<int64_t>{3, 4, int64_t{1} << 39}.begin(), 3, pull.keys[0]);
  samples.push_back({"pull", code_pull(view_of(pull.payload), *layout, {}, nullptr),
                     [layout](std::span<const uint8_t> bytes) {
                       wire::decode_coded_pull(bytes, *layout, kHeap);
                     }});
  return samples;
}

// A copy of exactly this size: the sanitizer guards its end.
Buffer copy_of(const Buffer& payload, size_t size) {
  Buffer copy(size);
  std::copy_n(payload.data(), std::min(size, payload.size()), copy.data());
  return copy;
}

}  // namespace

TEST(codec_dense_values_where_they_lie_make_the_same_bytes) {
  const wire::ParamSetLayout layout = sample_layout();
  const Buffer plain = sample_dense();
  wire::DenseView dense = wire::decode_dense(view_of(plain), layout);
  CHECK(!dense.blocks.empty());
  for (const wire::WireDType dtype : kEvery) {
    const wire::Coding coding{dtype, dtype};
    const Buffer meant =
        code_sections(wire::SectionKind::kDense, view_of(plain), layout, coding, nullptr);
    const Buffer found =
        code_dense(dense.version, dense.cut_wanted, dense.blocks, layout, coding, nullptr);
    CHECK_EQ(found.size(), meant.size());
    CHECK_EQ(std::memcmp(found.data(), meant.data(), meant.size()), 0);
  }
  std::reverse(dense.blocks.begin(), dense.blocks.end());
  CHECK_EQ(error_code([&] { code_dense(dense.version, 0, dense.blocks, layout, {}, nullptr); }),
           static_cast<uint32_t>(ErrorCode::kInvalidArgument));
}

TEST(codec_pushes_come_out_sorted_and_rounded) {
  const wire::ParamSetLayout layout = sample_layout();
  const Buffer plain = sample_push(layout);
  const wire::PushView meant = wire::decode_push(view_of(plain), layout);
  for (const wire::WireDType dtype : kEvery) {
    const wire::Decoded decoded =
        wire::decode_sections(wire::SectionKind::kPush,
                              view_of(code(wire::SectionKind::kPush, plain, dtype)), layout, kHeap);
    CHECK(decoded.coding.values == dtype);
    CHECK(decoded.coding.reply == wire::WireDType::kBFloat16);
    CHECK_EQ(decoded.payload.size(), plain.size());
    const wire::PushView found = wire::decode_push(view_of(decoded.payload), layout);
    CHECK_EQ(found.header.round, meant.header.round);
    CHECK_EQ(found.header.samples, meant.header.samples);
    CHECK_EQ(found.header.configs.size(), meant.header.configs.size());
    check_blocks(found.blocks, meant.blocks, layout, dtype);
    check_sections(found.tables, meant.tables, layout, dtype);
  }
}

TEST(codec_holds_come_out_sorted) {
  const wire::ParamSetLayout layout = sample_layout();
  const Buffer coded =
      code(wire::SectionKind::kPush, sample_holding_push(layout), wire::WireDType::kFloat32);
  const wire::Decoded decoded =
      wire::decode_sections(wire::SectionKind::kPush, view_of(coded), layout, kHeap);
  const wire::PushView found = wire::decode_push(view_of(decoded.payload), layout);
  CHECK_EQ(found.holds.since, 11);
  CHECK_EQ(found.holds.kept_from, 13);
  CHECK(found.holds.used == (std::vector<uint64_t>{7, 9}));
  CHECK_EQ(found.holds.tables.size(), 3);
  const auto keys = found.holds.tables[0].keys;
  CHECK(std::vector<int64_t>(keys.begin(), keys.end()) == (std::vector<int64_t>{0, 42, 99}));
}

TEST(codec_replies_come_out_rounded) {
  const wire::ParamSetLayout layout = sample_layout();
  for (const wire::WireDType dtype : kEvery) {
    const Buffer plain = sample_changes();
    const wire::Decoded decoded = wire::decode_sections(
        wire::SectionKind::kChanges, view_of(code(wire::SectionKind::kChanges, plain, dtype)),
        layout, kHeap);
    const wire::ChangesView meant = wire::decode_changes(view_of(plain), layout);
    const wire::ChangesView found = wire::decode_changes(view_of(decoded.payload), layout);
    CHECK_EQ(found.header.members, meant.header.members);
    CHECK_EQ(found.header.version.steps, meant.header.version.steps);
    CHECK(found.header.more);
    check_blocks(found.blocks, meant.blocks, layout, dtype);
    check_sections(found.tables, meant.tables, layout, dtype);

    const Buffer rows = sample_rows();
    const auto refs = sample_tables();
    const wire::Decoded came = wire::decode_coded_rows(
        view_of(code_rows(view_of(rows), refs, {dtype, {}}, nullptr)), refs, kHeap);
    wire::Version version;
    const auto expected = wire::decode_rows(view_of(rows), refs, &version);
    const auto actual = wire::decode_rows(view_of(came.payload), refs, &version);
    CHECK_EQ(version.round, 19);
    for (size_t i = 0; i < refs.size(); ++i) {
      std::vector<float> values(expected[i].begin(), expected[i].end());
      round_rows(dtype, values.data(), refs[i].row_count, refs[i].dim);
      CHECK(std::equal(values.begin(), values.end(), actual[i].begin(), actual[i].end()));
    }
  }
}

TEST(codec_rounding_twice_changes_nothing) {
  std::mt19937 engine(4);
  std::normal_distribution<float> normal;
  for (const wire::WireDType dtype : kEvery) {
    for (const size_t dim : {1u, 2u, 5u, 16u, 5000u}) {
      std::vector<float> rows(30 * dim);
      for (float& value : rows)
        value = std::ldexp(normal(engine), static_cast<int>(engine() % 40) - 30);
      round_rows(dtype, rows.data(), 30, dim);
      std::vector<float> again = rows;
      round_rows(dtype, again.data(), 30, dim);
      CHECK(again == rows);
      Buffer coded(static_cast<size_t>(coded_rows_bytes(dtype, 30, dim)));
      wire::encode_rows(dtype, rows.data(), 30, dim, coded.data());
      wire::Reader reader(view_of(coded));
      wire::decode_rows_into(dtype, &reader, 30, dim, again.data());
      CHECK_EQ(reader.remaining(), 0);
      CHECK(again == rows);
      // As a block it is scaled by 128 elements.
      round_block(dtype, rows.data(), rows.size());
      Buffer block(static_cast<size_t>(coded_block_bytes(dtype, rows.size())));
      wire::encode_block(dtype, rows.data(), rows.size(), block.data());
      wire::Reader block_reader(view_of(block));
      wire::decode_block_into(dtype, &block_reader, rows.size(), again.data());
      CHECK(again == rows);
    }
  }
}

TEST(codec_takes_the_bytes_it_says) {
  CHECK_EQ(coded_rows_bytes(wire::WireDType::kFloat32, 100, 16), 6400);
  CHECK_EQ(coded_rows_bytes(wire::WireDType::kFloat16, 100, 16), 3200);
  CHECK_EQ(coded_rows_bytes(wire::WireDType::kInt8, 100, 16), 1800);
  CHECK_EQ(coded_rows_bytes(wire::WireDType::kInt8, 100, 1), 200);
  CHECK_EQ(coded_block_bytes(wire::WireDType::kInt8, 1280), 1300 + 4);
}

TEST(codec_cut_anywhere_is_refused) {
  for (const CodedSample& sample : coded_samples()) {
    sample.decode(view_of(sample.payload));
    for (size_t size = 0; size < sample.payload.size(); ++size) {
      const Buffer cut = copy_of(sample.payload, size);
      CHECK_EQ(error_code([&] { sample.decode(view_of(cut)); }), code(ErrorCode::kProtocol));
    }
    Buffer longer = copy_of(sample.payload, sample.payload.size() + 8);
    std::fill_n(longer.data() + sample.payload.size(), 8, 0);
    CHECK_EQ(error_code([&] { sample.decode(view_of(longer)); }), code(ErrorCode::kProtocol));
  }
}

TEST(codec_with_flipped_bits_is_refused_or_valid) {
  std::mt19937 generator(7);
  size_t refused = 0;
  for (const CodedSample& sample : coded_samples()) {
    for (int round = 0; round < 1500; ++round) {
      Buffer changed = copy_of(sample.payload, sample.payload.size());
      for (uint32_t flips = 1 + generator() % 3; flips > 0; --flips) {
        const size_t bit = generator() % (changed.size() * 8);
        changed.data()[bit / 8] = static_cast<uint8_t>(changed.data()[bit / 8] ^ (1u << bit % 8));
      }
      const uint32_t found = error_code([&] { sample.decode(view_of(changed)); });
      CHECK(found == 0 || found == code(ErrorCode::kProtocol));
      refused += found != 0;
    }
  }
  CHECK(refused > 1000);
}

TEST(codec_promises_without_bytes_allocate_nothing) {
  const wire::ParamSetLayout layout = sample_layout();
  std::vector<wire::TableRef> refs = {{.table = 1, .row_count = 3, .dim = 2}};
  wire::FilledPush push = wire::layout_push({.configs = layout.configs}, {}, refs, nullptr);
  std::copy_n(std::vector<int64_t>{3, 4, 5}.begin(), 3, push.keys[0]);
  std::fill_n(push.rows[0], 6, 1.0f);
  Buffer coded = code(wire::SectionKind::kPush, push.payload, wire::WireDType::kInt8);
  // The row count of the only table, behind coding, head and configurations.
  const size_t at = 8 + 72 + layout.configs.size() * 112 + 8;
  uint64_t rows;
  std::memcpy(&rows, coded.data() + at, sizeof(rows));
  CHECK_EQ(rows, 3);
  uint64_t allocated = 0;
  const wire::Allocate counting = [&](uint64_t size_bytes) {
    allocated = size_bytes;
    return Buffer(static_cast<size_t>(size_bytes));
  };
  for (const uint64_t promised :
       {uint64_t{100}, uint64_t{1} << 26, uint64_t{1} << 39, ~uint64_t{0}}) {
    std::memcpy(coded.data() + at, &promised, sizeof(promised));
    CHECK_EQ(error_code([&] {
               wire::decode_sections(wire::SectionKind::kPush, view_of(coded), layout, counting);
             }),
             code(ErrorCode::kProtocol));
    CHECK_EQ(allocated, 0);
  }
  const Buffer whole = code(wire::SectionKind::kPush, push.payload, wire::WireDType::kInt8);
  CHECK_EQ(error_code([&] {
             wire::decode_sections(wire::SectionKind::kPush, view_of(whole), layout,
                                   [](uint64_t) { return Buffer(); });
           }),
           code(ErrorCode::kOverloaded));
}

// Keys of a remote table may be any below 2^62.
TEST(codec_takes_the_edges_of_huge_tables) {
  wire::ParamSetLayout layout = sample_remote_layout();
  layout.tables[1].rows = (1ull << 62) - 1;
  layout.tables[1].overrides.clear();
  const auto last = static_cast<int64_t>(layout.tables[1].rows - 1);
  const std::vector<int64_t> keys = {last, 0, last - 1, 1, last / 2};
  const wire::TableRef ref{1, keys.size(), 2, 0, false, 0};
  wire::PushHeader header;
  header.configs = layout.configs;
  wire::HoldRefs holds;
  holds.tables = {ref};
  wire::FilledPush push = wire::layout_push(header, {}, std::span(&ref, 1), nullptr, &holds);
  wire::FilledKeys pull = wire::layout_pull(std::span(&ref, 1), nullptr, 21);
  const std::vector<int64_t> sorted = {0, 1, last / 2, last - 1, last};
  std::copy(keys.begin(), keys.end(), push.keys[0]);
  std::copy(keys.begin(), keys.end(), push.held[0]);
  std::copy(sorted.begin(), sorted.end(), pull.keys[0]);
  const wire::Coding coding{wire::WireDType::kFloat16, wire::WireDType::kFloat16};
  const Buffer coded =
      code_sections(SectionKind::kPush, view_of(push.payload), layout, coding, nullptr);
  const wire::Decoded decoded =
      wire::decode_sections(SectionKind::kPush, view_of(coded), layout, kHeap);
  const wire::PushView found = wire::decode_push(view_of(decoded.payload), layout);
  CHECK(std::equal(sorted.begin(), sorted.end(), found.tables[0].keys.begin()));
  CHECK(std::equal(sorted.begin(), sorted.end(), found.holds.tables[0].keys.begin()));
  const Buffer asked = wire::code_pull(view_of(pull.payload), layout, coding, nullptr);
  const wire::Decoded plain = wire::decode_coded_pull(view_of(asked), layout, kHeap);
  const auto wanted = wire::decode_pull(view_of(plain.payload), layout);
  CHECK(std::equal(sorted.begin(), sorted.end(), wanted[0].keys.begin()));
  // In a table that is one row smaller the last key is none, plain and coded.
  layout.tables[1].rows -= 1;
  const uint32_t refused = code(ErrorCode::kProtocol);
  CHECK_EQ(error_code([&] { wire::decode_push(view_of(push.payload), layout); }), refused);
  CHECK_EQ(error_code([&] { wire::decode_pull(view_of(pull.payload), layout); }), refused);
  CHECK_EQ(
      error_code([&] { wire::decode_sections(SectionKind::kPush, view_of(coded), layout, kHeap); }),
      refused);
  CHECK_EQ(error_code([&] { wire::decode_coded_pull(view_of(asked), layout, kHeap); }), refused);
}
