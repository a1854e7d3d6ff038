// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// threads: none
// optimized: yes
// long: one model
//
// The cut of a snapshot over random schedules: the rules of a server as they are, between trainers,
// queues and links that are a model. Whatever order things come in, what the opener takes for a
// snapshot has on all servers the pushes of the same steps of every trainer, those before its
// marker, and nobody waits for ever. Who takes a marker back, so that nobody is held by another's
// evaluation, is not asked for it again before all who are missing have pushed. Mistakes that are
// planted are found. Trainers that come back
// to rounds are not in it: tests/native/client/cut.cpp has them. Rounds, losses and deadlines are
// only here; under Async tests/native/client/simulated_cuts.cpp has the clients and servers
// themselves.

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "server/snapshot/markers.h"
#include "support/check.h"

namespace cpudist::testing::cut_model {
namespace {

using server::Markers;

enum class Mode { kSync, kGroups, kArrivals, kBounded };
enum class Mistake {
  kNone,
  kMergePastMarker,  // a push of behind the marker joins those before it
  kNoDigest,         // the opener does not compare what servers say
  kNoAnnouncement,   // the opener's group waits for its push, and it for their markers
  kReaderStays,      // others' pushes wait for a gradient whose trainer waits for them
  kRefusedStays,     // as kReaderStays, where a server refuses a marker that another has
  kReaderReturns,    // as soon as one server's cut is over, while its trainer waits for another's
  kEarlyCapture,     // the trainer's own state is of the step before
  kLeaverStays,      // the cut waits for a marker of who has left
  kForgetsRefusal,   // after one marker was refused, others of the same number are taken
  kBackStays,        // a marker that was taken back counts
  kAsksAtOnce,       // who has taken his back is asked for it by the next reply
  kMarksUnasked,     // and gives it again before any
};

constexpr uint32_t kTrainersMax = 4;
constexpr uint32_t kServersMax = 3;
using Counts = std::array<int, kTrainersMax>;

struct Op {
  enum Kind { kPush, kMark, kAnnounce, kAbandon, kLeave, kJoin } kind = kPush;
  int first = 0;  // steps of a push
  int last = 0;
  uint64_t number = 0;
  bool named = false;
};

struct Answer {
  bool taken = false;
  uint64_t digest = 0;
  uint64_t wanted = 0;
  bool taken_back = false;
};

enum class Way { kIdle, kSent, kParked, kAnswered, kReceived };

struct Trainer {
  bool alive = true;
  bool member = true;
  bool done = false;
  int limit = 0;
  int step = 0;
  uint32_t incarnation = 1;
  uint64_t wanted = 0;  // by the replies to the last push
  uint64_t marked = 0;  // the last number
  uint64_t again = 0;   // of the marker that was taken back last
  bool asked = false;   // for it, since
  bool evaluates = false;
  std::deque<Op> queue;
  std::optional<Op> flight;
  std::array<Way, kServersMax> way{};
  std::array<Answer, kServersMax> answers{};
  std::map<uint64_t, int> captured;  // step by number
  int computing_on = 0;              // which gradient is the next
};

struct Taken {
  Counts applied{};
  std::vector<uint32_t> marked;
};

struct Served {
  Markers markers;
  Counts applied{};  // last step, by trainer
  std::array<bool, kTrainersMax> member{};
  std::array<std::optional<Op>, kTrainersMax> waiting;
  std::array<std::optional<uint64_t>, kTrainersMax> read;     // as Arrivals::readers_
  std::array<std::optional<uint64_t>, kTrainersMax> excused;  // as Arrivals::excused_
  std::array<uint64_t, kTrainersMax> marked_at{};
  std::array<bool, kTrainersMax> to_drop{};
  std::array<std::deque<uint64_t>, kTrainersMax> backs;  // on their way: numbers
  std::array<uint64_t, kTrainersMax> back_of{};          // number that was taken back last
  std::array<Counts, kTrainersMax> at_back{};            // what was applied then
  bool writing = false;                                  // the snapshot before
  uint64_t version = 0;
  std::map<uint64_t, Taken> taken;
};

struct Plan {
  Mode mode = Mode::kArrivals;
  bool leaves = false;
  bool losses = false;
  bool deadlines = false;
  bool busy = false;   // writers take their time, or are another set's
  bool backs = false;  // trainers evaluate, and take markers back
  Mistake mistake = Mistake::kNone;
};

struct Found {
  uint64_t opened = 0;
  uint64_t committed = 0;
  uint64_t taken_back = 0;  // markers
  uint64_t again = 0;       // of them, that were given again
  uint64_t over_bound = 0;  // gradients older than the bound, as they may be
  std::string wrong;        // empty: nothing
};

class World {
 public:
  World(const Plan& plan, uint64_t seed) : plan_(plan), random_(seed) {
    trainers_.resize(1 + below(kTrainersMax));
    servers_.resize(1 + below(kServersMax));
    merge_ = 1 + below(3);
    queue_size_ = bounded() ? 1 : 1 + below(3);
    every_ = 1 + below(3);
    bound_ = trainers_.size() - 1 + below(3);
    const int limit = 3 + static_cast<int>(below(5));
    for (uint32_t r = 0; r < trainers_.size(); ++r) {
      trainers_[r].limit = in_rounds() ? limit : 2 + static_cast<int>(below(6));
      group_.push_back(plan.mode == Mode::kGroups ? below(2) : 0);
      for (Served& server : servers_) admit(server, r, true);
    }
  }

