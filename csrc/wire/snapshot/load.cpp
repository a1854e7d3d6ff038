// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "wire/snapshot/load.h"

#include "wire/cut.h"
#include "wire/fields.h"

namespace cpudist::wire {

template <typename V>
void fields(V& v, Of<V, Load>& m) {
  v.number(m.table);
  v.choice(m.kind, LoadKind::kRows, LoadKind::kVersion, "kind of load");
  v.number(m.version.round);
  v.number(m.version.samples);
  v.number(m.version.steps);
  v.number(m.seed);
  v.number(m.table_step);
  v.text(m.snapshot, kSnapshotNameBytesMax);
  v.text(m.file, kSnapshotNameBytesMax);
  v.number(m.file_bytes);
  v.number(m.row_begin);
  v.number(m.row_end);
  for (auto& offset : m.offsets) v.number(offset);
  const uint64_t count = v.count64(m.checksums);
  v.elements(m.checksums, count);
}

namespace {

void check_column(const Load& load, LoadColumn column, uint64_t row_bytes) {
  const uint64_t offset = load.offsets[static_cast<size_t>(column)];
  if (offset == 0) return;
  const uint64_t end = checked_add(offset, checked_multiply(load.row_end, row_bytes));
  if (end > load.file_bytes) refuse("rows that lie behind the end of their file");
}

void check_rows(const Load& load, const ParamSetLayout& layout) {
  if (!is_snapshot_name(load.snapshot) || !is_snapshot_name(load.file)) {
    refuse("a name that no snapshot and no file of one has");
  }
  if (load.checksums.size() !=
      load.file_bytes / kChecksumBytes + (load.file_bytes % kChecksumBytes == 0 ? 0 : 1)) {
    refuse(std::to_string(load.checksums.size()) + " checksums of a file of " +
           std::to_string(load.file_bytes) + " bytes");
  }
  for (const LoadColumn needed : {LoadColumn::kKeys, LoadColumn::kWeight}) {
    if (load.offsets[static_cast<size_t>(needed)] == 0) refuse("rows without keys or weights");
  }
  const TableSpec& spec = layout.tables[load.table];
  const uint64_t state_elements =
      kernels::state_elements(layout.configs[spec.group], spec.dim, spec.dim);
  check_column(load, LoadColumn::kKeys, sizeof(int64_t));
  check_column(load, LoadColumn::kWeight, spec.dim * sizeof(float));
  check_column(load, LoadColumn::kState, state_elements * sizeof(float));
  check_column(load, LoadColumn::kCount, sizeof(uint32_t));
  check_column(load, LoadColumn::kLastSeen, sizeof(uint32_t));
  check_column(load, LoadColumn::kAverage, spec.dim * sizeof(float));
}

}  // namespace

Buffer encode(const Load& message) { return write_message(message); }

Load decode_load(std::span<const uint8_t> payload, const ParamSetLayout& layout) {
  Load load = read_message<Load>(payload);
  if (load.kind == LoadKind::kVersion) return load;
  if (load.table >= layout.tables.size()) refuse("rows of a table that there is not");
  if (load.row_begin > load.row_end) refuse("rows that end before they begin");
  if (load.row_begin < load.row_end) check_rows(load, layout);
  return load;
}

}  // namespace cpudist::wire
