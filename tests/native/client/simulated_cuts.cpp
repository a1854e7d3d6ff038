// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// optimized: yes
// long: one world of trainers and servers, and what is known of it
//
// Cuts of snapshots under Async, in simulated time: clients with their queues against servers with
// their writers, over links that lose, repeat and delay frames, in schedules of all their threads
// that are drawn from seeds. Trainers merge steps, mark at any step, leave and come back, with and
// without a bound on staleness, and evaluate, so that others take their markers back. Each gradient
// is a one in a row of its own, so that the files of a snapshot say which steps of whom it has.
// Mistakes that are planted between clients and servers are found.
//
// CPUDIST_TEST_SCHEDULES=100000 in the environment runs so many schedules, CPUDIST_TEST_SEED=7 the
// seventh alone.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/threads.h"
#include "base/wait.h"
#include "client/arrivals/pushes.h"
#include "client/client.h"
#include "simulator/staleness_watch.h"
#include "support/check.h"
#include "support/frame_tap.h"
#include "support/memory_files.h"
#include "support/seeded_schedule.h"
#include "support/snapshot_fixture.h"
#include "transport/inproc/channel.h"

namespace cpudist::testing::simulated_cuts {
namespace {

using std::chrono::milliseconds;

enum class Mistake {
  kNone,
  kMarkLate,         // a push of behind the marker is applied before the cut
  kMarkEarly,        // a push of before the marker is applied after the cut
  kMergePastMarker,  // steps of both sides of a marker travel as one push
  kLeaveUnheard,     // a server takes who leaves for who comes back
  kAppliedTwice,     // a server takes a push that was sent again for another
  kLost,             // a server answers a push without its gradients
  kBoundCounted,     // servers count the bound on staleness from one update later
  kNoDigest,         // trainer 0 does not compare what servers say of a cut
  kBackUnheard,      // a server does not give a marker back
  kBackCaptured,     // a marker that is given again stands for the step of the first time
};

constexpr uint64_t kWaitMs = 20000;  // for markers
constexpr uint64_t kHoldMs = 20;     // of who steps on
constexpr uint64_t kEvaluationMs = 18000;
// A thread may be late by some seconds in any wait: time goes on with the clocks of others.
constexpr uint64_t kHeldMs = 15000;
constexpr uint32_t kRunNumber = 7;
constexpr uint64_t kCutsMost = 6;  // of a schedule; servers know the last eight

struct Plan {
  uint64_t seed = 0;
  uint32_t trainers = 1;
  uint32_t servers = 1;
  uint64_t steps = 1;  // of each trainer
  uint64_t bound = wire::kAnyStaleness;
  bool leaves = false;
  bool faulty = false;
  bool slow_disk = false;
  bool crossed = false;  // no cuts: see Watched::cross
  bool backs = false;    // trainers evaluate, and take markers back
  client::QueueOptions queue;
  Mistake mistake = Mistake::kNone;

  bool bounded() const { return bound != wire::kAnyStaleness; }
  // Every cut that is asked for is taken.
  bool calm() const { return !leaves && !slow_disk && !backs; }
  // Nothing but another trainer's evaluation keeps a step for long.
  bool even() const { return backs && !leaves && !slow_disk && !faulty && !bounded(); }
};

Plan plan_of(uint64_t seed, Mistake mistake = Mistake::kNone) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15u);
  const auto below = [&](uint64_t count) { return (random() >> 11) % count; };
  Plan plan;
  plan.seed = seed;
  plan.mistake = mistake;
  plan.trainers = static_cast<uint32_t>(1 + below(4));
  plan.servers = static_cast<uint32_t>(1 + below(3));
  plan.steps = 4 + below(5);
  plan.leaves = below(2) == 0;
  plan.faulty = below(2) == 0;
  plan.slow_disk = below(3) == 0;
  bool bounded = below(3) == 0;
  if (mistake == Mistake::kBoundCounted) bounded = true;
  if (mistake == Mistake::kAppliedTwice) bounded = false;
  if (mistake == Mistake::kNoDigest) {
    plan.leaves = true;
    plan.servers = 3;
  }
  if (mistake == Mistake::kLeaveUnheard) plan.leaves = true;
  if (bounded) plan.bound = plan.trainers - 1 + below(3);
  plan.queue.size = static_cast<uint32_t>(1 + below(3));
  plan.queue.max_merge = static_cast<uint32_t>(1 + below(3));
  plan.queue.mean = {false};
  plan.backs = below(2) == 0 && mistake == Mistake::kNone;
  if (mistake == Mistake::kBackUnheard || mistake == Mistake::kBackCaptured) {
    plan.backs = true;
    plan.leaves = plan.slow_disk = plan.faulty = false;
    plan.bound = wire::kAnyStaleness;
  }
  return plan;
}

