// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What is checked of coded payloads: refused as malformed or decoded with little memory, and what
// they decode to, coded again, decodes to the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/errors.h"
#include "require.h"
#include "wire/codec/codec.h"
#include "wire/codec/keys.h"

extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void*, size_t),
                                                         void (*)(const volatile void*));

namespace cpudist::fuzz {

using Bytes = std::span<const uint8_t>;

// Bytes that were asked for so far, by anybody.
inline uint64_t& allocated_bytes() {
  static uint64_t total = 0;
  static const int hooks = __sanitizer_install_malloc_and_free_hooks(
      [](const volatile void*, size_t size) { allocated_bytes() += size; },
      [](const volatile void*) {});
  static_cast<void>(hooks);
  return total;
}

// A key of 8 bytes may take a bit; tables and refusals have some memory of their own.
inline constexpr uint64_t kAllocatedPerByte = 160;
inline constexpr uint64_t kAllocatedAnyway = 1 << 16;

// Calls a decoder of `size` bytes. False: it refused them.
template <typename Decode>
bool accepts(size_t size, const Decode& decode) {
  const uint64_t before = allocated_bytes();
  bool accepted = true;
  try {
    decode();
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kProtocol, "refused as malformed");
    accepted = false;
  }
  require(allocated_bytes() - before <= kAllocatedPerByte * size + kAllocatedAnyway,
          "memory is bounded by the bytes that came");
  return accepted;
}

// At an address as payloads have, with an end that the sanitizer guards.
inline Buffer copied(Bytes bytes) {
  Buffer copy(bytes.size());
  if (!bytes.empty()) std::memcpy(copy.data(), bytes.data(), bytes.size());
  return copy;
}

inline Bytes view(const Buffer& buffer) { return {buffer.data(), buffer.size()}; }

