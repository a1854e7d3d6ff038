// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What lossy pushes hold back.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "client/cache/budget.h"
#include "client/cache/row_places.h"
#include "kernels/aligned.h"
#include "wire/messages.h"

namespace cpudist::client {

// What was rounded off of gradients that were sent, by row and block: the next gradient takes it
// along. Memory: the rows of static tables that were ever pushed, and 4 bytes per row of a table;
// of remote ones those that were pushed lately, within a limit.
//
// Thread safety: one caller at a time, the one that sends pushes.
class Residues {
 public:
  explicit Residues(const wire::ParamSetLayout& layout,
                    uint64_t limit_bytes = CacheLimits::kResidueBytes);
  // Before the payloads of a push are rounded: what was not pushed for longest goes, if there is
  // more than the limit, whatever the number of servers is. Returns how many rows went.
  uint64_t begin();
  // Adds what is held back to the gradients of a packed push, rounds them to what travels, and
  // holds back the difference. A push of weight 0 is only rounded.
  void round(Buffer* push);

  // ---- for snapshots: what is held back, and what another process held back ----
  struct Held {
    std::vector<int64_t> keys;
    std::vector<float> values;  // [keys, dim]
  };
  Held rows_of(uint32_t table);
  std::span<const float> block(uint32_t block) const;  // empty if nothing ever was
  void clear();
  // Throws kRowOutOfRange; nothing has changed.
  void put_rows(uint32_t table, std::span<const int64_t> keys, const float* values);
  void put_block(uint32_t block, const float* values);

 private:
  struct Rows {
    kernels::AlignedBuffer<uint32_t> slots;  // by key, 0: none yet
    std::vector<kernels::AlignedBuffer<float>> slabs;
    uint32_t count = 0;
  };
  // Those pushed since half of the limit was full go on; the others were pushed before that.
  struct RecentRows {
    explicit RecentRows(uint32_t dim) : recent(dim), earlier(dim) {}
    RowPlaces recent;
    RowPlaces earlier;
    uint64_t moved = 0;  // of the earlier ones, which are recent again
  };
  static constexpr uint32_t kSlabRows = 4096;

  float* find(Rows& rows, int64_t key, uint32_t dim);
  float* find(RecentRows& rows, int64_t key, uint32_t dim);
  // Where what is held back of each row of a table is.
  void find_all(uint32_t table, std::span<const int64_t> keys, std::span<float*> held);
  void round_table(const wire::TableSection& section, float* gradients);
  void round_block_of(const wire::DenseSection& section, float* gradient);

  const wire::ParamSetLayout& layout_;
  const uint64_t limit_bytes_;
  std::map<uint32_t, Rows> tables_;  // static ones
  std::map<uint32_t, RecentRows> remote_;
  std::map<uint32_t, kernels::AlignedBuffer<float>> blocks_;
};

}  // namespace cpudist::client
