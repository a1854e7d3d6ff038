// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
//
// Records of strangers, and batches made of records.

#include <algorithm>
#include <limits>
#include <random>
#include <span>

#include "support/data_fixture.h"

using namespace cpudist::testing;  // NOLINT
using cpudist::data::Batch;
using cpudist::data::RecordBuffer;

namespace {

Schema mixed() {
  Schema schema = schema_of(Format::kMultiSlot, {ids("a", 1), floats("x", 2), ids("b"), ids("c", 3),
                                                 unused(ids("d")), ids("e"), floats("y", 1)});
  schema.instance_ids = true;
  return schema;
}

// Lines of mixed(), their lists 0 to 3 long and now and then longer than a cache line.
std::vector<std::string> mixed_lines(size_t count) {
  std::mt19937_64 generator(8);
  std::vector<std::string> lines;
  for (size_t i = 0; i < count; ++i) {
    const auto list = [&] {
      const size_t size = generator() % 10 == 0 ? generator() % 100 : generator() % 4;
      std::string text = std::to_string(size);
      for (size_t j = 0; j < size; ++j) text += " " + std::to_string(generator() % 1000);
      return text;
    };
    lines.push_back("1 id" + std::to_string(i) + " 1 " + std::to_string(i) + " 2 " +
                    std::to_string(i) + ".5 -1 " + list() + " 3 1 2 3 " + list() + " " + list() +
                    " 1 0.25");
  }
  return lines;
}

std::vector<uint64_t> words_of(const RecordBuffer& records) {
  std::vector<uint64_t> words;
  for (size_t i = 0; i < records.count(); ++i) {
    const uint64_t* record = records.record(i);
    words.insert(words.end(), record, record + cpudist::data::record_words(record));
  }
  return words;
}

// The number of records, or -1 if they were refused. The copy's end is guarded by the sanitizer.
int64_t checked(const Schema& schema, const std::vector<uint64_t>& words) {
  const auto copy = std::make_unique<uint64_t[]>(words.size());
  std::copy(words.begin(), words.end(), copy.get());
  try {
    return static_cast<int64_t>(check_records(schema, {copy.get(), words.size()}));
  } catch (const cpudist::Error& error) {
    CHECK(error.code() == cpudist::ErrorCode::kProtocol);
    return -1;
  }
}

// What assemble() is to make, slot by slot from the rows.
void check_batch(const Schema& schema, const std::vector<Row>& rows, const Batch& batch) {
  CHECK_EQ(batch.records, rows.size());
  std::vector<int64_t> all_ints;
  std::vector<float> all_floats;
  std::vector<size_t> values;
  size_t int_slot = 0;
  size_t float_slot = 0;
  for (const Slot& slot : schema.slots) {
    if (!slot.used) continue;
    size_t count = 0;
    std::vector<int64_t> offsets{0};
    for (const Row& row : rows) {
      if (slot.kind == SlotKind::kFloat) {
        const auto& own = row.floats[float_slot];
        all_floats.insert(all_floats.end(), own.begin(), own.end());
        count += own.size();
      } else {
        const auto& own = row.ints[int_slot];
        all_ints.insert(all_ints.end(), own.begin(), own.end());
        count += own.size();
        offsets.push_back(static_cast<int64_t>(count));
      }
    }
    (slot.kind == SlotKind::kFloat ? float_slot : int_slot) += 1;
    if (slot.dim == cpudist::data::kAnyNumber) {
      all_ints.insert(all_ints.end(), offsets.begin(), offsets.end());
    }
    values.push_back(count);
  }
  CHECK(batch.values == values);
  CHECK(std::equal(all_ints.begin(), all_ints.end(), batch.ints.data(),
                   batch.ints.data() + batch.ints.size()));
  CHECK(std::equal(all_floats.begin(), all_floats.end(), batch.floats.data(),
                   batch.floats.data() + batch.floats.size()));
  for (size_t i = 0; schema.instance_ids && i < rows.size(); ++i) {
    CHECK_EQ(batch.instance_ids[i], rows[i].instance_id);
  }
}

}  // namespace

TEST(data_batches_follow_the_order_of_their_records) {
  Lines lines(mixed());
  std::vector<Row> rows;
  for (const std::string& line : mixed_lines(500)) rows.push_back(lines.row(line));
  std::mt19937_64 generator(9);
  Batch batch;
  for (const size_t size : {500u, 0u, 1u, 31u, 32u, 33u, 64u, 499u}) {
    for (int round = 0; round < 4; ++round) {
      std::vector<size_t> order(500);
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      if (round > 0) std::shuffle(order.begin(), order.end(), generator);
      order.resize(size);
      std::vector<const uint64_t*> records;
      std::vector<Row> expected;
      for (const size_t i : order) {
        records.push_back(lines.records().record(i));
        expected.push_back(rows[i]);
      }
      cpudist::data::assemble(lines.schema(), records, batch);
      check_batch(lines.schema(), expected, batch);
    }
  }
}

