// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What trainers that step by themselves hand on: each push of each process, as it came to each
// server for the first time. What servers have is the sum of the first pushes of each process, all
// of each; which of them that are, the elements say that no other process moves.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

namespace cpudist::simulator {

// A process of a trainer, and the server that its pushes came to.
struct Way {
  uint32_t server = 0;
  uint32_t rank = 0;
  size_t process = 0;
  friend bool operator<(const Way& a, const Way& b) {
    return std::tie(a.server, a.rank, a.process) < std::tie(b.server, b.rank, b.process);
  }
};

// Values are negated movements, as they travel. Thread safety: none of its own.
class Deltas {
 public:
  // Two sums are the same: more than their additions round off is a delta.
  static constexpr double kTolerance = 0.02;

  struct Push {
    double own = 0;                   // of the element that this process alone moves
    std::map<uint64_t, double> rows;  // named by it
  };

  void note(const Way& way, Push push) { pushes_[way].push_back(std::move(push)); }
  uint64_t count(const Way& way) const { return of(way).size(); }
  // After the first `pushes`, or as many of them as have come.
  double own(const Way& way, uint64_t pushes) const;
  double row(const Way& way, uint64_t pushes, uint64_t row) const;
  std::set<uint64_t> named(const Way& way, uint64_t pushes) const;
  // Whether what is between so many first pushes moves nothing.
  bool same(const Way& way, uint64_t some, uint64_t others) const;

 private:
  const std::vector<Push>& of(const Way& way) const;

  std::map<Way, std::vector<Push>> pushes_;
};

}  // namespace cpudist::simulator
