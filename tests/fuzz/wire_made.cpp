// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Payloads that follow from an input: coded and decoded they are what they were, but for the order
// of keys and the dtype of values; then their code is changed as the rest of the input says.

#include <map>
#include <random>

#include "wire/codec/values.h"
#include "wire_checks.h"

using namespace cpudist;  // NOLINT
using fuzz::Bytes;
using fuzz::require;
using fuzz::view;
using wire::SectionKind;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

constexpr size_t kRowsMax = 300;  // more than two groups of keys
constexpr size_t kRowsCommon = 12;

// Numbers that the input chooses; zeros behind its end.
class Choices {
 public:
  explicit Choices(Bytes input) : left_(input) {}
  uint8_t byte() {
    if (left_.empty()) return 0;
    const uint8_t next = left_[0];
    left_ = left_.subspan(1);
    return next;
  }
  size_t below(size_t bound) { return (byte() | size_t{byte()} << 8) % bound; }
  bool any() const { return !left_.empty(); }

 private:
  Bytes left_;
};

// Any bits, or of a common size as gradients are.
float made_float(std::mt19937_64& random, bool wild) {
  const auto bits = static_cast<uint32_t>(random());
  if (!wild) return static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-34f;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

struct Maker {
  explicit Maker(Choices& chosen)
      : choices(chosen), random(choices.below(65536)), wild(choices.byte() % 2 == 0) {}

  std::vector<wire::TableRef> tables() {
    std::vector<wire::TableRef> refs;
    const auto& specs = fuzz::wire_layout().tables;
    for (uint32_t t = 0; t < specs.size(); ++t) {
      if (choices.byte() % 2 == 0) continue;
      const uint64_t most = choices.byte() % 32 == 31 ? kRowsMax : kRowsCommon;
      const uint64_t limit = std::min<uint64_t>(most, specs[t].rows) + 1;
      refs.push_back({.table = t, .row_count = choices.below(limit), .dim = specs[t].dim});
    }
    return refs;
  }
  std::vector<wire::BlockRef> blocks() {
    std::vector<wire::BlockRef> refs;
    const auto& specs = fuzz::wire_layout().blocks;
    for (uint32_t b = 0; b < specs.size(); ++b) {
      if (choices.byte() % 2 == 0) continue;
      refs.push_back({.block = b, .size_bytes = specs[b].elements * size_of(specs[b].dtype)});
    }
    return refs;
  }
  // Distinct, with gaps of many lengths.
  void keys(const wire::TableRef& ref, bool ordered, int64_t* out) {
    const uint64_t rows = fuzz::wire_layout().tables[ref.table].rows;
    const uint32_t bits = choices.byte() % 63;
    uint64_t next = 0;
    for (uint64_t i = 0; i < ref.row_count; ++i) {
      const uint64_t spare = rows - next - (ref.row_count - i);  // leaves one for each to come
      const uint64_t gap = std::min(spare, random() % (uint64_t{1} << bits));
      out[i] = static_cast<int64_t>(next + gap);
      next += gap + 1;
    }
    if (!ordered) std::shuffle(out, out + ref.row_count, random);
  }
  void floats(float* out, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) out[i] = made_float(random, wild);
  }
  void fill(const wire::FilledPush& filled, std::span<const wire::BlockRef> block_refs,
            std::span<const wire::TableRef> table_refs) {
    for (size_t i = 0; i < block_refs.size(); ++i) {
      for (uint64_t at = 0; at + sizeof(float) <= block_refs[i].size_bytes; at += sizeof(float)) {
        const float value = made_float(random, wild);
        std::memcpy(filled.blocks[i] + at, &value, sizeof(value));
      }
    }
    for (size_t i = 0; i < table_refs.size(); ++i) {
      keys(table_refs[i], false, filled.keys[i]);
      floats(filled.rows[i], table_refs[i].row_count * table_refs[i].dim);
    }
  }
  Buffer sections(wire::SectionKind kind) {
    const auto block_refs = blocks();
    const auto table_refs = tables();
    wire::FilledPush filled;
    if (kind == wire::SectionKind::kPush) {
      wire::PushHeader header;
      header.round = random();
      header.configs = fuzz::wire_layout().configs;
      wire::HoldRefs holds;
      const std::vector<uint64_t> used(choices.byte() % 4, 7);
      holds.since = random();
      holds.used = used;
      holds.tables = tables();
      const bool holding = choices.byte() % 2 == 0;
      filled =
          wire::layout_push(header, block_refs, table_refs, nullptr, holding ? &holds : nullptr);
      for (size_t i = 0; i < filled.held.size(); ++i) keys(holds.tables[i], false, filled.held[i]);
    } else if (kind == wire::SectionKind::kDense) {
      filled = wire::layout_dense({random(), random()}, block_refs, nullptr, table_refs, random());
    } else {
      wire::ChangesHeader header;
      header.cut_wanted = random();
      header.members = choices.byte();
      filled = wire::layout_changes(header, block_refs, table_refs, nullptr);
    }
    fill(filled, block_refs, table_refs);
    return std::move(filled.payload);
  }

  Choices& choices;
  std::mt19937_64 random;
  bool wild;
};

