// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

// long: one class, all that must be

#include "simulator/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace cpudist::simulator {
namespace {

// Whole numbers, so that sums stay exact.
constexpr double kFirstValue = 5.0;
constexpr double kOtherFirstValue = 9.0;  // of one row
constexpr uint64_t kRemoteRows = (uint64_t{1} << 62) - 1;

// Keys that lie far apart: of an open table half of them are negative.
int64_t spread_key(TableKind kind, uint64_t row) {
  if (kind == TableKind::kStatic) return static_cast<int64_t>(row);
  const uint64_t mixed = (row + 1) * 0x9e3779b97f4a7c15u;
  return static_cast<int64_t>(kind == TableKind::kOpen ? mixed : mixed % kRemoteRows);
}

std::string number(double value) {
  std::string text = std::to_string(value);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text;
}

}  // namespace

Model::Model(const Plan& plan)
    : plan_(plan), steps_most_(plan.steps + 4 * kProcesses), trainers_(plan.trainers) {
  for (uint64_t row = 0; row < row_count(); ++row) keys_.push_back(spread_key(plan.table, row));
  if (plan.table == TableKind::kOpen) {
    keys_[shared_row(0)] = std::numeric_limits<int64_t>::min();
    keys_[shared_row(1)] = -1;
    keys_[shared_row(2)] = std::numeric_limits<int64_t>::max();
  }
  for (uint64_t row = 0; row < row_count(); ++row) rows_[keys_[row]] = row;
  first_rows_.assign(row_count(), 0.0f);
  if (!plan.is_remote()) return;
  std::fill(first_rows_.begin(), first_rows_.end(), static_cast<float>(kFirstValue));
  first_rows_[shared_row(1)] = static_cast<float>(kOtherFirstValue);
}

wire::TableSpec Model::table() const {
  wire::TableSpec table{"rows", row_count(), 1, 0};
  if (!plan_.is_remote()) return table;
  table.remote = true;
  table.open = plan_.table == TableKind::kOpen;
  table.rows = table.open ? 1 : kRemoteRows;  // 1: it says nothing
  table.initial = {{kernels::InitialOp::kFill, kFirstValue, 0}};
  const auto other = static_cast<uint64_t>(keys_[shared_row(1)]);
  table.overrides = {{other, other + 1, kOtherFirstValue}};
  return table;
}

size_t Model::element_of(uint32_t rank) const {
  return rank * kProcesses + trainers_[rank].processes.size() - 1;
}

// ---- what trainers do ----

bool Model::start(uint32_t rank) {
  Trainer& trainer = trainers_[rank];
  if (trainer.processes.size() == kProcesses) return false;
  Process process;
  process.rank = rank;
  process.index = trainer.processes.size();
  process.first = trainer.issued;
  process.life = rounds_.size() - 1;
  trainer.processes.push_back(process);
  return true;
}

void Model::end(uint32_t rank) {
  if (!trainers_[rank].processes.empty()) trainers_[rank].processes.back().ended = true;
}

void Model::issue(uint32_t rank, StepRows rows) {
  ++trainers_[rank].issued;
  trainers_[rank].processes.back().steps.push_back(rows);
}

void Model::pushed(uint32_t server, uint32_t rank, uint32_t incarnation,
                   const wire::PushView& push) {
  const size_t process = trainers_[rank].first_of_life + incarnation - 1;
  const size_t own = rank * kProcesses + process;
  Deltas::Push deltas;
  for (const wire::DenseSection& block : push.blocks) {
    for (size_t element = 0; element < element_count(); ++element) {
      float delta = 0;
      std::memcpy(&delta, block.values.data() + element * sizeof delta, sizeof delta);
      if (element == own) deltas.own = delta;
      if (element == own || same(delta, 0) || !wrong_.empty()) continue;
      wrong_ = name_of(rank, process) + " hands on " + number(delta) + " that another has moved";
    }
  }
  for (const wire::TableSection& table : push.tables) {
    for (size_t i = 0; i < table.keys.size(); ++i) {
      deltas.rows[row_of(table.keys[i])] = table.rows[i];
    }
  }
  deltas_.note({server, rank, process}, std::move(deltas));
}

bool Model::has_steps(uint32_t rank, uint64_t count) const {
  return trainers_[rank].issued + count <= steps_most_;
}

