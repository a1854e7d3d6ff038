// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "data/store/rewrite.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "base/errors.h"
#include "data/store/random.h"

namespace cpudist::data {

namespace {

using Ids = std::span<const uint64_t>;

// Where the values of a record are, by used slot of its kind.
struct Parts {
  std::vector<Ids> ints;
  std::vector<std::span<const float>> floats;
};

class Records {
 public:
  explicit Records(const Schema& schema) {
    for (const Slot& slot : schema.slots) {
      if (!slot.used) continue;
      const bool ints = slot.kind == SlotKind::kInt;
      places_.push_back({ints, (ints ? int_dims_ : float_dims_).size()});
      (ints ? int_dims_ : float_dims_).push_back(slot.dim);
    }
  }

  void split(const uint64_t* record, Parts& parts) const {
    parts.ints.clear();
    parts.floats.clear();
    const uint64_t* at = record + kRecordHeaderWords;
    for (const uint32_t dim : int_dims_) {
      const size_t count = dim == kAnyNumber ? static_cast<size_t>(*at++) : dim;
      parts.ints.emplace_back(at, count);
      at += count;
    }
    const auto* floats = reinterpret_cast<const float*>(at);
    for (const uint32_t dim : float_dims_) {
      parts.floats.emplace_back(floats, dim);
      floats += dim;
    }
  }

  bool of_any_number(size_t int_slot) const { return int_dims_[int_slot] == kAnyNumber; }

  // Gives the values of one used slot to another record.
  void take_slot(size_t used_slot, const Parts& from, Parts& to) const {
    const auto [ints, number] = places_[used_slot];
    if (ints) {
      to.ints[number] = from.ints[number];
    } else {
      to.floats[number] = from.floats[number];
    }
  }

 private:
  struct Place {
    bool ints;
    size_t number;  // among those of its kind
  };
  std::vector<Place> places_;
  std::vector<uint32_t> int_dims_;
  std::vector<uint32_t> float_dims_;
};

class Writer {
 public:
  explicit Writer(const Records& records) : records_(records) {}

  // `more`: of other records, whose values of any number follow.
  void write(uint64_t instance, const Parts& parts, std::span<const Parts> more = {}) {
    size_t ints = 0;
    for (size_t slot = 0; slot < parts.ints.size(); ++slot) ints += words_of(slot, parts, more);
    size_t floats = 0;
    for (const auto& values : parts.floats) floats += values.size();
    const size_t words = kRecordHeaderWords + ints + (floats + 1) / 2;
    if (words >= kRecordWordsLimit) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the records of one instance id have " + std::to_string(words) +
                      " words together, expected fewer than " + std::to_string(kRecordWordsLimit) +
                      "; merge ids of a given number of records only (size=)");
    }
    buffer_.begin();
    buffer_.need(words);
    uint64_t* to = buffer_.cursor();
    to[words - 1] = 0;  // behind an odd number of floats
    *to++ = record_header(words, ints);
    *to++ = instance;
    for (size_t slot = 0; slot < parts.ints.size(); ++slot) {
      if (records_.of_any_number(slot)) *to++ = words_of(slot, parts, more) - 1;
      to = copy(parts.ints[slot], to);
      if (!records_.of_any_number(slot)) continue;
      for (const Parts& other : more) to = copy(other.ints[slot], to);
    }
    auto* bytes = reinterpret_cast<char*>(to);
    for (const auto& values : parts.floats) {
      std::memcpy(bytes, values.data(), values.size_bytes());
      bytes += values.size_bytes();
    }
    finish(words);
  }
  void write(const uint64_t* record) {
    buffer_.append(record);
    if (buffer_.size_words() >= kSlabWords) flush();
  }
  std::vector<Slab> take() {
    if (buffer_.count() > 0) flush();
    return std::move(slabs_);
  }

 private:
  size_t words_of(size_t slot, const Parts& parts, std::span<const Parts> more) const {
    size_t words = parts.ints[slot].size();
    if (!records_.of_any_number(slot)) return words;
    for (const Parts& other : more) words += other.ints[slot].size();
    return words + 1;
  }
  static uint64_t* copy(Ids ids, uint64_t* to) {
    std::copy(ids.begin(), ids.end(), to);
    return to + ids.size();
  }
  void finish(size_t words) {
    buffer_.advance(words);
    buffer_.commit();
    if (buffer_.size_words() >= kSlabWords) flush();
  }
  void flush() {
    slabs_.push_back(make_slab(buffer_));
    buffer_.clear();
  }

  const Records& records_;
  RecordBuffer buffer_;
  std::vector<Slab> slabs_;
};

// Records of one id, by their places in the content.
using Run = std::pair<size_t, size_t>;

struct Grouped {
  std::vector<size_t> places;  // by id, and those of one id in their order
  std::vector<Run> runs;       // in `places`, in the order of their first records
};

Grouped grouped_by_instance(const Order& order) {
  Grouped grouped;
  grouped.places.resize(order.size());
  std::iota(grouped.places.begin(), grouped.places.end(), size_t{0});
  const auto& places = grouped.places;
  std::sort(grouped.places.begin(), grouped.places.end(), [&](size_t a, size_t b) {
    return std::pair(order[a][1], a) < std::pair(order[b][1], b);
  });
  for (size_t begin = 0; begin < places.size();) {
    size_t end = begin + 1;
    while (end < places.size() && order[places[end]][1] == order[places[begin]][1]) ++end;
    grouped.runs.emplace_back(begin, end);
    begin = end;
  }
  std::sort(grouped.runs.begin(), grouped.runs.end(),
            [&](const Run& a, const Run& b) { return places[a.first] < places[b.first]; });
  return grouped;
}

}  // namespace

Merged merged_by_instance(const Schema& schema, const Content& content, size_t size) {
  const Records records(schema);
  const Order order = order_of(content);
  const Grouped grouped = grouped_by_instance(order);
  Writer writer(records);
  Merged merged;
  Parts first;
  std::vector<Parts> more;
  for (const auto& [begin, end] : grouped.runs) {
    if (size > 0 && end - begin != size) {
      merged.left_out += end - begin;
      continue;
    }
    const uint64_t* record = order[grouped.places[begin]];
    if (end - begin == 1) {
      writer.write(record);
      continue;
    }
    records.split(record, first);
    more.resize(end - begin - 1);
    for (size_t i = 0; i < more.size(); ++i) {
      records.split(order[grouped.places[begin + 1 + i]], more[i]);
    }
    writer.write(record[1], first, more);
  }
  merged.slabs = writer.take();
  return merged;
}

std::vector<Slab> with_slots_exchanged(const Schema& schema, const Content& content,
                                       const std::vector<size_t>& used_slots, uint64_t seed) {
  const Records records(schema);
  const Order order = order_of(content);
  Order others = order;
  Random random({seed});
  shuffle(std::span(others), random);
  Writer writer(records);
  Parts own;
  Parts other;
  for (size_t i = 0; i < order.size(); ++i) {
    records.split(order[i], own);
    records.split(others[i], other);
    for (const size_t slot : used_slots) records.take_slot(slot, other, own);
    writer.write(order[i][1], own);
  }
  return writer.take();
}

}  // namespace cpudist::data