  Found run() {
    while (found_.wrong.empty()) {
      collect();
      if (moves_.empty()) break;
      moves_[below(moves_.size())]();
    }
    for (const Trainer& trainer : trainers_) {
      if (trainer.alive && !trainer.done) note("a schedule is stuck");
    }
    if (!disturbed() && found_.committed != found_.opened) note("an undisturbed cut was not taken");
    return found_;
  }

 private:
  bool bounded() const { return plan_.mode == Mode::kBounded; }
  bool in_rounds() const { return plan_.mode == Mode::kSync || plan_.mode == Mode::kGroups; }
  bool disturbed() const {
    return plan_.leaves || plan_.losses || plan_.deadlines || plan_.busy || plan_.backs;
  }
  uint64_t below(uint64_t count) { return (random_() >> 11) % count; }
  bool chance(uint64_t in) { return below(in) == 0; }
  void note(const char* what) {
    if (found_.wrong.empty()) found_.wrong = what;
  }

  // ---- what may happen next ----
  void collect() {
    moves_.clear();
    for (uint32_t r = 0; r < trainers_.size(); ++r) collect_trainer(r);
    for (uint32_t s = 0; s < servers_.size(); ++s) {
      for (uint32_t r = 0; r < trainers_.size(); ++r) {
        if (servers_[s].to_drop[r]) moves_.push_back([=, this] { drop(s, r); });
        if (!servers_[s].backs[r].empty()) moves_.push_back([=, this] { take_back(s, r); });
      }
      if (plan_.deadlines && servers_[s].markers.open() && chance(20)) {
        moves_.push_back([=, this] { end_cut(s, false); });
      }
      if (servers_[s].writing) moves_.push_back([=, this] { servers_[s].writing = false; });
    }
    if (!moves_.empty()) return;
    for (uint32_t r = 0; r < trainers_.size(); ++r) {  // who waits does so at last
      if (may_take_back(r)) moves_.push_back([=, this] { ask_back(r); });
    }
  }

  void collect_trainer(uint32_t r) {
    Trainer& t = trainers_[r];
    for (uint32_t s = 0; s < servers_.size(); ++s) {
      if (t.way[s] == Way::kSent) moves_.push_back([=, this] { deliver(s, r); });
      if (t.way[s] == Way::kAnswered) moves_.push_back([=, this] { receive(s, r); });
    }
    if (!t.alive) {
      if (!to_drop(r)) moves_.push_back([=, this] { restart(r); });
      return;
    }
    if (t.done) return;
    if (t.evaluates) return moves_.push_back([&t] { t.evaluates = false; });
    if (plan_.backs && chance(30)) moves_.push_back([&t] { t.evaluates = true; });
    if (chance(4) && may_take_back(r)) moves_.push_back([=, this] { ask_back(r); });
    if (!t.flight && !t.queue.empty()) moves_.push_back([=, this] { send(r); });
    const bool idle = !t.flight && t.queue.empty();
    if (may_step(t, idle)) moves_.push_back([=, this] { compute(r); });
    if (t.step >= t.limit && idle && t.member) {
      moves_.push_back([=, this] { queue_op(r, {.kind = Op::kLeave}); });
    }
    if (!t.member && idle) moves_.push_back([=, this] { come_back(r); });
    if (plan_.losses && r != 0 && chance(60)) moves_.push_back([=, this] { lose(r); });
  }