void Model::applied(uint32_t rank) {
  Process& process = trainers_[rank].processes.back();
  process.applied = units(process);
}

void Model::applied(const Mark& mark, uint32_t rank) {
  Process& process = trainers_[rank].processes[mark.process];
  process.applied = std::max(process.applied, mark.units);
}

void Model::left(uint32_t rank) {
  Process& process = trainers_[rank].processes.back();
  process.left_after.insert(units(process));
}

Mark Model::mark(uint32_t rank) const {
  const Trainer& trainer = trainers_[rank];
  return {trainer.processes.size() - 1, units(trainer.processes.back())};
}

void Model::in_round(uint32_t rank, uint64_t round, const std::vector<std::vector<float>>& seen,
                     std::optional<float> before) {
  Process& process = trainers_[rank].processes.back();
  const std::string who = name_of(rank, trainers_[rank].processes.size() - 1);
  if (!process.rounds.empty() && round <= process.rounds.back() && wrong_.empty()) {
    wrong_ = who + ": round " + std::to_string(round) + " after " +
             std::to_string(process.rounds.back());
  }
  process.rounds.push_back(round);
  Round& known = rounds_.back()[round];
  if (known.members.empty()) known.seen = seen;
  const auto group_of = [&](uint32_t one) { return plan_.groups.empty() ? 0 : plan_.groups[one]; };
  if (!known.members.empty() && group_of(*known.members.begin()) != group_of(rank) &&
      wrong_.empty()) {
    wrong_ = who + " shares a round with another group";
  }
  if (known.seen != seen && wrong_.empty()) {
    wrong_ = who + " has other values after round " + std::to_string(round) + " than trainer " +
             std::to_string(*known.members.begin());
  }
  known.members.insert(rank);
  if (before) known.before[rank] = *before;
}

// ---- what a sum says ----

bool Model::same(double found, double expected) const {
  return std::abs(found - expected) < (exchanges() ? Deltas::kTolerance : 1e-3);
}

double Model::value_of(const Process& process, uint64_t step) const {
  if (!plan_.in_rounds()) return kGradient;
  const Round& round = rounds_[process.life].at(process.rounds[step]);
  return kGradient / static_cast<double>(round.members.size());
}

double Model::sum(const Process& process, uint64_t steps) const {
  double total = 0;
  for (uint64_t step = 0; step < steps; ++step) total += value_of(process, step);
  return total;
}

double Model::shared_sum(const Process& process, uint64_t steps) const {
  double total = 0;
  for (uint64_t step = 0; step < steps; ++step) {
    if (process.steps[step] != StepRows::kNone) total += value_of(process, step);
  }
  return total;
}

double Model::moved(const Process& process, uint32_t server, uint64_t count, uint64_t row) const {
  if (exchanges()) return deltas_.row(way(process, server), count, row);
  if (row >= shared_row(0)) return shared_sum(process, count);
  const uint64_t step = row - step_row(process.rank, process.first);
  const bool there = step < count && process.steps[step] == StepRows::kOwn;
  return there ? value_of(process, step) : 0;
}

std::set<uint64_t> Model::named(const Process& process, uint32_t server, uint64_t count,
                                const std::vector<uint32_t>& owners) const {
  if (exchanges()) return deltas_.named(way(process, server), count);
  std::set<uint64_t> rows;
  const auto add = [&](uint64_t row) {
    if (owners[row] == server) rows.insert(row);
  };
  for (uint64_t step = 0; step < count; ++step) {
    if (process.steps[step] == StepRows::kOwn) add(step_row(process.rank, process.first + step));
    if (process.steps[step] == StepRows::kNone) continue;
    for (size_t which = 0; which < kSharedRows; ++which) add(shared_row(which));
  }
  return rows;
}

std::optional<uint64_t> Model::units_in(const Process& process, uint32_t server,
                                        const Values& values,
                                        const std::vector<uint32_t>& owners) const {
  if (exchanges()) return exchanges_in(process, server, values, owners);
  return steps_in(process, -values.dense[server][process.rank * kProcesses + process.index]);
}