// What came of schedules.
struct Found {
  uint64_t opened = 0;
  uint64_t committed = 0;
  uint64_t over_bound = 0;  // gradients older than the bound, as they may be
  uint64_t left = 0;
  uint64_t taken_back = 0;  // markers
  uint64_t again = 0;       // of them, that were given again
  uint64_t merged = 0;
  uint64_t resent = 0;
  uint64_t kept_rows = 0;  // cuts with steps in them that are not the last
  uint64_t decisions = 0;
  uint64_t digest = 0;
  std::string wrong;  // empty: nothing

  void note(const std::string& what) {
    if (wrong.empty()) wrong = what;
  }
  void add(const Found& other) {
    opened += other.opened;
    committed += other.committed;
    over_bound += other.over_bound;
    left += other.left;
    taken_back += other.taken_back;
    again += other.again;
    merged += other.merged;
    resent += other.resent;
    kept_rows += other.kept_rows;
    decisions += other.decisions;
    note(other.wrong);
  }
};

// A server, which plants a mistake where the plan has one for its side, and what its frames say of
// the bound on staleness.
class Watched final : public FrameTap {
 public:
  Watched(const server::ServerOptions& options, const Plan& plan,
          const wire::ParamSetLayout& layout, SeededSchedule& schedule, Found& found)
      : FrameTap(options),
        plan_(plan),
        layout_(layout),
        schedule_(schedule),
        found_(found),
        shard_(options.shard_id),
        mistaken_(options.shard_id + 1 == options.server_count),
        watch_(layout, plan.bound) {}

 private:
  struct Stream {          // of a trainer
    uint64_t doubled = 0;  // the push that is applied twice, from which on numbers are one more
    uint64_t pushes = 0;
  };

  void take(const Link& link, wire::Frame frame) override {
    schedule_.pause();
    Stream& stream = streams_[frame.header.rank];
    const bool fresh = watch_.asked(frame);
    if (fresh && mistaken_) plant(stream, link, frame);
    if (plan_.mistake == Mistake::kBackUnheard) keep_marker(frame);
    if (stream.doubled != 0 && frame.header.sequence >= stream.doubled) ++frame.header.sequence;
    if (plan_.crossed && frame.header.kind == wire::FrameKind::kPush) {
      cross(stream, link, std::move(frame), !fresh);
    } else {
      deliver(link, std::move(frame));
    }
  }

  static void keep_marker(wire::Frame& frame) {
    if (frame.header.kind != wire::FrameKind::kCutStatus) return;
    wire::CutQuery query = wire::decode_cut_query(frame.payload.bytes());
    query.take_back = false;
    frame.payload = encode(query);
  }

  // Of two trainers, the first push of that of this server's number comes first, and its second
  // push is lost once: the server holds the second one of the other for it.
  void cross(Stream& stream, const Link& link, wire::Frame frame, bool again) {
    const bool first = frame.header.rank == shard_;
    if (!again) ++stream.pushes;
    if (first && stream.pushes == 2 && !again) return;
    if (!first && !heard_) {
      kept_ = {link, std::move(frame)};
      return;
    }
    deliver(link, std::move(frame));
    heard_ = true;
    if (const Link other = std::exchange(kept_.first, nullptr)) {
      deliver(other, std::move(kept_.second));
    }
  }

