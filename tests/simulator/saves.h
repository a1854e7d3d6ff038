// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The cuts of one simulation: who has marked which, whether all servers have written it, what is in
// the files, and the newest one, which servers that come back are given.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "client/param_set.h"
#include "simulator/cluster.h"
#include "simulator/model.h"
#include "wire/cut.h"

namespace cpudist::simulator {

// Thread safety: none of its own; it is for threads that run one at a time.
class Saves {
 public:
  // A cut that is taken and written: a snapshot that a trainer may rely on.
  struct Saved {
    uint64_t number = 0;
    std::vector<wire::CutStatus> told;  // by server
    Values values;
  };

  Saves(const Plan& plan, const Model& model, const wire::ParamSetLayout& layout, EventLog& events)
      : plan_(plan), model_(model), layout_(layout), events_(events) {}

  static std::string name_of(uint64_t number) { return "c" + std::to_string(number); }
  uint64_t begin() { return ++number_; }
  uint64_t begun() const { return number_; }
  void mark(uint64_t number, uint32_t rank, const Mark& mark) { marks_[number][rank] = mark; }
  const Mark& mark_of(uint64_t number, uint32_t rank) const { return marks_.at(number).at(rank); }

  // ---- trainer 0 ----
  // It has heard that all servers have taken it.
  void taken(uint64_t number);
  void forget() { pending_ = 0; }  // that trainer has ended
  bool pending() const { return pending_ != 0; }
  // Asks the servers how far they are. Returns what is wrong; empty: nothing. `failed`: a number to
  // be abandoned, or 0.
  std::string poll(client::ParamSet& set, Cluster& cluster, uint64_t* failed);
  const std::optional<Saved>& newest() const { return newest_; }
  uint64_t committed() const { return committed_; }
  // Has new servers load the newest one; the dense values to be stored are returned by server.
  void load(client::ParamSet& set, const std::vector<Disk>& disks) const;

 private:
  std::string commit(Cluster& cluster);
  Values read(uint32_t server, const Disk& disk, const wire::CutStatus& told, uint64_t number,
              Values values) const;

  const Plan& plan_;
  const Model& model_;
  const wire::ParamSetLayout& layout_;
  EventLog& events_;
  uint64_t number_ = 0;  // of the last cut
  std::map<uint64_t, std::map<uint32_t, Mark>> marks_;
  uint64_t pending_ = 0;
  std::map<uint32_t, wire::CutStatus> done_;  // of the pending one
  std::optional<Saved> newest_;
  uint64_t committed_ = 0;
};

}  // namespace cpudist::simulator
