// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a process of a trainer that steps by itself has in the place of a queue: its exchange of
// deltas with the servers, every so many steps, and all that it has moved before it leaves.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/geo/exchange.h"
#include "client/param_set.h"

namespace cpudist::simulator {

class World;

// Thread safety: none of its own; it is for threads that run one at a time.
class Mover {
 public:
  // `table` is bound where it is static; else empty. `weights`: base of every dense parameter, as
  // servers have them. All but the set outlive it.
  Mover(World& world, uint32_t rank, std::shared_ptr<client::ParamSet> set,
        std::vector<float>& table, std::vector<void*> weights);

  // One step on rows that were looked up; dense parameters have made it. Exchanges where it is
  // time, and works on the exchange that is under way.
  void step(const client::TableGradient& gradient);
  // Until servers have all that this process has moved, and it what others have.
  void hand_on_all();
  // An exchange of all that it has moved has begun; the marker of a cut stands behind it.
  void begin_to_hand_on();
  void mark_cut(uint64_t number, const std::string& name, uint64_t wait_ms);
  std::optional<client::CutAnswer> cut_answer() { return exchange_.cut_answer(); }

 private:
  void begin(bool whole);
  void finish();

  World& world_;
  const uint32_t rank_;
  const std::shared_ptr<client::ParamSet> set_;
  std::vector<float>& table_;
  const std::vector<void*> weights_;
  std::vector<uint32_t> counts_;  // of a static table: updates of each row
  client::GeoExchange exchange_;
  int64_t steps_ = 0;
  uint64_t since_ = 0;  // steps, the last exchange
  bool idle_ = true;
};

}  // namespace cpudist::simulator
