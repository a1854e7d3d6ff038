// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The plain model: which steps there were, and what values must be after them. Every step of every
// trainer is of one process of it, has a row of its own, and adds to one element of each server and
// to rows that all share; so values say which steps are in them, how often, and with which divisor.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "simulator/deltas.h"
#include "simulator/plan.h"
#include "wire/layout.h"
#include "wire/push.h"

namespace cpudist::simulator {

// Values of one moment: dense elements by server, rows of the table.
struct Values {
  std::vector<std::vector<float>> dense;
  std::vector<float> rows;
  uint64_t made = 0;  // of a table that is not static: rows that take memory
};

// How far a trainer was when it marked a cut: so many steps of this process, or exchanges where it
// steps by itself.
struct Mark {
  size_t process = 0;
  uint64_t units = 0;
};

// Which rows a step names.
enum class StepRows : uint8_t {
  kOwn,     // one that no other step names, and those of all
  kShared,  // those of all
  kNone,
};

// Thread safety: none of its own; it is for threads that run one at a time.
class Model {
 public:
  static constexpr size_t kProcesses = 10;  // of a trainer, one after another
  static constexpr size_t kSharedRows = 3;
  // Of one element; twelve, so that means over two, three and four trainers are whole numbers.
  static constexpr float kGradient = 12.0f;

  explicit Model(const Plan& plan);

  uint64_t row_count() const { return plan_.trainers * steps_most_ + kSharedRows; }
  uint64_t element_count() const { return plan_.trainers * kProcesses; }
  uint64_t step_row(uint32_t rank, uint64_t step) const { return rank * steps_most_ + step; }
  uint64_t shared_row(size_t which) const { return plan_.trainers * steps_most_ + which; }
  size_t element_of(uint32_t rank) const;
  const std::vector<int64_t>& keys() const { return keys_; }  // by row
  uint64_t row_of(int64_t key) const { return rows_.at(key); }
  wire::TableSpec table() const;
  const std::vector<float>& first_rows() const { return first_rows_; }  // what rows begin with

  // ---- what trainers do ----
  // A process of it starts; false where there were too many.
  bool start(uint32_t rank);
  void end(uint32_t rank);  // it has ended, whatever it was at
  // A step that is about to be made.
  void issue(uint32_t rank, StepRows rows);
  // An exchange that is about to begin, of a trainer that steps by itself.
  void exchange(uint32_t rank) { ++trainers_[rank].processes.back().exchanges; }
  // A server has read this push of such a trainer for the first time.
  void pushed(uint32_t server, uint32_t rank, uint32_t incarnation, const wire::PushView& push);
  uint64_t issued(uint32_t rank) const { return trainers_[rank].issued; }
  bool has_steps(uint32_t rank, uint64_t count) const;  // rows are left for so many
  // All that it has issued is applied on every server.
  void applied(uint32_t rank);
  void applied(const Mark& mark, uint32_t rank);
  void left(uint32_t rank);
  Mark mark(uint32_t rank) const;
  // In rounds: its last step was one of this round, after which it saw these dense values, and
  // before which, where it took part all the while, this value of the first row of all.
  void in_round(uint32_t rank, uint64_t round, const std::vector<std::vector<float>>& seen,
                std::optional<float> before);

  // ---- what must be ----
  // What is wrong; empty: nothing. `owners`: the server of each row.
  // A cut, by who has marked it.
  std::string check_cut(const Values& values, const std::vector<uint32_t>& owners,
                        const std::map<uint32_t, Mark>& marks) const;
  // Whether servers have rows of all, so that no step makes them.
  bool has_shared_rows() const;
  // All trainers have finished.
  std::string check_end(const Values& values, const std::vector<uint32_t>& owners) const;
  // Then a trainer that steps by itself has the values of the servers.
  std::string check_own(uint32_t rank, const Values& own, const Values& values) const;
  // What trainers have seen of rounds.
  std::string check_rounds(const std::vector<uint32_t>& owners) const;

  // Servers have the values of this moment again, which were checked; null: those from the start.
  void roll_back(const Values* values, const std::vector<uint32_t>& owners);