  void plant(Stream& stream, const Link& link, wire::Frame& frame) {
    const bool push = frame.header.kind == wire::FrameKind::kPush;
    if (plan_.mistake == Mistake::kLeaveUnheard && frame.header.kind == wire::FrameKind::kLeave) {
      frame.header.kind = wire::FrameKind::kJoin;
      frame.payload = encode(wire::Join{wire::JoinStep::kMember, 0});
    }
    if (!push || planted_ || schedule_.below(8) != 0) return;
    if (plan_.mistake == Mistake::kAppliedTwice) {
      planted_ = true;
      deliver(link, {frame.header, frame.payload.share()});
      stream.doubled = frame.header.sequence;
    }
    if (plan_.mistake == Mistake::kLost) {
      planted_ = true;
      lose_gradients(frame);
    }
  }

  // An earlier push of nothing in its place.
  void lose_gradients(wire::Frame& frame) {
    wire::PushHeader header;
    header.configs = layout_.configs;
    header.want_dense = true;
    frame.payload = wire::layout_push(header, {}, {}, nullptr).payload;
    frame.header.coded = false;
  }

  bool answer(uint32_t rank, wire::Frame& frame) override {
    Stream& stream = streams_[rank];
    uint64_t& sequence = frame.header.sequence;
    if (stream.doubled != 0 && sequence > stream.doubled) --sequence;
    const uint64_t excused = watch_.excused();
    if (!watch_.answered(rank, frame)) found_.note("a gradient is older than the bound");
    found_.over_bound += watch_.excused() - excused;
    return true;
  }

  const Plan& plan_;
  const wire::ParamSetLayout& layout_;
  SeededSchedule& schedule_;
  Found& found_;
  const uint32_t shard_;
  const bool mistaken_;
  bool heard_ = false;                 // of who comes first
  std::pair<Link, wire::Frame> kept_;  // meanwhile, of the other
  bool planted_ = false;
  simulator::StalenessWatch watch_;
  std::map<uint32_t, Stream> streams_;
};

struct Member {
  uint32_t rank = 0;
  std::unique_ptr<client::Client> client;
  std::shared_ptr<client::ParamSet> set;
  std::unique_ptr<client::AsyncPushes> pushes;
  std::vector<float> table;
  std::vector<std::vector<float>> dense;  // by server
  std::mt19937_64 random;
  uint64_t steps = 0;
  uint64_t marked = 0;  // the last number
  uint64_t again = 0;   // of the marker that was taken back
  bool marking = false;
  bool away = false;
  std::set<uint64_t> left_after{0};  // steps

  bool chance(uint64_t in) { return (random() >> 11) % in == 0; }
  std::vector<void*> weights() {
    std::vector<void*> bases;
    for (auto& block : dense) bases.push_back(block.data());
    return bases;
  }
};

// How often each step of each trainer is in some values.
struct Steps {
  std::vector<std::vector<float>> table;  // by trainer, by step
  std::vector<std::vector<float>> dense;  // by server, by trainer
  float all = 0;
};

class World {
 public:
  explicit World(const Plan& plan) : plan_(plan), schedule_(plan.seed), members_(plan.trainers) {
    describe();
    start_servers();
  }
  ~World() {
    for (Member& member : members_) member.client.reset();
    for (const auto& server : servers_) server->server().stop();
    for (const auto& listener : listeners_) listener->stop();
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  Found run() {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < plan_.trainers; ++rank) {
      Member& member = members_[rank];
      member.rank = rank;
      member.random.seed(plan_.seed * 64 + rank);
      threads.push_back(start_thread("trainer " + std::to_string(rank), [this, &member] {
        guarded([&] {
          start(member);
          ++started_;
          while (started_ < plan_.trainers && found_.wrong.empty()) let_pass(milliseconds(1));
          train(member);
        });
      }));
    }
    for (std::thread& thread : threads) join_thread(thread);
    guarded([&] {
      check_cuts();
      check_end();
      for (Member& member : members_) finish(member);
    });
    found_.decisions = schedule_.decisions();
    found_.digest = schedule_.digest();
    return found_;
  }

