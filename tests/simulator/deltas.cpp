// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "simulator/deltas.h"

#include <algorithm>
#include <cmath>

namespace cpudist::simulator {

const std::vector<Deltas::Push>& Deltas::of(const Way& way) const {
  static const std::vector<Push> none;
  const auto found = pushes_.find(way);
  return found == pushes_.end() ? none : found->second;
}

double Deltas::own(const Way& way, uint64_t pushes) const {
  const auto& all = of(way);
  double sum = 0;
  for (size_t i = 0; i < std::min<size_t>(pushes, all.size()); ++i) sum += all[i].own;
  return sum;
}

double Deltas::row(const Way& way, uint64_t pushes, uint64_t row) const {
  const auto& all = of(way);
  double sum = 0;
  for (size_t i = 0; i < std::min<size_t>(pushes, all.size()); ++i) {
    const auto found = all[i].rows.find(row);
    if (found != all[i].rows.end()) sum += found->second;
  }
  return sum;
}

std::set<uint64_t> Deltas::named(const Way& way, uint64_t pushes) const {
  const auto& all = of(way);
  std::set<uint64_t> rows;
  for (size_t i = 0; i < std::min<size_t>(pushes, all.size()); ++i) {
    for (const auto& [row, delta] : all[i].rows) rows.insert(row);
  }
  return rows;
}

bool Deltas::same(const Way& way, uint64_t some, uint64_t others) const {
  const auto is_nothing = [](double delta) { return std::abs(delta) < kTolerance; };
  if (!is_nothing(own(way, some) - own(way, others))) return false;
  const std::set<uint64_t> rows = named(way, std::max(some, others));
  return std::all_of(rows.begin(), rows.end(), [&](uint64_t one) {
    return is_nothing(row(way, some, one) - row(way, others, one));
  });
}

}  // namespace cpudist::simulator
