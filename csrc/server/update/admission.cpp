// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/update/admission.h"

#include "table/row_index.h"

namespace cpudist::server {

void AdmittedKeys::plan(const NamedKeys& keys, const table::AdmissionRule& rule) {
  const size_t count = keys.distinct.size();
  for (const int64_t key : keys.distinct) rule.prefetch(key);
  pushes_.assign(count, 0);
  needed_.assign(count, 0);
  named_in_.assign(count, 0);
  dropped_.assign(keys.inverse.size(), 0);
  for (size_t i = 0; i < count; ++i) {
    if (keys.records[i] == table::RowIndex::kNone) needed_[i] = rule.pushes_until(keys.distinct[i]);
  }
  size_t at = 0;
  for (size_t push = 0; push < keys.ends.size(); ++push) {
    for (; at < keys.ends[push]; ++at) {
      const uint32_t place = keys.inverse[at];
      // A push that names a key twice counts once.
      if (keys.counts[push] != 0 && named_in_[place] != push + 1) {
        ++pushes_[place];
        named_in_[place] = push + 1;
      }
      dropped_[at] = static_cast<uint8_t>(pushes_[place] < needed_[place]);
    }
  }
}

void AdmittedKeys::commit(std::span<const int64_t> distinct,
                          table::AdmissionRule* rule) const noexcept {
  for (size_t i = 0; i < needed_.size(); ++i) {
    if (needed_[i] == 0) continue;
    if (makes(i)) {
      rule->note_made(distinct[i], needed_[i] - 1);
    } else {
      rule->note_dropped(distinct[i], pushes_[i]);
    }
  }
}

}  // namespace cpudist::server