 private:
  template <typename Body>
  void guarded(const Body& body) {
    if (!found_.wrong.empty()) return;
    try {
      body();
    } catch (const std::exception& error) {
      found_.note(error.what());
    }
  }

  // ---- what there is ----

  uint64_t row_count() const { return plan_.trainers * plan_.steps + 1; }
  int64_t key_of(uint32_t rank, uint64_t step) const {
    return static_cast<int64_t>(rank * plan_.steps + step - 1);
  }

  // A row for each step of each trainer, one for all; on each server an element for each trainer.
  void describe() {
    layout_.mode = wire::UpdateMode::kOnArrival;
    layout_.max_staleness = plan_.bound;
    if (plan_.mistake == Mistake::kBoundCounted) ++layout_.max_staleness;
    layout_.configs = {sgd()};
    layout_.tables = {wire::TableSpec{"rows", row_count(), 1, 0}};
    for (uint32_t s = 0; s < plan_.servers; ++s) {
      layout_.blocks.push_back({.name = "d" + std::to_string(s),
                                .elements = plan_.trainers,
                                .shard = s,
                                .parameter = s});
    }
  }

  void start_servers() {
    transport::FaultPlan faults;
    if (plan_.faulty) {
      faults = {.drop = 0.02, .duplicate = 0.05, .delay = 0.2, .delay_ms_max = 20};
      faults.seed = plan_.seed;
    }
    if (plan_.crossed) faults.duplicate = 1e-9;  // else nobody would send anything again
    network_ = transport::InprocNetwork::create(faults);
    files_->watch([this] {
      schedule_.pause();
      if (plan_.slow_disk) let_pass(milliseconds(schedule_.below(20)));
    });
    files_->make_directory("/snaps");
    server::ServerOptions options;
    options.run_id = kRunNumber;
    options.server_count = plan_.servers;
    options.trainer_count = plan_.trainers;
    options.liveness_ms = options.reconnect_grace_ms = 60000;
    options.snapshot_dir = "/snaps";
    options.files = files_;
    for (uint32_t s = 0; s < plan_.servers; ++s) {
      options.shard_id = s;
      servers_.push_back(std::make_unique<Watched>(options, plan_, layout_, schedule_, found_));
      listeners_.push_back(network_->listen("server" + std::to_string(s), servers_[s].get()));
    }
  }

  client::ClientOptions client_options(uint32_t rank) const {
    client::ClientOptions options;
    options.run_id = kRunNumber;
    options.trainer_rank = rank;
    options.trainer_count = plan_.trainers;
    options.rpc_retries = 1000;
    options.liveness_ms = options.reconnect_grace_ms = 60000;
    options.probe_ms = options.resend_ms = 10;
    options.round_deadline_ms = 2 * kWaitMs;
    for (const auto& listener : listeners_) options.servers.push_back(listener->addresses());
    return options;
  }

  // ---- a trainer ----

  void start(Member& member) {
    member.client = std::make_unique<client::Client>(
        client_options(member.rank), [this](transport::ConnectionHandler* handler) {
          return make_connector(network_->connector(handler), nullptr);
        });
    member.client->connect();
    member.set = member.client->open(layout_);
    member.table.resize(row_count());
    member.dense.assign(plan_.servers, std::vector<float>(plan_.trainers));
    if (member.rank == 0) {
      std::vector<int64_t> keys(row_count());
      std::iota(keys.begin(), keys.end(), 0);
      member.set->store_table(0, keys, member.table.data(), nullptr, nullptr, 0);
      for (uint32_t s = 0; s < plan_.servers; ++s) {
        member.set->store_parameter(s, member.dense[s].data(), nullptr, 0);
      }
    }
    member.set->ready();
    member.set->bind_table(0, member.table.data());
    const std::vector<void*> weights = member.weights();
    member.set->pull_dense(weights);
    member.pushes = std::make_unique<client::AsyncPushes>(member.set, plan_.queue);
  }