  bool may_take_back(uint32_t r) const {
    const Trainer& t = trainers_[r];
    if (!plan_.backs || !t.alive || !t.flight || t.flight->kind != Op::kMark) return false;
    for (const Served& server : servers_) {
      if (!server.backs[r].empty()) return false;
    }
    return true;
  }

  bool may_step(const Trainer& t, bool idle) const {
    if (!t.member || t.step >= t.limit) return false;
    if (in_rounds() || bounded()) return idle;
    const auto pushes = std::count_if(t.queue.begin(), t.queue.end(),
                                      [](const Op& op) { return op.kind == Op::kPush; });
    return static_cast<uint64_t>(pushes) < queue_size_;
  }

  bool to_drop(uint32_t r) const {
    return std::any_of(servers_.begin(), servers_.end(),
                       [r](const Served& server) { return server.to_drop[r]; });
  }

  // ---- trainers ----
  void queue_op(uint32_t r, const Op& op) { trainers_[r].queue.push_back(op); }

  void compute(uint32_t r) {
    Trainer& t = trainers_[r];
    if (plan_.leaves && !in_rounds() && !t.flight && t.queue.empty() && chance(8)) {
      queue_op(r, {.kind = Op::kLeave});
      return;
    }
    ++t.step;
    queue_op(r, {.kind = Op::kPush, .first = t.step, .last = t.step});
    if (!in_rounds()) end_step(r);
  }

  // Between two steps: whether to mark, and whether trainer 0 asks for a snapshot.
  void end_step(uint32_t r) {
    Trainer& t = trainers_[r];
    if (plan_.mode == Mode::kSync) {
      if (t.step % static_cast<int>(every_) == 0) mark(r, static_cast<uint64_t>(t.step), r == 0);
      return;
    }
    const bool again = t.again != 0 && t.wanted == t.again;
    if (t.wanted > t.marked || again) {
      if (again && !t.asked) note("a trainer marks again unasked");
      if (again) ++found_.again;
      t.again = again ? 0 : t.again;
      mark(r, t.wanted, r == 0, again);
      return;
    }
    if (r != 0 || saving_ || !chance(3)) return;
    const bool announces = in_rounds() && plan_.mistake != Mistake::kNoAnnouncement;
    if (announces && t.step + 1 >= t.limit) return;
    saving_ = true;
    ++number_;
    if (announces) {
      ++found_.opened;
      queue_op(r, {.kind = Op::kAnnounce, .number = number_, .named = true});
    } else {
      mark(r, number_, true);
    }
  }

  void mark(uint32_t r, uint64_t number, bool named, bool again = false) {
    Trainer& t = trainers_[r];
    if (named && !again &&
        (!in_rounds() || plan_.mode == Mode::kSync || plan_.mistake == Mistake::kNoAnnouncement)) {
      ++found_.opened;
    }
    t.marked = number;
    t.captured[number] = plan_.mistake == Mistake::kEarlyCapture ? t.step - 1 : t.step;
    queue_op(r, {.kind = Op::kMark, .number = number, .named = named});
  }

  void send(uint32_t r) {
    Trainer& t = trainers_[r];
    Op op = t.queue.front();
    t.queue.pop_front();
    if (op.kind == Op::kPush) {
      for (uint64_t merged = 1; merged < merge_ && !in_rounds(); ++merged) {
        auto next = t.queue.begin();
        if (plan_.mistake == Mistake::kMergePastMarker && next != t.queue.end() &&
            next->kind == Op::kMark) {
          ++next;
        }
        if (next == t.queue.end() || next->kind != Op::kPush) break;
        op.last = next->last;
        t.queue.erase(next);
      }
    }
    t.flight = op;
    for (uint32_t s = 0; s < servers_.size(); ++s) t.way[s] = Way::kSent;
  }

