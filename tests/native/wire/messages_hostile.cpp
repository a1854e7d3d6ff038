// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Bytes from strangers: cut, changed and lengthened payloads are refused with Error(kProtocol) or
// decode to something valid, and never read outside the payload (run under sanitizers).

#include <algorithm>
#include <limits>
#include <random>

#include "support/channel_fixture.h"
#include "support/check.h"
#include "support/messages_fixture.h"

using namespace cpudist;           // NOLINT
using namespace cpudist::testing;  // NOLINT

namespace {

Buffer copy_of(const Buffer& buffer) {
  Buffer copy(buffer.size());
  std::copy_n(buffer.data(), buffer.size(), copy.data());
  return copy;
}

// A copy of exactly this size: the sanitizer guards its end.
Buffer prefix(const Buffer& payload, size_t size) {
  Buffer copy(size);
  if (size > 0) std::memcpy(copy.data(), payload.data(), size);
  return copy;
}

template <typename T>
uint32_t push_code_with(size_t offset, T value) {
  const wire::ParamSetLayout layout = sample_layout();
  Buffer payload = sample_push(layout);
  std::memcpy(payload.data() + offset, &value, sizeof(value));
  return error_code([&] { wire::decode_push(view_of(payload), layout); });
}

}  // namespace

TEST(messages_cut_anywhere_are_refused) {
  for (const Sample& sample : all_samples()) {
    sample.decode(view_of(sample.payload));
    for (size_t size = 0; size < sample.payload.size(); ++size) {
      const Buffer cut = prefix(sample.payload, size);
      CHECK_EQ(error_code([&] { sample.decode(view_of(cut)); }), code(ErrorCode::kProtocol));
    }
  }
}

TEST(messages_with_trailing_bytes_are_refused) {
  for (const Sample& sample : all_samples()) {
    Buffer longer(sample.payload.size() + 8);
    std::memset(longer.data(), 0, longer.size());
    std::memcpy(longer.data(), sample.payload.data(), sample.payload.size());
    CHECK_EQ(error_code([&] { sample.decode(view_of(longer)); }), code(ErrorCode::kProtocol));
  }
}