  void train(Member& member) {
    while (member.steps < plan_.steps && found_.wrong.empty()) {
      if (member.away && plan_.bounded()) member.set->join();
      member.away = false;
      step(member, 1);
      take_answer(member);
      if (member.chance(4)) let_pass(milliseconds(member.random() % 30));
      // Elsewhere frames that are asked for again all the while would make it a long one.
      if (plan_.even() && member.chance(8)) let_pass(milliseconds(kEvaluationMs));
      if (plan_.leaves && member.chance(6)) {
        leave(member);
        continue;
      }
      mark_if_due(member);
    }
    leave(member);
  }

  // The gradients of as many steps, in one push.
  void step(Member& member, uint64_t count) {
    std::vector<int64_t> keys{static_cast<int64_t>(row_count() - 1)};
    std::vector<float> rows{static_cast<float>(count)};
    for (uint64_t i = 0; i < count; ++i) {
      keys.push_back(key_of(member.rank, ++member.steps));
      rows.push_back(1.0f);
    }
    member.set->pull(0, keys.data(), keys.size(), false);
    std::vector<float> gradient(plan_.trainers);
    gradient[member.rank] = static_cast<float>(count);
    client::StepPush push;
    push.samples = 1;
    push.configs = layout_.configs;
    for (uint32_t s = 0; s < plan_.servers; ++s) push.parameters.push_back({s, gradient.data()});
    push.tables = {{0, keys.data(), keys.size(), rows.data()}};
    push.weights = member.weights();
    const TimePoint began = Clock::now();
    member.pushes->enqueue(push);
    if (plan_.even() && Clock::now() - began > milliseconds(kHeldMs)) {
      found_.note("a trainer is held by another's evaluation");
    }
  }

  // An evaluation, or the end.
  void leave(Member& member) {
    member.set->leave();
    member.left_after.insert(member.steps);
    member.away = true;
    ++found_.left;
    take_answer(member);
    if (member.marking) found_.note("a marker is not answered when its trainer has left");
    let_pass(milliseconds(member.random() % 40));
  }

  void mark_if_due(Member& member) {
    if (member.marking || plan_.crossed) return;
    const uint64_t wanted = member.set->cut_wanted();
    if (member.again != 0 && wanted == member.again) {
      ++found_.again;
      mark(member, wanted, member.rank == 0 ? "c" + std::to_string(wanted) : "");
    } else if (member.rank == 0) {
      if (member.again != 0) return;
      if (number_ == kCutsMost || !member.chance(3)) return;
      if (plan_.calm() && is_writing(member)) return;
      ++found_.opened;
      ++number_;
      mark(member, number_, "c" + std::to_string(number_));
    } else if (wanted > member.marked) {
      mark(member, wanted, "");
    }
  }

  void mark(Member& member, uint64_t number, const std::string& name) {
    const Mistake mistake = plan_.mistake;
    const bool more = member.steps + 1 < plan_.steps;
    member.marked = number;
    if (mistake != Mistake::kBackCaptured || member.again == 0) {
      marks_[number][member.rank] = member.steps;
    }
    member.again = 0;
    if (mistake == Mistake::kMarkLate && more) step(member, 1);
    if (mistake == Mistake::kMergePastMarker && more) {
      ++marks_[number][member.rank];  // the first of two
      step(member, 2);
    }
    member.pushes->mark_cut(number, name, kWaitMs, 0, plan_.backs ? kHoldMs : 0);
    if (mistake == Mistake::kMarkEarly && more) {
      ++marks_[number][member.rank];
      step(member, 1);
    }
    member.marking = true;
  }