TEST(data_batches_of_integers_or_floats_only) {
  Batch batch;
  for (const Slot& slot : {ids("a"), ids("a", 1), ids("a", 4), floats("a", 1), floats("a", 4)}) {
    Lines lines(schema_of(Format::kMultiSlot, {slot, unused(ids("b"))}));
    std::vector<Row> rows;
    std::vector<const uint64_t*> records;
    for (int i = 0; i < 40; ++i) {
      std::string line = std::to_string(slot.dim);
      for (uint32_t j = 0; j < slot.dim; ++j) line += " " + std::to_string(i + static_cast<int>(j));
      rows.push_back(lines.row(line + " 0"));
    }
    for (size_t i = 0; i < 40; ++i) records.push_back(lines.records().record(i));
    cpudist::data::assemble(lines.schema(), records, batch);
    check_batch(lines.schema(), rows, batch);
  }
}

TEST(data_record_buffers_keep_records) {
  Lines lines(mixed());
  for (const std::string& line : mixed_lines(50)) lines.row(line);
  RecordBuffer copy;
  for (size_t i = 0; i < 50; ++i) copy.append(lines.records().record(i));
  CHECK(words_of(copy) == words_of(lines.records()));
  const size_t capacity = copy.capacity_bytes();
  copy.begin();
  copy.need(1000);
  copy.advance(1000);
  copy.abandon();
  CHECK(words_of(copy) == words_of(lines.records()));
  copy.clear();
  CHECK_EQ(copy.count(), 0u);
  CHECK_EQ(copy.size_words(), 0u);
  CHECK(copy.capacity_bytes() >= capacity);
  copy.append(lines.records().record(7));
  CHECK(read_record(mixed(), copy.record(0)) == read_record(mixed(), lines.records().record(7)));
}

TEST(data_records_cut_or_lengthened_are_refused) {
  Lines lines(mixed());
  for (const std::string& line : mixed_lines(3)) lines.row(line);
  std::vector<uint64_t> words = words_of(lines.records());
  CHECK_EQ(checked(mixed(), words), 3);
  CHECK_EQ(checked(mixed(), {}), 0);
  std::vector<size_t> ends{0};
  for (size_t i = 0; i < 3; ++i) {
    ends.push_back(ends.back() + cpudist::data::record_words(lines.records().record(i)));
  }
  for (size_t size = 0; size < words.size(); ++size) {
    const auto end = std::find(ends.begin(), ends.end(), size);
    const int64_t expected = end == ends.end() ? -1 : end - ends.begin();
    CHECK_EQ(checked(mixed(), {words.begin(), words.begin() + static_cast<ptrdiff_t>(size)}),
             expected);
  }
  words.push_back(0);
  CHECK_EQ(checked(mixed(), words), -1);
}

TEST(data_records_with_changed_words_are_refused_or_valid) {
  Lines lines(mixed());
  for (const std::string& line : mixed_lines(4)) lines.row(line);
  const std::vector<uint64_t> words = words_of(lines.records());
  const uint64_t extremes[] = {
      0, 1, ~0ull, 1ull << 63, 1ull << 32, 0xffffffffull, (7ull << 32) | 9};
  std::mt19937_64 generator(10);
  size_t refused = 0;
  Batch batch;
  for (int round = 0; round < 20000; ++round) {
    std::vector<uint64_t> changed = words;
    uint64_t& word = changed[generator() % changed.size()];
    word = round % 2 == 0 ? extremes[generator() % 7] : word ^ (1ull << (generator() % 64));
    const int64_t found = checked(mixed(), changed);
    if (found < 0) {
      ++refused;
      continue;
    }
    std::vector<const uint64_t*> records;
    for (size_t at = 0; at < changed.size(); at += cpudist::data::record_words(&changed[at])) {
      records.push_back(&changed[at]);
    }
    CHECK_EQ(records.size(), static_cast<size_t>(found));
    cpudist::data::assemble(mixed(), records, batch);
  }
  CHECK(refused > 1000);
}

TEST(data_records_of_other_slots_are_refused) {
  Lines lines(mixed());
  lines.row(mixed_lines(1)[0]);
  Schema other = mixed();
  other.instance_ids = false;
  CHECK_EQ(checked(other, words_of(lines.records())), -1);
  other = mixed();
  other.slots[1].dim = 4;
  CHECK_EQ(checked(other, words_of(lines.records())), -1);
  std::vector<uint64_t> words = words_of(lines.records());
  words.back() |= 1ull << 40;
  CHECK_EQ(checked(mixed(), words), -1);
}