bool equal_floats(std::span<const float> a, std::span<const float> b) {
  return fuzz::equal_values({reinterpret_cast<const uint8_t*>(a.data()), a.size_bytes()},
                            {reinterpret_cast<const uint8_t*>(b.data()), b.size_bytes()});
}

void require_same(const std::vector<wire::TableSection>& found,
                  const std::vector<wire::TableSection>& meant, wire::WireDType dtype) {
  require(found.size() == meant.size(), "all tables come");
  for (size_t i = 0; i < found.size(); ++i) {
    require(found[i].table == meant[i].table, "tables keep their order");
    require(found[i].keys.size() == meant[i].keys.size(), "all keys come");
    const size_t dim = fuzz::wire_layout().tables[found[i].table].dim;
    std::map<int64_t, size_t> places;
    for (size_t k = 0; k < meant[i].keys.size(); ++k) places[meant[i].keys[k]] = k;
    size_t k = 0;
    for (const auto& [key, place] : places) {
      require(found[i].keys[k] == key, "keys come in their order");
      const auto row = meant[i].rows.subspan(place * dim, dim);
      std::vector<float> rounded(row.begin(), row.end());
      wire::round_rows(dtype, rounded.data(), 1, dim);
      require(equal_floats(found[i].rows.subspan(k * dim, dim), rounded), "rows go with their key");
      ++k;
    }
  }
}

void require_same(const std::vector<wire::DenseSection>& found,
                  const std::vector<wire::DenseSection>& meant, wire::WireDType dtype) {
  require(found.size() == meant.size(), "all blocks come");
  for (size_t i = 0; i < found.size(); ++i) {
    require(found[i].block == meant[i].block, "blocks keep their order");
    const wire::BlockSpec& spec = fuzz::wire_layout().blocks[found[i].block];
    Buffer rounded = fuzz::copied(meant[i].values);
    if (spec.dtype == wire::DType::kFloat32) {
      wire::round_block(dtype, reinterpret_cast<float*>(rounded.data()), spec.elements);
    }
    require(fuzz::equal_values(found[i].values, view(rounded)), "blocks come rounded");
  }
}

void require_same_holds(const wire::PushHolds& found, const wire::PushHolds& meant) {
  require(found.since == meant.since && found.used == meant.used, "holds keep their head");
  require(found.tables.size() == meant.tables.size(), "all tables of the holds come");
  for (size_t i = 0; i < found.tables.size(); ++i) {
    std::vector<int64_t> keys(meant.tables[i].keys.begin(), meant.tables[i].keys.end());
    wire::sort_keys(keys);
    require(std::equal(keys.begin(), keys.end(), found.tables[i].keys.begin(),
                       found.tables[i].keys.end()),
            "held keys come in their order");
  }
}

void require_same(wire::SectionKind kind, Bytes found, Bytes meant, wire::WireDType dtype) {
  const wire::ParamSetLayout& layout = fuzz::wire_layout();
  require(found.size() == meant.size(), "the plain payload keeps its size");
  if (kind == wire::SectionKind::kPush) {
    const wire::PushView a = wire::decode_push(found, layout), b = wire::decode_push(meant, layout);
    require(a.header.round == b.header.round, "the head is kept");
    require_same(a.blocks, b.blocks, dtype);
    require_same(a.tables, b.tables, dtype);
    require_same_holds(a.holds, b.holds);
  } else if (kind == wire::SectionKind::kDense) {
    const wire::DenseView a = wire::decode_dense(found, layout),
                          b = wire::decode_dense(meant, layout);
    require(a.version.samples == b.version.samples, "the head is kept");
    require_same(a.blocks, b.blocks, dtype);
    require_same(a.tables, b.tables, dtype);
  } else {
    const wire::ChangesView a = wire::decode_changes(found, layout),
                            b = wire::decode_changes(meant, layout);
    require(a.header.members == b.header.members, "the head is kept");
    require_same(a.blocks, b.blocks, dtype);
    require_same(a.tables, b.tables, dtype);
  }
}