  void take_answer(Member& member) {
    const auto answer = member.pushes->cut_answer();
    if (!answer) return;
    member.marking = false;
    if (answer->taken_back || answer->torn) {
      ++found_.taken_back;
      if (answer->taken_back) member.again = answer->number;
      if (!answer->torn) return;
      member.set->drain();  // the lock of what is sequenced is none that the schedule knows
      member.set->abandon_cut(answer->number);
      return;
    }
    answers_[answer->number][member.rank] = answer->taken;
    check_reason(*answer);
    if (member.rank != 0) return;
    const auto& digests = answer->digests;
    const bool blind =
        plan_.mistake == Mistake::kNoDigest && std::count(digests.begin(), digests.end(), 0u) == 0;
    if (answer->taken || blind) committed_.insert(answer->number);
  }

  void check_reason(const client::CutAnswer& answer) {
    if (answer.taken) return;
    std::vector<const char*> may_be{"is over on this server"};
    if (plan_.leaves || plan_.backs) {
      for (const char* reason : {"takes no part any more", "is still open", "has abandoned it",
                                 "the servers cut at different moments"}) {
        may_be.push_back(reason);
      }
    }
    if (plan_.backs) may_be.push_back("no marker in time");
    if (!plan_.calm()) may_be.push_back("is still being written");
    for (const char* reason : may_be) {
      if (contains(answer.reason, reason)) return;
    }
    found_.note("cut " + std::to_string(answer.number) + ": " + answer.reason);
  }

  wire::CutStatus status(Member& member, uint32_t server, uint64_t number) {
    return member.set->cut_status(server, number, "");
  }

  bool is_writing(Member& member) {
    for (uint32_t s = 0; s < plan_.servers && number_ > 0; ++s) {
      if (status(member, s, number_).state == wire::CutState::kWriting) return true;
    }
    return false;
  }

  // ---- what must be ----

  void check_cuts() {
    if (plan_.calm() && committed_.size() != found_.opened) found_.note("a calm cut is not taken");
    for (const uint64_t number : committed_) {
      ++found_.committed;
      check_cut(number);
    }
  }

  void check_cut(uint64_t number) {
    const std::string what = "cut " + std::to_string(number) + ": ";
    Steps steps;
    steps.table.assign(plan_.trainers, std::vector<float>(plan_.steps));
    std::vector<uint32_t> members;
    for (uint32_t s = 0; s < plan_.servers; ++s) {
      wire::CutStatus told = status(members_[0], s, number);
      while (told.state == wire::CutState::kWriting) {
        let_pass(milliseconds(5));
        told = status(members_[0], s, number);
      }
      if (told.state != wire::CutState::kDone) return found_.note(what + told.reason);
      if (s > 0 && told.members != members) found_.note(what + "servers differ in who marked");
      members = told.members;
      read_files(number, s, told, &steps);
    }
    std::vector<std::optional<uint64_t>> upto(plan_.trainers);
    for (const uint32_t rank : members) {
      upto[rank] = marks_[number].at(rank);
      if (!answers_[number][rank] && plan_.mistake == Mistake::kNone) {
        found_.note(what + "a trainer does not know of a snapshot that it is in");
      }
    }
    check_steps(what, steps, upto);
  }

  void read_files(uint64_t number, uint32_t server, const wire::CutStatus& told, Steps* steps) {
    const auto files = files_->contents();
    std::vector<float> dense(plan_.trainers);
    for (const wire::CutFile& one : told.files) {
      const Bytes& file = files.at("/snaps/c" + std::to_string(number) + "/" + one.name);
      if (one.table == wire::kDenseFile) {
        const auto tensors = tensors_of(file);
        const TensorView& at = tensors.at("d" + std::to_string(server) + ".weight");
        CHECK_EQ(at.end - at.begin, dense.size() * sizeof(float));
        std::memcpy(dense.data(), file.data() + at.begin, at.end - at.begin);
        continue;
      }
      for (const auto& [key, row] : rows_of(file, "rows", one.rows)) {
        float value = 0;
        std::memcpy(&value, row.data() + 2 * sizeof(uint32_t), sizeof value);
        note_row(key, value, steps);
      }
    }
    steps->dense.push_back(dense);
  }

