// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What lossy pushes hold back.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "base/buffer.h"
#include "kernels/aligned.h"
#include "wire/messages.h"

namespace cpudist::client {

// What was rounded off of gradients that were sent, by row and block: the next gradient takes it
// along. Memory: the rows that were ever pushed, and 4 bytes per row of a table.
//
// Thread safety: one caller at a time, the one that sends pushes.
class Residues {
 public:
  explicit Residues(const wire::ParamSetLayout& layout);
  // Adds what is held back to the gradients of a packed push, rounds them to what travels, and
  // holds back the difference. A push of weight 0 is only rounded.
  void round(Buffer* push);

 private:
  struct Rows {
    kernels::AlignedBuffer<uint32_t> slots;  // by key, 0: none yet
    std::vector<kernels::AlignedBuffer<float>> slabs;
    uint32_t count = 0;
  };
  static constexpr uint32_t kSlabRows = 4096;

  float* find(Rows& rows, int64_t key, uint32_t dim);
  void round_table(const wire::TableSection& section, float* gradients);
  void round_block_of(const wire::DenseSection& section, float* gradient);

  const wire::ParamSetLayout& layout_;
  std::map<uint32_t, Rows> tables_;
  std::map<uint32_t, kernels::AlignedBuffer<float>> blocks_;
};

}  // namespace cpudist::client