inline bool equal(Bytes a, Bytes b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

// As `equal`, but that float32 values in the same places may be different NaN.
inline bool equal_values(Bytes a, Bytes b) {
  if (a.size() != b.size()) return false;
  for (size_t at = 0; at + sizeof(float) <= a.size(); at += sizeof(float)) {
    if (std::memcmp(&a[at], &b[at], sizeof(float)) == 0) continue;
    float first;
    float second;
    std::memcpy(&first, &a[at], sizeof(float));
    std::memcpy(&second, &b[at], sizeof(float));
    if (!std::isnan(first) || !std::isnan(second)) return false;
  }
  return true;
}

// Widths that int8 treats differently, a remote table of all keys that there can be, blocks of both
// dtypes.
inline const wire::ParamSetLayout& wire_layout() {
  static const wire::ParamSetLayout layout = [] {
    wire::ParamSetLayout made;
    made.configs.resize(2);
    made.tables = {{"a", 100, 3, 0},
                   {"b", (1ull << 62) - 1, 2, 1, true},
                   {"c", 1000, 1, 0},
                   {"d", 5000, 17, 0}};
    made.blocks = {{"e", 5, wire::DType::kFloat32, 0, 0, 0, 0, 1},
                   {"f", 6, wire::DType::kFloat64, 1, 1, 1, 0, 3},
                   {"g", 131, wire::DType::kFloat32, 0, 0, 2, 0, 1},
                   {"h", 0, wire::DType::kFloat32, 0, 0, 3, 0, 1}};
    return made;
  }();
  return layout;
}

// What is to be checked of one kind of payload. `plain` takes apart what was decoded.
template <typename Decode, typename Plain, typename Code>
void check_coded(Bytes bytes, const Decode& decode, const Plain& plain, const Code& code) {
  wire::Decoded first;
  if (!accepts(bytes.size(), [&] { first = decode(bytes); })) return;
  if (!accepts(bytes.size(), [&] { plain(view(first.payload)); })) return;
  const Buffer again = code(view(first.payload), first.coding);
  const wire::Decoded second = decode(view(again));
  require(second.coding.values == first.coding.values, "the dtype is kept");
  require(second.coding.reply == first.coding.reply, "the dtype of replies is kept");
  plain(view(second.payload));
  // A sender's scale follows from its values; a stranger's may be any.
  require(first.coding.values == wire::WireDType::kInt8 ||
              equal_values(view(first.payload), view(second.payload)),
          "coded again it decodes to the same");
  const Buffer third = code(view(second.payload), second.coding);
  require(equal(view(again), view(third)), "what a sender coded is coded the same again");
}

inline void check_sections(wire::SectionKind kind, Bytes bytes) {
  using wire::SectionKind;
  static const wire::Allocate heap = wire::allocate_from(nullptr);
  const wire::ParamSetLayout& layout = wire_layout();
  check_coded(
      bytes, [&](Bytes coded) { return wire::decode_sections(kind, coded, layout, heap); },
      [&](Bytes plain) {
        if (kind == wire::SectionKind::kPush) wire::decode_push(plain, layout);
        if (kind == wire::SectionKind::kDense) wire::decode_dense(plain, layout);
        if (kind == wire::SectionKind::kChanges) wire::decode_changes(plain, layout);
      },
      [&](Bytes plain, const wire::Coding& coding) {
        return wire::code_sections(kind, plain, layout, coding, nullptr);
      });
}

inline void check_pull(Bytes bytes) {
  static const wire::Allocate heap = wire::allocate_from(nullptr);
  const wire::ParamSetLayout& layout = wire_layout();
  check_coded(
      bytes, [&](Bytes coded) { return wire::decode_coded_pull(coded, layout, heap); },
      [&](Bytes plain) { wire::decode_pull(plain, layout); },
      [&](Bytes plain, const wire::Coding& coding) {
        return wire::code_pull(plain, layout, coding, nullptr);
      });
}

inline void check_rows(Bytes bytes, std::span<const wire::TableRef> asked) {
  static const wire::Allocate heap = wire::allocate_from(nullptr);
  check_coded(
      bytes, [&](Bytes coded) { return wire::decode_coded_rows(coded, asked, heap); },
      [&](Bytes plain) {
        wire::Version version;
        wire::decode_rows(plain, asked, &version);
      },
      [&](Bytes plain, const wire::Coding& coding) {
        return wire::code_rows(plain, asked, coding, nullptr);
      });
  accepts(bytes.size(), [&] {
    const Bytes in_place = wire::plain_rows_in(bytes);
    wire::Version version;
    if (!in_place.empty()) wire::decode_rows(in_place, asked, &version);
  });
}

inline void check_pull_dense(Bytes bytes) {
  wire::Coding coding;
  uint64_t step = 0;
  if (!accepts(bytes.size(), [&] { step = wire::decode_coded_pull_dense(bytes, &coding); })) return;
  const Buffer again = wire::encode_coded_pull_dense(coding, step);
  require(wire::decode_coded_pull_dense(view(again), &coding) == step, "the step is kept");
}

inline void check_keys(Bytes bytes, const wire::KeyRange& range, size_t count) {
  std::vector<int64_t> keys(count);
  size_t taken = 0;
  if (!accepts(bytes.size(), [&] { taken = wire::decode_keys(bytes, range, keys); })) return;
  require(taken <= bytes.size(), "no more is read than there is");
  require(taken >= wire::coded_keys_bytes_min(count), "no code is shorter than the least");
  for (size_t i = 0; i < count; ++i) {
    require(range.open || static_cast<uint64_t>(keys[i]) < range.rows, "keys are rows");
    require(i == 0 || keys[i - 1] < keys[i], "keys increase");
  }
  std::vector<uint8_t> again;
  wire::encode_keys(keys, range.open, &again);
  std::vector<int64_t> found(count);
  require(wire::decode_keys(again, range, found) == again.size(), "the code has no rest");
  require(found == keys, "the same keys come back");
}

inline std::vector<wire::TableRef> asked_rows(uint64_t first, uint64_t second) {
  const auto& tables = wire_layout().tables;
  return {{.table = 1, .row_count = first, .dim = tables[1].dim},
          {.table = 3, .row_count = second, .dim = tables[3].dim}};
}

// Kinds of coded payloads, by number.
inline constexpr uint32_t kCodedKinds = 7;

inline void check_kind(uint32_t kind, uint8_t parameter, Bytes bytes) {
  using wire::SectionKind;
  const Buffer payload = copied(bytes);
  switch (kind) {
    case 0:
      return check_sections(wire::SectionKind::kPush, view(payload));
    case 1:
      return check_sections(wire::SectionKind::kDense, view(payload));
    case 2:
      return check_sections(wire::SectionKind::kChanges, view(payload));
    case 3:
      return check_pull(view(payload));
    case 4: {
      const auto asked = asked_rows(parameter % 16, parameter / 16);
      return check_rows(view(payload), asked);
    }
    case 5:
      return check_pull_dense(view(payload));
    default:
      check_keys(view(payload), {uint64_t{1} << parameter % 63, parameter % 2 == 1}, parameter);
  }
}

}  // namespace cpudist::fuzz
