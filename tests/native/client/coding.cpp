// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Error feedback: what is sent of many gradients, and what is held back, is their sum.

#include "client/push/residues.h"

#include <cmath>
#include <random>

#include "support/server_fixture.h"
#include "wire/codec/codec.h"

namespace cpudist::testing {
namespace {

struct Sums {
  std::map<int64_t, std::vector<double>> rows;
  std::vector<double> block = std::vector<double>(4);
};

void add_to(Sums* sums, const Buffer& push, const wire::ParamSetLayout& layout) {
  const wire::PushView found = wire::decode_push(view(push), layout);
  for (const wire::DenseSection& section : found.blocks) {
    if (section.block != 0) continue;
    for (size_t i = 0; i < 4; ++i) {
      float value;
      std::memcpy(&value, section.values.data() + i * sizeof(value), sizeof(value));
      sums->block[i] += static_cast<double>(value);
    }
  }
  for (const wire::TableSection& section : found.tables) {
    for (size_t i = 0; i < section.keys.size(); ++i) {
      auto& row = sums->rows[section.keys[i]];
      row.resize(4);
      for (size_t c = 0; c < 4; ++c) row[c] += static_cast<double>(section.rows[i * 4 + c]);
    }
  }
}

// Rows of unlike values, unlike make_push.
Buffer random_push(const wire::ParamSetLayout& layout, std::mt19937* engine, double weight) {
  PushSpec spec;
  spec.weight = weight;
  spec.blocks[0] = std::vector<double>(4);
  spec.blocks[1] = {0.1, 0.2, 0.3};
  for (int64_t key = 0; key < 64; ++key) {
    if ((*engine)() % 2 == 0) spec.tables[0].push_back({key, 0.0f});
  }
  Buffer push = make_push(layout, spec);
  const wire::PushView found = wire::decode_push(view(push), layout);
  std::normal_distribution<float> normal;
  for (float& value :
       std::span(const_cast<float*>(found.tables[0].rows.data()), found.tables[0].rows.size())) {
    value = std::ldexp(normal(*engine), -static_cast<int>((*engine)() % 12));
  }
  auto* block = reinterpret_cast<float*>(const_cast<uint8_t*>(found.blocks[0].values.data()));
  for (size_t i = 0; i < 4; ++i) block[i] = std::ldexp(normal(*engine), -static_cast<int>(3 * i));
  return push;
}

Buffer copy_of(const Buffer& payload) {
  Buffer copy(payload.size());
  std::memcpy(copy.data(), payload.data(), payload.size());
  return copy;
}

// How far what was sent of values up to 8 may be from what was meant.
double held_of(wire::WireDType dtype) {
  return 8.0 * (dtype == wire::WireDType::kInt8      ? 0.51 / 127
                : dtype == wire::WireDType::kFloat16 ? 0x1p-12
                                                     : 0x1p-9);
}

}  // namespace

TEST(client_coding_holds_back_what_it_rounds_off) {
  wire::ParamSetLayout layout = small_layout();
  for (const wire::WireDType dtype :
       {wire::WireDType::kBFloat16, wire::WireDType::kFloat16, wire::WireDType::kInt8}) {
    layout.push_dtype = dtype;
    client::Residues residues(layout);
    std::mt19937 engine(3);
    Sums meant;
    Sums sent;
    for (int step = 0; step < 300; ++step) {
      Buffer push = random_push(layout, &engine, 1.0);
      add_to(&meant, push, layout);
      residues.round(&push);
      add_to(&sent, push, layout);
      // float64 is left alone, and what is left travels as it is.
      const wire::PushView found = wire::decode_push(view(push), layout);
      double third;
      std::memcpy(&third, found.blocks[1].values.data() + 16, sizeof(third));
      CHECK_EQ(third, 0.3);
      const Buffer coded = code_sections(wire::SectionKind::kPush, view(push), layout,
                                         {dtype, wire::WireDType::kFloat32}, nullptr);
      const wire::Decoded decoded = wire::decode_sections(wire::SectionKind::kPush, view(coded),
                                                          layout, wire::allocate_from(nullptr));
      CHECK_EQ(decoded.payload.size(), push.size());
      CHECK_EQ(std::memcmp(decoded.payload.data(), push.data(), push.size()), 0);
    }
    CHECK_EQ(meant.rows.size(), 64);
    for (const auto& [key, row] : meant.rows) {
      for (size_t c = 0; c < 4; ++c) CHECK_NEAR(sent.rows[key][c], row[c], held_of(dtype));
    }
    for (size_t i = 0; i < 4; ++i) CHECK_NEAR(sent.block[i], meant.block[i], held_of(dtype));
  }
}

TEST(client_coding_of_weight_0_holds_nothing_back) {
  wire::ParamSetLayout layout = small_layout();
  layout.push_dtype = wire::WireDType::kInt8;
  std::mt19937 engine(4);
  const Buffer given = random_push(layout, &engine, 1.0);
  client::Residues fresh(layout);
  Buffer expected = copy_of(given);
  fresh.round(&expected);
  client::Residues residues(layout);
  Buffer ignored = random_push(layout, &engine, 0.0);
  residues.round(&ignored);
  Buffer found = copy_of(given);
  residues.round(&found);
  CHECK_EQ(std::memcmp(found.data(), expected.data(), expected.size()), 0);
}

}  // namespace cpudist::testing
