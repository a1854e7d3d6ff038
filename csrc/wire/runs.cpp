// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "wire/runs.h"

#include <string>

#include "wire/bulk.h"
#include "wire/fields.h"

namespace cpudist::wire {

template <typename V>
void fields(V& v, Of<V, RunRef>& m) {
  v.number(m.table);
  v.number(m.dim);
  v.number(m.begin);
  v.number(m.end);
  v.number(m.rows);
  v.number(m.state_elements);
  v.flag32(m.counts, "counts of a run of rows");
  v.flag32(m.alike, "a run of rows that are alike");
  v.zero();
  v.number(m.step);
}

template <typename V>
void fields(V& v, Of<V, FetchRun>& m) {
  v.number(m.table);
  v.zero();
  v.number(m.begin);
  v.number(m.end);
}

namespace {

constexpr uint64_t kHeadBytes = 56;

uint64_t weight_count(const RunRef& ref) {
  return checked_multiply(ref.alike ? 1 : ref.rows, ref.dim);
}

uint64_t run_bytes(const RunRef& ref) {
  uint64_t size = checked_add(kHeadBytes, section_bytes(weight_count(ref), sizeof(float)));
  const uint64_t state = checked_multiply(ref.rows, ref.state_elements);
  size = checked_add(size, section_bytes(state, sizeof(float)));
  return ref.counts ? checked_add(size, section_bytes(ref.rows, sizeof(uint32_t))) : size;
}

const TableSpec& checked_table(uint32_t table, uint64_t begin, uint64_t end,
                               const ParamSetLayout& layout) {
  uint64_t next_id = 0;
  check_id(table, layout.tables.size(), &next_id, "table");
  const TableSpec& spec = layout.tables[table];
  if (spec.open) refuse("a run of keys of an open table, which has no first one");
  if (begin <= end && end <= spec.rows && end - begin <= kRunKeysMax) return spec;
  refuse("a run of rows " + std::to_string(begin) + " .. " + std::to_string(end) +
         " of a table of " + std::to_string(spec.rows));
}

}  // namespace

FilledRun layout_run(const RunRef& ref, const Pool& pool) {
  BulkWriter writer(run_bytes(ref), pool);
  Put<BulkWriter> put(&writer);
  fields(put, ref);
  FilledRun filled;
  filled.weights = writer.section<float>(weight_count(ref));
  float* const state = writer.section<float>(ref.rows * ref.state_elements);
  filled.state = ref.state_elements > 0 ? state : nullptr;
  if (ref.counts) filled.counts = writer.section<uint32_t>(ref.rows);
  filled.payload = writer.finish();
  return filled;
}

RunView decode_run(std::span<const uint8_t> payload, const ParamSetLayout& layout) {
  Reader reader(payload);
  RunView run;
  Take take(&reader);
  fields(take, run.ref);
  const RunRef& ref = run.ref;
  check_equal(ref.dim, checked_table(ref.table, ref.begin, ref.end, layout).dim, "dim of a table");
  if (ref.rows > ref.end - ref.begin) {
    refuse(std::to_string(ref.rows) + " rows in a run of " + std::to_string(ref.end - ref.begin) +
           " keys");
  }
  run.weights = reader.array<float>(weight_count(ref));
  run.state = reader.array<float>(checked_multiply(ref.rows, ref.state_elements));
  if (ref.counts) run.counts = reader.array<uint32_t>(ref.rows);
  reader.expect_end();
  return run;
}

Buffer encode(const FetchRun& message) { return write_message(message); }

FetchRun decode_fetch_run(std::span<const uint8_t> payload, const ParamSetLayout& layout) {
  const auto request = read_message<FetchRun>(payload);
  checked_table(request.table, request.begin, request.end, layout);
  return request;
}

}  // namespace cpudist::wire