  void receive(uint32_t s, uint32_t r) {
    Trainer& t = trainers_[r];
    t.way[s] = Way::kReceived;
    for (uint32_t other = 0; other < servers_.size(); ++other) {
      if (t.way[other] != Way::kReceived) return;
    }
    const Op op = *t.flight;
    t.flight.reset();
    t.way = {};
    if (op.kind == Op::kPush) take_wish(t);
    if (op.kind == Op::kLeave) {
      t.member = false;
      t.done = t.step >= t.limit;
    }
    if (op.kind == Op::kJoin) t.member = true;
    if (op.kind == Op::kPush && in_rounds()) end_step(r);
    if (op.kind == Op::kMark) judge(r, op);
  }

  void take_wish(Trainer& t) {
    t.wanted = 0;
    for (uint32_t s = 0; s < servers_.size(); ++s) {
      t.wanted = std::max(t.wanted, t.answers[s].wanted);
    }
    t.asked = t.asked || (t.again != 0 && t.wanted == t.again);
  }

  void ask_back(uint32_t r) {
    for (Served& server : servers_) server.backs[r].push_back(trainers_[r].flight->number);
  }

  // It may come before the marker, or when that was given again.
  void take_back(uint32_t s, uint32_t r) {
    Served& server = servers_[s];
    const uint64_t number = server.backs[r].front();
    server.backs[r].pop_front();
    const Markers before = server.markers;
    if (!server.markers.take_back(r, number)) return;
    if (plan_.mistake == Mistake::kBackStays) server.markers = before;
    server.back_of[r] = number;
    server.at_back[r] = server.applied;
    answer(s, r, {.taken_back = true});
  }

  // Whether the marker was taken back, on all servers or on some.
  bool was_taken_back(uint32_t r, const Op& op) {
    Trainer& t = trainers_[r];
    uint32_t taken_back = 0;
    for (uint32_t s = 0; s < servers_.size(); ++s) taken_back += t.answers[s].taken_back ? 1 : 0;
    if (taken_back == 0) return false;
    ++found_.taken_back;
    t.again = 0;
    if (taken_back < servers_.size()) {
      if (op.named) saving_ = false;
      queue_op(r, {.kind = Op::kAbandon, .number = op.number});
      return true;
    }
    t.again = op.number;
    t.asked = false;
    if (plan_.mistake != Mistake::kMarksUnasked) t.wanted = 0;
    return true;
  }

  // What a trainer makes of the answers to its marker.
  void judge(uint32_t r, const Op& op) {
    if (was_taken_back(r, op)) return;
    const Trainer& t = trainers_[r];
    bool taken = true;
    for (uint32_t s = 0; s < servers_.size(); ++s) {
      taken = taken && t.answers[s].taken;
      if (plan_.mistake != Mistake::kNoDigest) {
        taken = taken && t.answers[s].digest == t.answers[0].digest;
      }
    }
    if (op.named) {
      saving_ = false;
      if (taken) commit(op.number);
      return;
    }
    const auto committed = commits_.find(op.number);
    if (committed == commits_.end()) return;
    const std::vector<uint32_t>& members = committed->second;
    if (std::find(members.begin(), members.end(), r) != members.end() && !taken) {
      note("a trainer does not know of a snapshot that it is in");
    }
  }

  void commit(uint64_t number) {
    ++found_.committed;
    const Taken& first = servers_[0].taken.at(number);
    commits_[number] = first.marked;
    for (const Served& server : servers_) {
      const Taken& taken = server.taken.at(number);
      if (taken.marked != first.marked) note("servers differ in who has marked");
      for (uint32_t r = 0; r < trainers_.size(); ++r) {
        if (taken.applied[r] != first.applied[r]) note("a snapshot is torn");
      }
      for (const uint32_t r : taken.marked) {
        if (taken.applied[r] != trainers_[r].captured.at(number)) {
          note("a snapshot is not of the step of a trainer's own state");
        }
      }
    }
  }

  void come_back(uint32_t r) { queue_op(r, {.kind = Op::kJoin}); }

  void lose(uint32_t r) {
    Trainer& t = trainers_[r];
    t.alive = false;
    t.queue.clear();
    for (Served& server : servers_) server.to_drop[r] = true;
  }