TEST(messages_with_flipped_bits_are_refused_or_valid) {
  std::mt19937 generator(7);
  size_t refused = 0;
  for (const Sample& sample : all_samples()) {
    for (int round = 0; round < 2000; ++round) {
      Buffer changed = copy_of(sample.payload);
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

TEST(messages_with_extreme_numbers_are_refused_or_valid) {
  const uint64_t extremes[] = {~0ull, 1ull << 63, (1ull << 61) + 1, 0xffffffffull, 1ull << 32};
  for (const Sample& sample : all_samples()) {
    for (size_t at = 0; at + 8 <= sample.payload.size(); at += 4) {
      for (const uint64_t value : extremes) {
        Buffer changed = copy_of(sample.payload);
        std::memcpy(changed.data() + at, &value, 8);
        const uint32_t found = error_code([&] { sample.decode(view_of(changed)); });
        CHECK(found == 0 || found == code(ErrorCode::kProtocol));
      }
    }
  }
}

TEST(messages_push_refuses_what_the_layout_forbids) {
  const uint32_t refused = code(ErrorCode::kProtocol);
  const size_t configs = 72;  // after seven 8-byte fields and four counts
  const size_t blocks = configs + 2 * sizeof(cpudist::kernels::OptimizerConfig);
  const size_t tables = blocks + 3 * 16;
  CHECK_EQ(push_code_with<uint32_t>(blocks, 0), 0u);    // as it was
  CHECK_EQ(push_code_with<double>(16, -1.0), refused);  // weight
  CHECK_EQ(push_code_with<double>(16, std::numeric_limits<double>::infinity()), refused);
  CHECK_EQ(push_code_with<double>(40, -1.0), refused);          // clip value
  CHECK_EQ(push_code_with<uint32_t>(56, 1), refused);           // one configuration of two
  CHECK_EQ(push_code_with<uint32_t>(configs, 99), refused);     // optimizer kind
  CHECK_EQ(push_code_with<uint32_t>(blocks, 4), refused);       // unknown block
  CHECK_EQ(push_code_with<uint32_t>(blocks + 16, 0), refused);  // the same block twice
  CHECK_EQ(push_code_with<uint32_t>(blocks + 16, 1), refused);  // a block of another size
  CHECK_EQ(push_code_with<uint64_t>(blocks + 8, 24), refused);  // bytes of a block
  CHECK_EQ(push_code_with<uint32_t>(tables, 1), refused);       // not increasing, another dim
  CHECK_EQ(push_code_with<uint32_t>(tables + 4, 2), refused);   // dim
  CHECK_EQ(push_code_with<uint64_t>(tables + 8, 2), refused);   // rows
  const size_t keys = tables + 3 * 16 + 24 + 24;
  CHECK_EQ(push_code_with<int64_t>(keys, 98), 0u);
  CHECK_EQ(push_code_with<int64_t>(keys, 100), refused);  // outside the table
  CHECK_EQ(push_code_with<int64_t>(keys, -1), refused);
}

TEST(messages_changes_refuse_what_the_layout_forbids) {
  const wire::ParamSetLayout layout = sample_layout();
  const auto code_with = [&](size_t offset, auto value) {
    Buffer payload = sample_changes();
    std::memcpy(payload.data() + offset, &value, sizeof(value));
    return error_code([&] { wire::decode_changes(view_of(payload), layout); });
  };
  const uint32_t refused = code(ErrorCode::kProtocol);
  const size_t blocks = 48;  // after four 8-byte fields and four counts
  const size_t tables = blocks + 3 * 16;
  CHECK_EQ(code_with(44, uint32_t{1}), 0u);           // `more`, as it was
  CHECK_EQ(code_with(44, uint32_t{2}), refused);      // an unknown flag
  CHECK_EQ(code_with(36, uint32_t{2}), refused);      // a block less
  CHECK_EQ(code_with(40, uint32_t{2}), refused);      // a table less
  CHECK_EQ(code_with(blocks, uint32_t{4}), refused);  // unknown block
  CHECK_EQ(code_with(blocks + 8, uint64_t{24}), refused);
  CHECK_EQ(code_with(tables + 4, uint32_t{2}), refused);  // dim
  CHECK_EQ(code_with(tables + 8, uint64_t{2}), refused);  // rows
  const size_t keys = tables + 3 * 16 + 24 + 24;
  CHECK_EQ(code_with(keys, int64_t{98}), 0u);
  CHECK_EQ(code_with(keys, int64_t{100}), refused);
  CHECK_EQ(code_with(keys, int64_t{-1}), refused);
}

TEST(messages_layout_flag_is_yes_or_no) {
  Buffer payload = encode(sample_layout());
  const auto code_with = [&](uint64_t flag) {
    std::memcpy(payload.data() + 24, &flag, sizeof(flag));
    return error_code([&] { wire::decode_layout(view_of(payload)); });
  };
  CHECK_EQ(code_with(1), 0u);
  CHECK_EQ(code_with(0), 0u);
  CHECK_EQ(code_with(2), code(ErrorCode::kProtocol));
  CHECK_EQ(code_with(~0ull), code(ErrorCode::kProtocol));
}

TEST(messages_remote_tables_refuse_hostile_programs) {
  wire::ParamSetLayout layout = sample_remote_layout();
  layout.tables = {layout.tables[1]};
  layout.blocks.clear();
  const Buffer payload = encode(layout);
  // From the end: the name, two runs of constant rows, six steps, two counts, what remote tables
  // have beside, the seed, the flags.
  const size_t name = payload.size() - 16;
  const size_t steps = name - 2 * 24 - 6 * 24;
  const auto code_with = [&](size_t at, auto value) {
    std::vector<uint8_t> bytes(payload.data(), payload.data() + payload.size());
    std::memcpy(bytes.data() + at, &value, sizeof(value));
    return error_code([&] { wire::decode_layout(bytes); });
  };
  const uint32_t refused = code(ErrorCode::kProtocol);
  CHECK_EQ(code_with(steps, uint32_t{1}), 0u);
  CHECK_EQ(code_with(steps, uint32_t{0}), refused);            // an unknown step
  CHECK_EQ(code_with(steps + 4, uint32_t{1}), refused);        // what pairs it up
  CHECK_EQ(code_with(steps + 8, double{NAN}), refused);        // its mean
  CHECK_EQ(code_with(steps - 8, uint32_t{7}), refused);        // one step more than there are
  CHECK_EQ(code_with(steps - 8, 0xffffffffu), refused);        // far more
  CHECK_EQ(code_with(steps - 4, 0xffffffffu), refused);        // of constant rows
  CHECK_EQ(code_with(steps - 40, uint64_t{5}), refused);       // conditions of no eviction
  CHECK_EQ(code_with(steps - 64, uint32_t{3}), refused);       // an unknown admission
  CHECK_EQ(code_with(steps - 72, uint64_t{5}), 0u);            // the most rows
  CHECK_EQ(code_with(steps - 76, uint32_t{1}), refused);       // eviction without a condition
  CHECK_EQ(code_with(steps - 80, uint32_t{2}), refused);       // neither zeros nor not
  CHECK_EQ(code_with(steps - 88, uint64_t{5}), 0u);            // the seed
  CHECK_EQ(code_with(steps - 92, uint32_t{1}), 0u);            // open
  CHECK_EQ(code_with(steps - 92, uint32_t{2}), refused);       // neither
  CHECK_EQ(code_with(steps - 96, uint32_t{0}), refused);       // a program of a table not remote
  CHECK_EQ(code_with(steps - 96, uint32_t{2}), refused);       // neither
  CHECK_EQ(code_with(name - 24, uint64_t{1} << 40), refused);  // no constant row
}