std::optional<uint64_t> Model::exchanges_in(const Process& process, uint32_t server,
                                            const Values& values,
                                            const std::vector<uint32_t>& owners) const {
  const double there = -values.dense[server][process.rank * kProcesses + process.index];
  const Way to = way(process, server);
  const auto has_rows_of = [&](uint64_t count) {
    for (uint64_t step = 0; step < process.steps.size(); ++step) {
      const uint64_t row = step_row(process.rank, process.first + step);
      if (owners[row] != server) continue;
      if (!same(first_rows_[row] - values.rows[row], deltas_.row(to, count, row))) return false;
    }
    return true;
  };
  std::optional<uint64_t> found;
  for (uint64_t count = 0; count <= deltas_.count(to); ++count) {
    if (!same(deltas_.own(to, count), there)) continue;
    if (has_rows_of(count) || !found) found = count;
  }
  return found;
}

std::optional<uint64_t> Model::steps_in(const Process& process, double value) const {
  const uint64_t most = plan_.in_rounds() ? process.rounds.size() : process.steps.size();
  double total = 0;
  for (uint64_t steps = 0; steps <= most; ++steps) {
    if (same(total, value)) return steps;
    if (steps < most) total += value_of(process, steps);
  }
  return std::nullopt;
}

std::string Model::name_of(uint32_t rank, size_t index) {
  return "trainer " + std::to_string(rank) + ", process " + std::to_string(index + 1);
}

// ---- what must be ----

std::string Model::check_cut(const Values& values, const std::vector<uint32_t>& owners,
                             const std::map<uint32_t, Mark>& marks) const {
  return check(values, owners, &marks);
}

std::string Model::check_end(const Values& values, const std::vector<uint32_t>& owners) const {
  return check(values, owners, nullptr);
}

std::string Model::check(const Values& values, const std::vector<uint32_t>& owners,
                         const std::map<uint32_t, Mark>* marks) const {
  if (exchanges() && !wrong_.empty()) return wrong_;
  std::vector<double> totals(kSharedRows);
  std::set<uint64_t> made;
  for (uint32_t rank = 0; rank < plan_.trainers; ++rank) {
    for (const Process& process : trainers_[rank].processes) {
      std::vector<uint64_t> found;
      std::string wrong = check_process(rank, process.index, values, owners, marks, &found);
      if (wrong.empty()) wrong = check_rows(rank, process.index, values, owners, found);
      if (wrong.empty() && exchanges()) {
        wrong = check_handed_on(process, owners, marks == nullptr);
      }
      if (!wrong.empty()) return name_of(rank, process.index) + ": " + wrong;
      for (size_t which = 0; which < kSharedRows; ++which) {
        const uint64_t row = shared_row(which);
        totals[which] += moved(process, owners[row], found[owners[row]], row);
      }
      for (uint32_t server = 0; server < plan_.servers; ++server) {
        made.merge(named(process, server, found[server], owners));
      }
    }
  }
  for (size_t which = 0; which < kSharedRows; ++which) {
    const uint64_t row = shared_row(which);
    const double there = first_rows_[row] - values.rows[row];
    if (same(there, totals[which])) continue;
    return "a row of all on server " + std::to_string(owners[row]) + ": found " + number(there) +
           ", expected " + number(totals[which]);
  }
  if (!plan_.is_remote() || values.made == made.size()) return {};
  return "servers have " + std::to_string(values.made) + " rows, expected those " +
         std::to_string(made.size()) + " that were pushed";
}

std::string Model::check_process(uint32_t rank, size_t index, const Values& values,
                                 const std::vector<uint32_t>& owners,
                                 const std::map<uint32_t, Mark>* marks,
                                 std::vector<uint64_t>* found) const {
  const Process& process = trainers_[rank].processes[index];
  const Mark* mark = nullptr;
  if (marks != nullptr && marks->contains(rank)) mark = &marks->at(rank);
  const std::string what = exchanges() ? " exchanges" : " steps";
  for (uint32_t server = 0; server < plan_.servers; ++server) {
    const double there = -values.dense[server][rank * kProcesses + index];
    const std::optional<uint64_t> units_there = units_in(process, server, values, owners);
    const std::string on = "server " + std::to_string(server) + " has ";
    if (!units_there) {
      return on + number(there) + ", which is no sum of its first" + what + ", of " +
             std::to_string(units(process));
    }
    std::string wrong = marks == nullptr || !process.had.empty()
                            ? refusal(process, *units_there, server)
                            : refusal_at_cut(process, *units_there, server, mark);
    if (!wrong.empty()) {
      return on + std::to_string(*units_there) + what + ", expected " + wrong;
    }
    found->push_back(*units_there);
  }
  if (!process.had.empty()) return {};
  // A push goes to all servers, and none before the one before it is everywhere.
  const auto [least, most] = std::minmax_element(found->begin(), found->end());
  const uint64_t apart = exchanges() ? 1 : plan_.max_merge;
  if (*most - *least <= apart) return {};
  return "servers have from " + std::to_string(*least) + " to " + std::to_string(*most) + what +
         ", expected at most " + std::to_string(apart) + " more on one than on another";
}