  void note_row(int64_t key, float value, Steps* steps) const {
    const auto at = static_cast<uint64_t>(key);
    if (at + 1 == row_count()) {
      steps->all = value;
    } else {
      steps->table[at / plan_.steps][at % plan_.steps] = value;
    }
  }

  // Each server has the steps of each trainer up to this one, once, and none behind it. Of who took
  // no part, those up to one after which it had left.
  void check_steps(const std::string& what, const Steps& steps,
                   const std::vector<std::optional<uint64_t>>& upto) {
    float all = 0;
    for (uint32_t rank = 0; rank < plan_.trainers; ++rank) {
      const float there = -steps.dense[0][rank];
      const std::string who = what + "trainer " + std::to_string(rank) + ", ";
      for (const auto& dense : steps.dense) {
        if (dense[rank] != -there) found_.note(who + "servers have other steps");
      }
      if (upto[rank] && there != static_cast<float>(*upto[rank])) {
        found_.note(who + "marked after step " + std::to_string(*upto[rank]) +
                    ", has steps up to " + std::to_string(there));
      }
      if (!upto[rank] && !members_[rank].left_after.contains(static_cast<uint64_t>(there))) {
        found_.note(who + "away, has " + std::to_string(there) + " steps");
      }
      for (uint64_t step = 1; step <= plan_.steps; ++step) {
        const float expected = static_cast<float>(step) <= there ? -1.0f : 0.0f;
        if (steps.table[rank][step - 1] == expected) continue;
        found_.note(who + "row of step " + std::to_string(step) + " of " + std::to_string(there));
      }
      if (there < static_cast<float>(plan_.steps)) ++found_.kept_rows;
      all -= there;
    }
    if (steps.all != all) found_.note(what + "the row of all steps differs");
  }

  // All gradients, once.
  void check_end() {
    Member& reader = members_[0];
    const std::vector<void*> weights = reader.weights();
    reader.set->pull_dense(weights);
    reader.set->pull_all_rows();
    Steps steps;
    steps.table.assign(plan_.trainers, std::vector<float>(plan_.steps));
    steps.dense = reader.dense;
    for (uint64_t key = 0; key < row_count(); ++key) {
      note_row(static_cast<int64_t>(key), reader.table[key], &steps);
    }
    std::vector<std::optional<uint64_t>> upto;
    for (const Member& member : members_) upto.emplace_back(member.steps);
    check_steps("at the end: ", steps, upto);
  }

  void finish(Member& member) {
    const client::ClientStats stats = member.client->stats();
    found_.merged += stats.staleness.merged;
    found_.resent += stats.resent;
    if (member.rank == 0) found_.resent += network_->counts().duplicated;
    member.client->goodbye();
  }

  const Plan plan_;
  SeededSchedule schedule_;
  Found found_;
  wire::ParamSetLayout layout_;
  const std::shared_ptr<MemoryFiles> files_ = std::make_shared<MemoryFiles>();
  std::shared_ptr<transport::InprocNetwork> network_;
  std::vector<std::unique_ptr<Watched>> servers_;
  std::vector<std::unique_ptr<transport::Listener>> listeners_;
  std::vector<Member> members_;
  uint32_t started_ = 0;                                    // trainers
  uint64_t number_ = 0;                                     // of the last cut
  std::map<uint64_t, std::map<uint32_t, uint64_t>> marks_;  // steps, by number and trainer
  std::map<uint64_t, std::map<uint32_t, bool>> answers_;    // whether taken
  std::set<uint64_t> committed_;
};