  void restart(uint32_t r) {
    Trainer& t = trainers_[r];
    const int limit = t.limit;
    const uint32_t incarnation = t.incarnation + 1;
    const uint64_t marked = number_;  // what it saw before is not its own
    const auto captured = t.captured;
    t = Trainer{};
    t.captured = captured;
    t.limit = limit;
    t.incarnation = incarnation;
    t.marked = marked;
    t.member = false;
  }

  // ---- servers ----
  void admit(Served& server, uint32_t r, bool at_start) {
    server.member[r] = true;
    at_start ? server.markers.add(r) : server.markers.join(r);
    if (bounded()) server.read[r] = server.version;
  }

  void answer(uint32_t s, uint32_t r, Answer answer = {}) {
    const Markers& markers = servers_[s].markers;
    if (trainers_[r].way[s] != Way::kParked) return;  // only where a marker stays by mistake
    answer.wanted = plan_.mistake == Mistake::kAsksAtOnce ? markers.number() : markers.wanted();
    if (answer.wanted != 0) check_wish(s, r, answer.wanted);
    trainers_[r].answers[s] = answer;
    trainers_[r].way[s] = Way::kAnswered;
  }

  // Who has taken a marker back is not asked for it while somebody may hold it up as before.
  void check_wish(uint32_t s, uint32_t r, uint64_t number) {
    const Served& server = servers_[s];
    if (server.back_of[r] != number) return;
    const std::vector<uint32_t> missing = server.markers.missing();
    for (const uint32_t other : missing) {
      if (server.applied[other] == server.at_back[r][other]) {
        note("a trainer is asked again before all who are missing have pushed");
      }
    }
  }

  void deliver(uint32_t s, uint32_t r) {
    Served& server = servers_[s];
    const Op& op = *trainers_[r].flight;
    trainers_[r].way[s] = Way::kParked;
    switch (op.kind) {
      case Op::kPush:
        server.waiting[r] = op;
        in_rounds() ? complete_round(s, group_[r]) : apply_due(s);
        return;
      case Op::kMark:
      case Op::kAnnounce:
        return take_marker(s, r, op);
      case Op::kAbandon:
        server.markers.refuse(op.number);
        if (server.markers.number() == op.number) end_cut(s, false);
        return answer(s, r);
      case Op::kLeave:
        take_out(s, r);
        return answer(s, r);
      case Op::kJoin:
        admit(server, r, false);
        return answer(s, r);
    }
  }

  void take_marker(uint32_t s, uint32_t r, const Op& op) {
    Served& server = servers_[s];
    wire::Cut cut;
    cut.number = op.number;
    if (op.named) cut.name = "a";
    const bool excuses = op.kind == Op::kMark && plan_.mistake != Mistake::kReaderStays;
    if (excuses && plan_.mistake != Mistake::kRefusedStays) excuse(s, r);
    const bool writing = !server.markers.open() && server.writing;
    if (writing || server.markers.refusal(cut)) {
      if (plan_.mistake != Mistake::kForgetsRefusal) server.markers.refuse(cut.number);
      return answer(s, r);
    }
    if (op.kind == Op::kAnnounce) {
      server.markers.announce(r, cut, {});
      return answer(s, r);
    }
    server.markers.mark({r, trainers_[r].incarnation, 1}, cut, {});
    if (excuses) excuse(s, r);
    look(s);
  }

  void excuse(uint32_t s, uint32_t r) {
    Served& server = servers_[s];
    if (!server.read[r]) return;
    server.marked_at[r] = server.version;
    server.excused[r] = server.read[r];
    server.read[r].reset();
    apply_due(s);
  }

  void take_out(uint32_t s, uint32_t r) {
    Served& server = servers_[s];
    server.member[r] = false;
    server.read[r].reset();
    server.excused[r].reset();
    if (plan_.mistake != Mistake::kLeaverStays) server.markers.take_out(r);
    in_rounds() ? complete_round(s, group_[r]) : apply_due(s);
    look(s);
  }

  void drop(uint32_t s, uint32_t r) {
    Served& server = servers_[s];
    server.to_drop[r] = false;
    trainers_[r].way[s] = Way::kIdle;
    server.waiting[r].reset();
    server.applied[r] = 0;
    for (Counts& counts : server.at_back) counts[r] = -1;  // it counts from one
    server.markers.drop(r);
    take_out(s, r);
  }

