// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Lookups in files of an export: what layers say of a key, in every dtype, from many threads, and
// files that are not what was written.

#include "inference/row_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include "base/crc32c.h"
#include "kernels/quantize.h"
#include "support/check.h"

namespace cpudist::testing {
namespace {

using inference::CheckedBytes;
using inference::Layer;
using inference::RowColumns;
using inference::RowDtype;
using inference::RowFile;
using inference::RowTable;
using kernels::bucket_of;
using kernels::kBucketCount;

constexpr uint64_t kSalt = 0x1234567890abcdef;
constexpr size_t kDim = 5;
constexpr size_t kChunk = 256;
constexpr uint64_t kRows = uint64_t{1} << 50;

using Rows = std::map<int64_t, std::vector<float>>;

kernels::InitialRows initial() {
  const std::vector<kernels::InitialStep> steps = {{kernels::InitialOp::kNormal, 0.0, 1.0}};
  return kernels::InitialRows(steps, {}, kSalt, 7);
}

// A file as Python writes it, but for its header.
struct Written {
  std::vector<uint64_t> memory;  // aligned
  size_t size = 0;
  RowColumns columns;
  uint64_t rows = 0;
  uint32_t first = 0;
  uint32_t last = 0;

  std::span<const std::byte> bytes() const {
    return {reinterpret_cast<const std::byte*>(memory.data()), size};
  }
};

template <typename T>
uint64_t append(std::vector<std::byte>& bytes, const std::vector<T>& values) {
  while (bytes.size() % 8 != 0) bytes.push_back(std::byte{0});
  const uint64_t begin = bytes.size();
  const auto* from = reinterpret_cast<const std::byte*>(values.data());
  bytes.insert(bytes.end(), from, from + values.size() * sizeof(T));
  return begin;
}

void append_weight(std::vector<std::byte>& bytes, RowColumns& columns,
                   const std::vector<float>& values, RowDtype dtype) {
  std::vector<uint16_t> narrow(values.size());
  switch (dtype) {
    case RowDtype::kFloat32:
      columns.weight = append(bytes, values);
      return;
    case RowDtype::kFloat16:
      kernels::to_half(values.data(), narrow.data(), values.size());
      break;
    case RowDtype::kBFloat16:
      kernels::to_bfloat16(values.data(), narrow.data(), values.size());
      break;
    case RowDtype::kInt8: {
      const size_t n = values.size() / kDim;
      std::vector<int8_t> numbers(values.size());
      std::vector<uint16_t> scales(n);
      std::vector<float> wide(n);
      kernels::to_int8(values.data(), n, kDim, numbers.data(), scales.data());
      kernels::from_bfloat16(scales.data(), wide.data(), n);
      columns.scale = append(bytes, wide);
      columns.weight = append(bytes, numbers);
      return;
    }
  }
  columns.weight = append(bytes, narrow);
}

// Rows of buckets [first, last); without a dtype the keys are gone.
Written write(const Rows& rows, uint32_t first, uint32_t last, std::optional<RowDtype> dtype) {
  std::vector<std::pair<uint32_t, int64_t>> order;
  for (const auto& [key, values] : rows) {
    const uint32_t bucket = bucket_of(key, kSalt);
    if (bucket >= first && bucket < last) order.emplace_back(bucket, key);
  }
  std::sort(order.begin(), order.end());
  std::vector<int64_t> keys;
  std::vector<float> values;
  std::vector<int32_t> begins(last - first + 1, 0);
  for (const auto& [bucket, key] : order) {
    keys.push_back(key);
    values.insert(values.end(), rows.at(key).begin(), rows.at(key).end());
    ++begins[bucket - first + 1];
  }
  for (size_t i = 1; i < begins.size(); ++i) begins[i] += begins[i - 1];
  std::vector<std::byte> bytes(24);  // in the place of a header
  Written written;
  written.columns.keys = append(bytes, keys);
  written.columns.bucket_begin = append(bytes, begins);
  if (dtype) append_weight(bytes, written.columns, values, *dtype);
  written.rows = keys.size();
  written.first = first;
  written.last = last;
  written.size = bytes.size();
  written.memory.resize(bytes.size() / 8 + 1);
  std::memcpy(written.memory.data(), bytes.data(), bytes.size());
  return written;
}

std::vector<uint32_t> checksums_of(const Written& written) {
  std::vector<uint32_t> found;
  for (size_t at = 0; at < written.size; at += kChunk) {
    found.push_back(crc32c(written.bytes().data() + at, std::min(kChunk, written.size - at)));
  }
  return found;
}

std::shared_ptr<const RowFile> open(const Written& written, RowDtype dtype,
                                    const std::vector<uint32_t>& checksums) {
  auto bytes = std::make_shared<CheckedBytes>(written.bytes(), checksums, kChunk, "t000-0000");
  return std::make_shared<RowFile>(bytes, written.columns, written.rows, written.first,
                                   written.last, dtype, kDim);
}

std::shared_ptr<const RowFile> open(const Written& written, RowDtype dtype = RowDtype::kFloat32) {
  return open(written, dtype, checksums_of(written));
}

RowTable table_of(std::vector<Layer> layers) {
  return RowTable("users", kRows, kDim, kSalt, initial(), std::move(layers));
}

std::vector<float> numbers(int64_t key, int layer) {
  std::vector<float> values;
  for (size_t i = 0; i < kDim; ++i) {
    values.push_back(static_cast<float>(key % 97) + static_cast<float>(layer) * 0.25f +
                     static_cast<float>(i));
  }
  return values;
}

void check_rows(const RowTable& table, const Rows& expected, const std::vector<int64_t>& ids,
                float error) {
  std::vector<float> out(ids.size() * kDim, NAN);
  const uint64_t missing = table.lookup(ids.data(), ids.size(), out.data());
  uint64_t absent = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto found = expected.find(ids[i]);
    const bool there = found != expected.end();
    absent += there ? 0 : 1;
    std::vector<float> row(kDim);
    if (there) row = found->second;
    if (!there) initial().fill(std::span(&ids[i], 1), kDim, row.data());
    const float largest = *std::max_element(row.begin(), row.end());
    for (size_t j = 0; j < kDim; ++j) {
      CHECK(std::abs(out[i * kDim + j] - row[j]) <= (there ? error * largest : 0.0f));
    }
  }
  CHECK_EQ(missing, absent);
}

template <typename Call>
void check_refused(Call call, const std::string& what) {
  std::string found = "nothing";
  try {
    call();
  } catch (const Error& error) {
    found = error.what();
  }
  if (found.find(what) == std::string::npos) fail(__FILE__, __LINE__, found + ", not " + what);
}

struct Told {
  Rows rows;
  Rows gone;
};

TEST(exported_rows_are_those_of_the_newest_layer) {
  std::mt19937_64 draw(5);
  for (int round = 0; round < (kInstrumented ? 5 : 60); ++round) {
    const int layers = 1 + static_cast<int>(draw() % 4);
    const uint64_t limit = round % 2 == 0 ? 300 : uint64_t{1} << 49;
    std::vector<int64_t> ids;
    for (int i = 0; i < 500; ++i) ids.push_back(static_cast<int64_t>(draw() % limit));
    Rows expected;
    std::vector<Written> files;
    files.reserve(16);
    std::vector<Layer> newest_first;
    for (int number = 0; number < layers; ++number) {
      Told told;
      for (const int64_t id : ids) {
        if (draw() % 3 == 0) told.rows[id] = numbers(id, number);
        if (number > 0 && draw() % 5 == 0) told.gone[id] = numbers(id, number);
      }
      for (const auto& [key, values] : told.gone) expected.erase(key);
      for (const auto& [key, values] : told.rows) expected[key] = values;
      const auto cut = static_cast<uint32_t>(draw() % (kBucketCount + 1));
      files.push_back(write(told.rows, 0, cut, RowDtype::kFloat32));
      files.push_back(write(told.rows, cut, kBucketCount, RowDtype::kFloat32));
      files.push_back(write(told.gone, 0, kBucketCount, std::nullopt));
      Layer layer;
      for (size_t i = files.size() - 3; i < files.size(); ++i) layer.push_back(open(files[i]));
      newest_first.insert(newest_first.begin(), layer);
    }
    const RowTable table = table_of(newest_first);
    check_rows(table, expected, ids, 0.0f);
    check_rows(table, expected, {}, 0.0f);
    table.check_all();
  }
}

TEST(exported_rows_of_open_tables_have_any_key) {
  std::mt19937_64 draw(6);
  Rows rows;
  std::vector<int64_t> ids;
  for (int i = 0; i < 2000; ++i) {
    ids.push_back(static_cast<int64_t>(draw()));
    if (i % 3 != 0) rows[ids.back()] = numbers(i, 1);
  }
  for (const int64_t key : {std::numeric_limits<int64_t>::min(), int64_t{-1}, int64_t{0},
                            std::numeric_limits<int64_t>::max()}) {
    ids.push_back(key);
    rows[key] = numbers(7, 2);
  }
  const Written written = write(rows, 0, kBucketCount, RowDtype::kFloat32);
  const std::vector<Layer> layers = {{open(written)}};
  check_rows(RowTable("users", 1, kDim, kSalt, initial(), layers, {.open = true}), rows, ids, 0.0f);
  check_refused([&] { check_rows(table_of(layers), rows, ids, 0.0f); }, "is outside its");
  // Keys that are in no file.
  const RowTable zeros("users", 1, kDim, kSalt, initial(), layers,
                       {.open = true, .unknown_zeros = true});
  const std::vector<int64_t> unknown = {-12345, ids.front(), ids.back()};
  std::vector<float> out(unknown.size() * kDim, NAN);
  CHECK_EQ(zeros.lookup(unknown.data(), unknown.size(), out.data()), 2u);
  for (size_t i = 0; i < 2 * kDim; ++i) CHECK_EQ(out[i], 0.0f);
  for (size_t i = 0; i < kDim; ++i) CHECK_EQ(out[2 * kDim + i], numbers(7, 2)[i]);
}

TEST(exported_rows_of_fewer_bits_are_near) {
  Rows rows;
  for (int64_t key = 0; key < 400; ++key) rows[key * 3] = numbers(key + 1, 1);
  std::vector<int64_t> ids(1300);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  const std::vector<std::pair<RowDtype, float>> errors = {
      {RowDtype::kFloat16, 0x1p-11f}, {RowDtype::kBFloat16, 0x1p-8f}, {RowDtype::kInt8, 0.0041f}};
  for (const auto& [dtype, error] : errors) {
    const Written written = write(rows, 0, kBucketCount, dtype);
    check_rows(table_of({{open(written, dtype)}}), rows, ids, error);
  }
}

TEST(exported_arrays_have_a_row_for_every_key) {
  Written written;
  written.memory.resize(4096, 0);
  auto* values = reinterpret_cast<float*>(written.memory.data()) + 2;
  for (size_t i = 0; i < 100 * kDim; ++i) values[i] = static_cast<float>(i);
  written.size = 8 + 100 * kDim * 4;
  written.columns.weight = 8;
  written.rows = 100;
  const auto file = open(written);
  const RowTable table("days", 100, kDim, kSalt, initial(), {{file}});
  const std::vector<int32_t> ids = {0, 99, 7, 7};
  std::vector<float> out(ids.size() * kDim);
  CHECK_EQ(table.lookup(ids.data(), ids.size(), out.data()), 0);
  for (size_t i = 0; i < ids.size(); ++i) {
    CHECK_EQ(out[i * kDim + 2], static_cast<float>(ids[i] * int{kDim} + 2));
  }
  for (const int32_t id : {-1, 100}) {
    check_refused([&] { table.lookup(&id, 1, out.data()); }, "outside its 100 rows");
  }
  check_refused([&] { table_of({{file}}); }, "rows without keys");
}

TEST(exported_files_that_were_changed_are_found_out) {
  Rows rows;
  std::vector<int64_t> ids;
  for (int64_t key = 0; ids.size() < 12; ++key) {
    rows[key] = numbers(key, 0);
    if (bucket_of(key, kSalt) < 64) ids.push_back(key);
  }
  const Written right = write(rows, 0, 64, RowDtype::kFloat32);
  const auto checksums = checksums_of(right);
  std::vector<float> expected(ids.size() * kDim);
  std::vector<float> out(expected.size());
  table_of({{open(right)}}).lookup(ids.data(), ids.size(), expected.data());
  size_t found = 0;
  for (size_t at = 0; at < right.size * 8; ++at) {
    Written changed = right;
    auto* bytes = reinterpret_cast<uint8_t*>(changed.memory.data());
    bytes[at / 8] = static_cast<uint8_t>(bytes[at / 8] ^ (1u << at % 8));
    try {
      const RowTable table = table_of({{open(changed, RowDtype::kFloat32, checksums)}});
      table.lookup(ids.data(), ids.size(), out.data());
      CHECK(out == expected);  // what was changed was not needed
      table.check_all();
    } catch (const inference::Damage& damage) {
      CHECK_EQ(damage.file(), std::string("t000-0000"));
      ++found;
    }
  }
  CHECK_EQ(found, right.size * 8);
}

TEST(exported_files_of_impossible_layouts_are_refused) {
  Rows rows;
  for (int64_t key = 0; key < 40; ++key) rows[key] = numbers(key, 0);
  const Written right = write(rows, 0, kBucketCount, RowDtype::kFloat32);
  const auto refused = [&](auto change, const char* what) {
    Written changed = right;
    change(changed);
    check_refused([&] { open(changed); }, what);
  };
  refused([](Written& w) { w.columns.weight = w.size; }, "column weight");
  refused([](Written& w) { w.columns.weight += 1; }, "column weight");
  refused([](Written& w) { w.columns.keys = ~uint64_t{7}; }, "column keys");
  refused([](Written& w) { w.columns.bucket_begin = w.size / 4 * 4; }, "column bucket_begin");
  refused([](Written& w) { w.rows -= 1; }, "do not divide");
  refused([](Written& w) { w.rows = ~uint64_t{0}; }, "rows");
  refused([](Written& w) { w.columns.scale = 8; }, "no such rows");
  refused([](Written& w) { w.last = kBucketCount + 1; }, "no such rows");
  refused([](Written& w) { w.columns.keys = 0; }, "no such rows");
  const auto file = open(right);
  check_refused([&] { table_of({{file, file}}); }, "two files have bucket");
  check_refused([&] { RowTable("users", kRows, kDim + 1, kSalt, initial(), {{file}}); },
                "expected 6");
}

TEST(exported_rows_are_looked_up_by_many_threads) {
  Rows rows;
  std::vector<int64_t> ids;
  for (int64_t key = 0; key < 300; ++key) {
    rows[key * 2] = numbers(key, 0);
    ids.push_back(key);
  }
  const Written written = write(rows, 0, kBucketCount, RowDtype::kFloat32);
  const RowTable table = table_of({{open(written)}});
  std::vector<std::exception_ptr> failed(4);
  std::vector<std::thread> threads;
  for (auto& problem : failed) {
    threads.emplace_back([&] {
      try {
        for (int round = 0; round < 5; ++round) check_rows(table, rows, ids, 0.0f);
      } catch (...) {
        problem = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& one : failed) {
    if (one) std::rethrow_exception(one);
  }
}

}  // namespace
}  // namespace cpudist::testing
