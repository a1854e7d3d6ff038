// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Lookups in an exported table: in layers of files, the newest of which has a key says what its
// row is. What no file has is what the table's initial program makes of its key.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "inference/row_file.h"
#include "kernels/initial.h"

namespace cpudist::inference {

// Rows that belong together; no bucket is in two files of rows, or in two of gone keys.
using Layer = std::vector<std::shared_ptr<const RowFile>>;

// Which keys there are, and what is read of those that no file has.
struct KeyRules {
  bool open = false;           // every int64 is a key
  bool unknown_zeros = false;  // zeros, not what the initial program makes
};

// Immutable. Thread safety: any number of threads.
class RowTable {
 public:
  // `layers` with the newest first. Throws Error (kInvalidArgument) for files of another dim and
  // for files of one layer that have the same buckets.
  RowTable(std::string name, uint64_t rows, uint64_t dim, uint64_t salt,
           kernels::InitialRows initial, std::vector<Layer> layers, KeyRules rules = {});

  // Rows of `ids` to out [n, dim]. Returns how many have no row in a file. Throws RowOutOfRange and
  // Damage; out may have been written, then. Id is int64_t or int32_t.
  template <typename Id>
  uint64_t lookup(const Id* ids, size_t n, float* out) const;

  uint64_t rows() const { return rows_; }
  uint64_t dim() const { return dim_; }
  void check_all() const;

 private:
  struct Run {
    const RowFile* file = nullptr;
    uint32_t begin = 0;
    uint32_t end = 0;
  };
  // Runs by bucket; empty vectors where the layer has none.
  struct Directory {
    const RowFile* whole = nullptr;
    std::vector<Run> rows;
    std::vector<Run> gone;
  };
  struct Block;

  Directory directory_of(const Layer& layer) const;
  void place(std::vector<Run>& runs, const RowFile& file) const;
  void find(Block& block) const;
  static void search(const std::vector<Run>& runs, Block& block);
  void gather(Block& block, float* out) const;
  void make_missing(const std::vector<int64_t>& keys, const std::vector<size_t>& places,
                    float* out) const;

  std::string name_;
  uint64_t rows_;
  uint64_t dim_;
  uint64_t salt_;
  kernels::InitialRows initial_;
  KeyRules rules_;
  std::vector<Layer> layers_;
  std::vector<Directory> directories_;
};

}  // namespace cpudist::inference