  void look(uint32_t s) {
    Markers& markers = servers_[s].markers;
    if (!markers.open()) return;
    if (markers.deserted()) return end_cut(s, false);
    if (markers.complete()) end_cut(s, !(plan_.busy && chance(4)));
  }

  void end_cut(uint32_t s, bool taken) {
    Served& server = servers_[s];
    const Answer said{taken, server.markers.digest(), 0};
    server.writing = taken && plan_.busy;
    if (taken) server.taken[server.markers.number()] = {server.applied, server.markers.marked()};
    for (const auto& [r, ticket] : server.markers.end()) {
      answer(s, r, said);
      if (plan_.mistake != Mistake::kReaderReturns || !server.excused[r]) continue;
      server.read[r] = server.excused[r];
      server.excused[r].reset();
    }
    if (!trainers_[0].alive || trainers_[0].done) saving_ = false;
    // Of an announcement of which nothing came, or a marker that was taken back, it is known that
    // it is over by its deadline.
    if (!taken && (in_rounds() || trainers_[0].again != 0)) saving_ = false;
  }

  void apply(uint32_t s, uint32_t r) {
    Served& server = servers_[s];
    const Op op = *server.waiting[r];
    server.waiting[r].reset();
    if (op.first != server.applied[r] + 1) note("pushes of a trainer are applied out of order");
    server.applied[r] = op.last;
    ++server.version;
    server.markers.pushed(r, trainers_[r].incarnation);
    answer(s, r);
  }

  void complete_round(uint32_t s, uint64_t group) {
    Served& server = servers_[s];
    bool any = false;
    for (uint32_t r = 0; r < trainers_.size(); ++r) {
      if (group_[r] != group || !server.member[r]) continue;
      if (!server.waiting[r]) return;
      any = true;
    }
    if (!any) return;
    for (uint32_t r = 0; r < trainers_.size(); ++r) {
      if (group_[r] == group && server.waiting[r]) apply(s, r);
    }
  }

  std::optional<uint64_t> read_of(const Served& server, uint32_t r) const {
    return server.read[r] ? server.read[r] : server.excused[r];
  }

  // As Arrivals::is_due.
  bool is_due(const Served& server, uint32_t r) const {
    const auto own = read_of(server, r);
    if (!bounded() || !own) return true;
    std::vector<std::pair<uint64_t, bool>> earlier;  // and whether somebody waits for it
    for (uint32_t other = 0; other < trainers_.size(); ++other) {
      const auto read = read_of(server, other);
      if (read && *read < *own) earlier.emplace_back(*read, server.read[other].has_value());
    }
    std::sort(earlier.begin(), earlier.end());
    for (size_t k = 0; k < earlier.size(); ++k) {
      if (earlier[k].second && server.version + 1 + k - earlier[k].first > bound_) return false;
    }
    return true;
  }

  void apply_due(uint32_t s) {
    Served& server = servers_[s];
    while (true) {
      std::optional<uint32_t> next;
      for (uint32_t r = 0; r < trainers_.size(); ++r) {
        if (!server.waiting[r] || !is_due(server, r)) continue;
        if (!next || read_of(server, r).value_or(0) < read_of(server, *next).value_or(0)) next = r;
      }
      if (!next) return;
      const bool reads = read_of(server, *next).has_value();
      if (bounded() && reads) check_age(server, *next);
      apply(s, *next);
      if (reads) server.read[*next] = server.version;
      server.excused[*next].reset();
    }
  }

  // No gradient is older than the bound, but for what its trainer let pass from its marker on.
  void check_age(const Served& server, uint32_t r) {
    const uint64_t age = server.version - *read_of(server, r);
    if (age > bound_) ++found_.over_bound;
    const uint64_t passed = server.excused[r] ? server.version - server.marked_at[r] : 0;
    if (age > bound_ + passed) note("a gradient is older than the bound");
  }

