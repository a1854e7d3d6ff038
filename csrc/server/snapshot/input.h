// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Rows of a snapshot as they are read: nothing is used before the checksums of the manifest agree.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/file_calls.h"
#include "table/table.h"
#include "wire/snapshot/load.h"

namespace cpudist::server {

// Thread safety: const members.
class LoadedRows {
 public:
  // Reads what `load` names in `directory`. Throws Error(kSnapshot) where that cannot be had,
  // kSnapshotCorrupt where it is not what was written, naming the file and what was found;
  // std::bad_alloc.
  LoadedRows(files::Calls& calls, const std::string& directory, const wire::Load& load,
             const table::RecordShape& shape);

  const table::RowColumns& columns() const { return columns_; }

 private:
  using Bytes = std::unique_ptr<uint8_t[]>;

  std::array<Bytes, wire::kLoadColumns> memory_;
  table::RowColumns columns_;
};

}  // namespace cpudist::server