 private:
  // Units are its steps, or its exchanges where it steps by itself.
  struct Process {
    uint32_t rank = 0;
    size_t index = 0;
    uint64_t first = 0;  // step
    std::vector<StepRows> steps;
    uint64_t exchanges = 0;
    uint64_t applied = 0;              // units, on every server, at least
    std::vector<uint64_t> rounds;      // of its steps, as far as it was told
    std::set<uint64_t> left_after{0};  // units
    bool ended = false;
    size_t life = 0;            // of the servers
    std::vector<uint64_t> had;  // units by server, once servers have come back
  };
  struct Trainer {
    uint64_t issued = 0;
    size_t first_of_life = 0;  // process
    std::vector<Process> processes;
  };
  struct Round {
    std::set<uint32_t> members;
    std::vector<std::vector<float>> seen;
    std::map<uint32_t, float> before;  // of the first shared row
  };
  bool exchanges() const { return plan_.strategy == Strategy::kGeo; }
  uint64_t units(const Process& process) const {
    return exchanges() ? process.exchanges : process.steps.size();
  }
  Way way(const Process& process, uint32_t server) const {
    return {server, process.rank, process.index};
  }
  // Whether a server has the same after so many units of a process.
  bool is_same(const Process& process, uint32_t server, uint64_t some, uint64_t others) const {
    return exchanges() ? deltas_.same(way(process, server), some, others) : some == others;
  }
  bool same(double found, double expected) const;
  double value_of(const Process& process, uint64_t step) const;
  // Of its first `steps` steps, which move its element; of a row of all.
  double sum(const Process& process, uint64_t steps) const;
  double shared_sum(const Process& process, uint64_t steps) const;
  // How many units of a process a server has, by what that alone moves: the most that it can be.
  std::optional<uint64_t> units_in(const Process& process, uint32_t server, const Values& values,
                                   const std::vector<uint32_t>& owners) const;
  std::optional<uint64_t> exchanges_in(const Process& process, uint32_t server,
                                       const Values& values,
                                       const std::vector<uint32_t>& owners) const;
  std::optional<uint64_t> steps_in(const Process& process, double value) const;
  // What a server that has so many units of a process has of it in a row.
  double moved(const Process& process, uint32_t server, uint64_t count, uint64_t row) const;
  // And which rows these name.
  std::set<uint64_t> named(const Process& process, uint32_t server, uint64_t count,
                           const std::vector<uint32_t>& owners) const;
  static std::string name_of(uint32_t rank, size_t index);

  std::string check(const Values& values, const std::vector<uint32_t>& owners,
                    const std::map<uint32_t, Mark>* marks) const;
  std::string check_process(uint32_t rank, size_t index, const Values& values,
                            const std::vector<uint32_t>& owners,
                            const std::map<uint32_t, Mark>* marks,
                            std::vector<uint64_t>* found) const;
  std::string refusal(const Process& process, uint64_t found, uint32_t server) const;
  std::string refusal_at_cut(const Process& process, uint64_t found, uint32_t server,
                             const Mark* mark) const;
  std::string check_rows(uint32_t rank, size_t index, const Values& values,
                         const std::vector<uint32_t>& owners,
                         const std::vector<uint64_t>& found) const;
  // A trainer that steps by itself: servers have all that it has moved, where it is still there,
  // and nothing else.
  std::string check_handed_on(const Process& process, const std::vector<uint32_t>& owners,
                              bool all) const;
  std::string check_round(uint64_t number, const Round& round, uint32_t owner) const;
  uint64_t rounds_told() const;
  // How many steps of a process there are after a round of this life.
  uint64_t steps_after(const Process& process, uint32_t server, uint64_t round) const;

  const Plan& plan_;
  const uint64_t steps_most_;  // of a trainer
  std::vector<int64_t> keys_;
  std::map<int64_t, uint64_t> rows_;
  std::vector<float> first_rows_;
  std::vector<Trainer> trainers_;
  Deltas deltas_;
  std::vector<std::map<uint64_t, Round>> rounds_{1};  // by life of the servers
  std::string wrong_;                                 // of what trainers have seen
};

}  // namespace cpudist::simulator