Buffer made_sections(wire::SectionKind kind, Maker& maker, const wire::Coding& coding) {
  const wire::ParamSetLayout& layout = fuzz::wire_layout();
  const Buffer plain = maker.sections(kind);
  Buffer coded = wire::code_sections(kind, view(plain), layout, coding, nullptr);
  const wire::Decoded found =
      wire::decode_sections(kind, view(coded), layout, wire::allocate_from(nullptr));
  require(found.coding.values == coding.values, "the dtype is kept");
  require_same(kind, view(found.payload), view(plain), coding.values);
  return coded;
}

Buffer made_pull(Maker& maker, const wire::Coding& coding) {
  const wire::ParamSetLayout& layout = fuzz::wire_layout();
  const auto refs = maker.tables();
  const wire::FilledKeys filled = wire::layout_pull(refs, nullptr, maker.random());
  for (size_t i = 0; i < refs.size(); ++i) maker.keys(refs[i], true, filled.keys[i]);
  Buffer coded = wire::code_pull(view(filled.payload), layout, coding, nullptr);
  const wire::Decoded found =
      wire::decode_coded_pull(view(coded), layout, wire::allocate_from(nullptr));
  require(fuzz::equal(view(found.payload), view(filled.payload)), "a pull comes as it was");
  return coded;
}

Buffer made_rows(Maker& maker, const wire::Coding& coding, uint8_t parameter) {
  const auto refs = fuzz::asked_rows(parameter % 16, parameter / 16);
  const wire::FilledRows filled = wire::layout_rows({1, 2}, refs, nullptr);
  for (size_t i = 0; i < refs.size(); ++i) {
    maker.floats(filled.rows[i], refs[i].row_count * refs[i].dim);
  }
  Buffer coded = wire::code_rows(view(filled.payload), refs, coding, nullptr);
  const wire::Decoded found =
      wire::decode_coded_rows(view(coded), refs, wire::allocate_from(nullptr));
  wire::Version version;
  const auto rows = wire::decode_rows(view(found.payload), refs, &version);
  for (size_t i = 0; i < refs.size(); ++i) {
    wire::round_rows(coding.values, filled.rows[i], refs[i].row_count, refs[i].dim);
    const std::span<const float> meant(filled.rows[i], rows[i].size());
    require(equal_floats(rows[i], meant), "rows come rounded");
  }
  return coded;
}

Buffer made(uint32_t kind, uint8_t parameter, Maker& maker, const wire::Coding& coding) {
  if (kind < 3) return made_sections(static_cast<wire::SectionKind>(kind), maker, coding);
  if (kind == 3) return made_pull(maker, coding);
  if (kind == 4) return made_rows(maker, coding, parameter);
  return wire::encode_coded_pull_dense(coding, maker.random());
}

void change(std::vector<uint8_t>& bytes, Choices& choices) {
  // Two of three changes hit the heads, which stand at the beginning.
  const size_t reach = choices.byte() % 3 == 0 ? bytes.size() : std::min<size_t>(bytes.size(), 512);
  const size_t at = choices.below(reach + 1);
  switch (choices.byte() % 7) {
    case 0:
    case 1:
      if (at < bytes.size()) bytes[at] ^= static_cast<uint8_t>(1u << choices.byte() % 8);
      break;
    case 2:
      if (at < bytes.size()) bytes[at] = choices.byte();
      break;
    case 3:
      bytes.resize(at);
      break;
    case 4:
      bytes.insert(bytes.end(), 8 * (1 + choices.byte() % 4), choices.byte());
      break;
    case 5: {  // a count or a size
      const uint64_t number = uint64_t{choices.byte()} << choices.byte() % 64;
      const size_t place = at / 8 * 8;
      if (place + sizeof(number) <= bytes.size()) {
        std::memcpy(&bytes[place], &number, sizeof(number));
      }
      break;
    }
    default: {  // aligned words are taken out
      const size_t begin = at / 8 * 8;
      const size_t end = std::min(bytes.size(), begin + 8 * (1 + choices.byte() % 8));
      if (begin >= end) break;
      bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(begin),
                  bytes.begin() + static_cast<std::ptrdiff_t>(end));
    }
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const uint32_t kind = data[0] % (fuzz::kCodedKinds - 1);
  const uint8_t parameter = data[1];
  const wire::Coding coding{static_cast<wire::WireDType>(data[2] % wire::kWireDTypeCount),
                            static_cast<wire::WireDType>(data[2] / 4 % 3)};
  Choices choices({data + 3, size - 3});
  Maker maker(choices);
  const Buffer coded = made(kind, parameter, maker, coding);
  std::vector<uint8_t> bytes(coded.data(), coded.data() + coded.size());
  fuzz::check_kind(kind, parameter, bytes);
  for (int changes = 0; choices.any() && changes < 4; ++changes) {
    change(bytes, choices);
    fuzz::check_kind(kind, parameter, bytes);
  }
  return 0;
}