std::string Model::refusal(const Process& process, uint64_t found, uint32_t server) const {
  if (!process.had.empty()) {
    if (is_same(process, server, found, process.had[server])) return {};
    return std::to_string(process.had[server]) + ", as there were when servers came back";
  }
  if (!process.ended) {
    if (is_same(process, server, found, units(process))) return {};
    return "all " + std::to_string(units(process));
  }
  if (found >= process.applied) return {};
  return "at least " + std::to_string(process.applied);
}

std::string Model::refusal_at_cut(const Process& process, uint64_t found, uint32_t server,
                                  const Mark* mark) const {
  if (mark != nullptr && process.index == mark->process) {
    if (is_same(process, server, found, mark->units)) return {};
    return "the " + std::to_string(mark->units) + " before its marker";
  }
  if (mark != nullptr && process.index > mark->process) {
    return is_same(process, server, found, 0) ? "" : "none, as an earlier process has marked";
  }
  // Servers may have lost it before it has heard of that.
  const bool lost = (process.ended || plan_.may_lose()) && found >= process.applied;
  const bool left =
      std::any_of(process.left_after.begin(), process.left_after.end(),
                  [&](uint64_t after) { return is_same(process, server, after, found); });
  if (lost || left) return {};
  return "those before it had left, as it did not mark";
}

std::string Model::check_rows(uint32_t rank, size_t index, const Values& values,
                              const std::vector<uint32_t>& owners,
                              const std::vector<uint64_t>& found) const {
  const Process& process = trainers_[rank].processes[index];
  for (uint64_t step = 0; step < process.steps.size(); ++step) {
    const uint64_t row = step_row(rank, process.first + step);
    const uint32_t owner = owners[row];
    const double there = first_rows_[row] - values.rows[row];
    const double expected = moved(process, owner, found[owner], row);
    if (same(there, expected)) continue;
    return "the row of its step " + std::to_string(step + 1) + " on server " +
           std::to_string(owner) + ": found " + number(there) + ", expected " + number(expected);
  }
  return {};
}

std::string Model::check_handed_on(const Process& process, const std::vector<uint32_t>& owners,
                                   bool all) const {
  const auto compare = [&](double found, double expected, const std::string& what) -> std::string {
    const bool whole = all && !process.ended && process.had.empty();
    if (whole ? same(found, expected) : found < expected + Deltas::kTolerance) return {};
    return "it has handed on " + number(found) + " of " + what + ", and has moved " +
           number(expected);
  };
  const auto row_sum = [&](uint64_t row) {
    const Way to = way(process, owners[row]);
    return deltas_.row(to, deltas_.count(to), row);
  };
  double shared = 0;
  for (size_t step = 0; step < process.steps.size(); ++step) {
    const StepRows rows = process.steps[step];
    if (rows != StepRows::kNone) shared += kGradient;
    const double own = rows == StepRows::kOwn ? kGradient : 0;
    const std::string wrong = compare(row_sum(step_row(process.rank, process.first + step)), own,
                                      "the row of its step " + std::to_string(step + 1));
    if (!wrong.empty()) return wrong;
  }
  for (size_t which = 0; which < kSharedRows; ++which) {
    const std::string wrong = compare(row_sum(shared_row(which)), shared, "a row of all");
    if (!wrong.empty()) return wrong;
  }
  const double element = kGradient * static_cast<double>(process.steps.size());
  for (uint32_t server = 0; server < plan_.servers; ++server) {
    const Way to = way(process, server);
    const std::string wrong = compare(deltas_.own(to, deltas_.count(to)), element, "its element");
    if (!wrong.empty()) return wrong;
  }
  return {};
}