uint64_t schedules() {
  if (const char* given = std::getenv("CPUDIST_TEST_SCHEDULES")) return std::stoull(given);
  return kInstrumented ? 20 : 150;
}

Found run_plan(const Plan& plan) {
  Found found = World(plan).run();
  const uint64_t seed = plan.seed;
  if (!found.wrong.empty()) {
    const std::string number = std::to_string(seed);
    found.wrong = "seed " + number + ": " + found.wrong + " (CPUDIST_TEST_SEED=" + number +
                  " in the environment runs it again)";
  }
  return found;
}

Found run_one(uint64_t seed, Mistake mistake = Mistake::kNone) {
  return run_plan(plan_of(seed, mistake));
}

// Until something is wrong.
Found run_seeds(uint64_t count, Mistake mistake = Mistake::kNone) {
  Found total;
  for (uint64_t seed = 1; seed <= count && total.wrong.empty(); ++seed) {
    total.add(run_one(seed, mistake));
  }
  return total;
}

}  // namespace

TEST(simulated_cuts_have_each_step_once_up_to_its_marker) {
  if (const char* seed = std::getenv("CPUDIST_TEST_SEED")) {
    CHECK_EQ(run_one(std::stoull(seed)).wrong, std::string());
    return;
  }
  const Found found = run_seeds(schedules());
  if (std::getenv("CPUDIST_TEST_SCHEDULES") != nullptr) {
    std::printf(
        "%lu schedules: %lu cuts, %lu taken, %lu gradients above the bound, %lu leaves, "
        "%lu markers taken back, %lu given again\n",
        schedules(), found.opened, found.committed, found.over_bound, found.left, found.taken_back,
        found.again);
  }
  CHECK_EQ(found.wrong, std::string());
  CHECK(found.committed > 0 && found.committed < found.opened);
  CHECK(found.over_bound > 0);  // else nobody would have to be excused
  CHECK(found.left > 0 && found.merged > 0 && found.resent > 0 && found.kept_rows > 0);
  CHECK(found.taken_back > 0 && found.again > 0);
}

TEST(simulated_cuts_run_again_as_they_ran) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    const Found first = run_one(seed);
    const Found again = run_one(seed);
    CHECK_EQ(first.wrong, std::string());
    CHECK_EQ(again.digest, first.digest);
    CHECK_EQ(again.decisions, first.decisions);
  }
}

// Each trainer has a push that one server holds for the other's, which was lost on its way to
// there.
TEST(simulated_pushes_that_are_lost_do_not_wait_for_those_that_are_held) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Plan plan;
    plan.seed = seed;
    plan.trainers = plan.servers = 2;
    plan.steps = 4;
    plan.bound = 1;
    plan.crossed = true;
    plan.queue.mean = {false};
    CHECK_EQ(run_plan(plan).wrong, std::string());
  }
}

TEST(simulated_cuts_find_planted_mistakes) {
  constexpr uint64_t kSeeds = 300;
  const std::pair<Mistake, const char*> mistakes[] = {
      {Mistake::kMarkLate, "marked after step"},
      {Mistake::kMarkEarly, "marked after step"},
      {Mistake::kMergePastMarker, "marked after step"},
      {Mistake::kLeaveUnheard, "no marker in time"},
      {Mistake::kAppliedTwice, "steps"},
      {Mistake::kLost, "steps"},
      {Mistake::kBoundCounted, "older than the bound"},
      {Mistake::kNoDigest, "servers"},
      {Mistake::kBackUnheard, "held by another's evaluation"},
      {Mistake::kBackCaptured, "marked after step"},
  };
  for (const auto& [mistake, found] : mistakes) {
    const std::string wrong = run_seeds(kSeeds, mistake).wrong;
    if (!contains(wrong, found)) fail(__FILE__, __LINE__, std::string(found) + ": " + wrong);
  }
}

}  // namespace cpudist::testing::simulated_cuts