  const Plan plan_;
  std::mt19937_64 random_;
  std::vector<Trainer> trainers_;
  std::vector<Served> servers_;
  std::vector<uint64_t> group_;
  std::vector<std::function<void()>> moves_;
  std::map<uint64_t, std::vector<uint32_t>> commits_;  // who is in them
  uint64_t merge_ = 1;
  uint64_t queue_size_ = 1;
  uint64_t every_ = 1;
  uint64_t bound_ = 0;
  uint64_t number_ = 0;
  bool saving_ = false;
  Found found_;
};

Found total_of(const Plan& plan, uint64_t schedules) {
  Found total;
  for (uint64_t seed = 1; seed <= schedules; ++seed) {
    const Found one = World(plan, seed).run();
    total.opened += one.opened;
    total.committed += one.committed;
    total.over_bound += one.over_bound;
    total.taken_back += one.taken_back;
    total.again += one.again;
    if (one.wrong.empty()) continue;
    total.wrong = one.wrong + " (seed " + std::to_string(seed) + ")";
    return total;
  }
  return total;
}

constexpr uint64_t kSchedules = kInstrumented ? 200 : 6500;

// All disturbances that a mode can have, alone and together: 32 plans.
Found check_mode(Mode mode) {
  Found total;
  for (uint32_t bits = 0; bits < 32; ++bits) {
    Plan plan{.mode = mode};
    const bool elastic = mode == Mode::kArrivals || mode == Mode::kBounded;
    plan.leaves = (bits & 1) != 0 && elastic;
    plan.losses = (bits & 2) != 0 && elastic;
    plan.deadlines = (bits & 4) != 0;
    plan.busy = (bits & 8) != 0;
    plan.backs = (bits & 16) != 0 && mode != Mode::kSync;
    if (!elastic && (bits & 3) != 0) continue;
    if (mode == Mode::kSync && (bits & 16) != 0) continue;
    const Found found = total_of(plan, elastic ? kSchedules / 4 : kSchedules);
    CHECK_EQ(found.wrong, std::string());
    CHECK(found.committed > 0);
    if (plan.backs) CHECK(found.taken_back > 0 && found.again > 0);
    total.opened += found.opened;
    total.committed += found.committed;
    total.over_bound += found.over_bound;
  }
  return total;
}

std::string found_with(Mode mode, Mistake mistake, bool leaves = false, bool busy = false) {
  return total_of({.mode = mode, .leaves = leaves, .busy = busy, .mistake = mistake}, 20000).wrong;
}

std::string found_with_backs(Mode mode, Mistake mistake) {
  return total_of({.mode = mode, .backs = true, .mistake = mistake}, 20000).wrong;
}

}  // namespace

TEST(cut_model_sync_is_whole_and_never_stuck) { check_mode(Mode::kSync); }
TEST(cut_model_groups_are_whole_and_never_stuck) { check_mode(Mode::kGroups); }
TEST(cut_model_arrivals_are_whole_and_never_stuck) { check_mode(Mode::kArrivals); }
TEST(cut_model_bounded_staleness_holds_but_for_who_has_marked) {
  CHECK(check_mode(Mode::kBounded).over_bound > 0);  // else nothing would have to be excused
}

TEST(cut_model_finds_planted_mistakes) {
  CHECK(found_with(Mode::kArrivals, Mistake::kMergePastMarker) != "");
  CHECK(found_with(Mode::kArrivals, Mistake::kEarlyCapture) != "");
  CHECK(found_with(Mode::kArrivals, Mistake::kNoDigest, true) != "");
  CHECK(found_with(Mode::kGroups, Mistake::kNoAnnouncement) != "");
  CHECK(found_with(Mode::kBounded, Mistake::kReaderStays) != "");
  CHECK(found_with(Mode::kBounded, Mistake::kRefusedStays, true) != "");
  CHECK(found_with(Mode::kBounded, Mistake::kReaderReturns, true) != "");
  CHECK(found_with(Mode::kArrivals, Mistake::kLeaverStays) != "");
  CHECK(found_with(Mode::kSync, Mistake::kForgetsRefusal, false, true) != "");
  for (const Mode mode : {Mode::kGroups, Mode::kArrivals, Mode::kBounded}) {
    CHECK(found_with_backs(mode, Mistake::kBackStays) != "");
    CHECK(found_with_backs(mode, Mistake::kAsksAtOnce) != "");
    if (mode == Mode::kGroups) continue;  // replies are there whenever a step ends
    CHECK(found_with_backs(mode, Mistake::kMarksUnasked) != "");
  }
}

}  // namespace cpudist::testing::cut_model