std::string Model::check_own(uint32_t rank, const Values& own, const Values& values) const {
  const std::string who = "trainer " + std::to_string(rank) + " has ";
  for (uint32_t server = 0; server < plan_.servers; ++server) {
    for (size_t element = 0; element < element_count(); ++element) {
      const double found = own.dense[server][element];
      const double there = values.dense[server][element];
      if (same(found, there)) continue;
      return who + number(found) + " of an element of server " + std::to_string(server) +
             ", expected " + number(there);
    }
  }
  for (uint64_t row = 0; row < row_count(); ++row) {
    if (same(own.rows[row], values.rows[row])) continue;
    return who + number(own.rows[row]) + " of row " + std::to_string(row) + ", expected " +
           number(values.rows[row]);
  }
  return {};
}

bool Model::has_shared_rows() const {
  for (const Trainer& trainer : trainers_) {
    for (const Process& process : trainer.processes) {
      if (exchanges() || process.steps.empty() || process.steps[0] == StepRows::kNone) continue;
      const bool had =
          !process.had.empty() && *std::min_element(process.had.begin(), process.had.end()) > 0;
      if (had || (process.had.empty() && process.applied > 0)) return true;
    }
  }
  return false;
}

uint64_t Model::steps_after(const Process& process, uint32_t server, uint64_t round) const {
  if (!process.had.empty()) return process.had[server];
  const auto& rounds = process.rounds;
  return static_cast<uint64_t>(std::upper_bound(rounds.begin(), rounds.end(), round) -
                               rounds.begin());
}

std::string Model::check_rounds(const std::vector<uint32_t>& owners) const {
  if (!wrong_.empty() || plan_.strategy != Strategy::kSync) return wrong_;
  const uint64_t told = rounds_told();
  for (const auto& [number, round] : rounds_.back()) {
    if (number >= told) break;
    const std::string wrong = check_round(number, round, owners[shared_row(0)]);
    if (!wrong.empty()) return "round " + std::to_string(number) + ": " + wrong;
  }
  return {};
}

// All who made a round below this one were told of it. Who is lost may have been in another one.
uint64_t Model::rounds_told() const {
  uint64_t told = UINT64_MAX;
  for (const Trainer& trainer : trainers_) {
    for (const Process& process : trainer.processes) {
      if (!process.had.empty() || process.rounds.size() == process.steps.size()) continue;
      told = std::min(told, process.rounds.empty() ? 0 : process.rounds.back() + 1);
    }
  }
  return told;
}

std::string Model::check_round(uint64_t round_number, const Round& round, uint32_t owner) const {
  double before = 0;
  for (uint32_t rank = 0; rank < plan_.trainers; ++rank) {
    const auto& processes = trainers_[rank].processes;
    for (size_t index = 0; index < processes.size(); ++index) {
      const Process& process = processes[index];
      if (round_number > 0) {
        before += shared_sum(process, steps_after(process, owner, round_number - 1));
      }
      for (uint32_t server = 0; server < plan_.servers; ++server) {
        const double expected = sum(process, steps_after(process, server, round_number));
        const double seen = -round.seen[server][rank * kProcesses + index];
        if (same(seen, expected)) continue;
        return "trainers see " + number(seen) + " of " + name_of(rank, index) + " on server " +
               std::to_string(server) + ", expected " + number(expected);
      }
    }
  }
  for (const auto& [rank, value] : round.before) {
    if (round_number == 0 || same(-value, before)) continue;
    return "trainer " + std::to_string(rank) + " has pulled " + number(-value) +
           " of a row of all before it, expected " + number(before);
  }
  return {};
}

void Model::roll_back(const Values* values, const std::vector<uint32_t>& owners) {
  for (uint32_t rank = 0; rank < plan_.trainers; ++rank) {
    auto& processes = trainers_[rank].processes;
    for (size_t index = 0; index < processes.size(); ++index) {
      Process& process = processes[index];
      process.ended = true;
      std::vector<uint64_t> had(plan_.servers);
      for (uint32_t server = 0; server < plan_.servers && values != nullptr; ++server) {
        had[server] = units_in(process, server, *values, owners).value_or(0);  // it was checked
      }
      process.had = had;
    }
    trainers_[rank].first_of_life = processes.size();
  }
  rounds_.emplace_back();
}

}  // namespace cpudist::simulator
