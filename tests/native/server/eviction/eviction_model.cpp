// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one model
//
// A server whose rows go, against a dictionary, over random schedules of pushes, pulls, rows that
// are held over pushes, shrinking, and cuts: by rounds of one group or of two, and on arrival with
// a bound on staleness, where pushes wait while others evict their rows. Each snapshot, of all rows
// or of what has changed, has what the dictionary had at its cut, and is written while others push:
// how far its writer may go at a time is the schedule's.
//
// CPUDIST_TEST_SCHEDULES=100000 in the environment runs so many of them.

#include <array>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>

#include "support/patience.h"
#include "support/row_dictionary.h"
#include "support/snapshot_fixture.h"

namespace cpudist::testing {
namespace {

constexpr int64_t kModelKeys = 24;

enum class EvictionWay { kOneGroup, kTwoGroups, kOnArrival };

wire::Eviction random_rule(std::mt19937& random) {
  wire::Eviction rule;
  rule.on = true;
  const uint32_t kind = random() % 4;
  if (kind != 1) rule.unseen_steps = 1 + random() % 4;
  if (kind == 1 || kind == 2) rule.max_rows = 1 + random() % 12;
  if (rule.max_rows > 0 && random() % 2 == 0) rule.order = wire::EvictionOrder::kLfu;
  if (kind == 3) rule.min_count = 1 + random() % 4;
  return rule;
}

wire::ParamSetLayout evicting_layout_of(EvictionWay way, const wire::Eviction& rule) {
  wire::ParamSetLayout layout = remote_layout();
  layout.tables[0].initial = {{kernels::InitialOp::kFill, kBegun, 0}};
  layout.tables[0].overrides = {};
  layout.tables[0].eviction = rule;
  if (way == EvictionWay::kTwoGroups) layout.trainer_groups = {0, 1, 0};
  if (way == EvictionWay::kOnArrival) {
    layout.mode = wire::UpdateMode::kOnArrival;
    layout.max_staleness = 2;
  }
  return layout;
}

// Holds who writes a snapshot at its calls of the disk, as many of which pass as it is told.
class Valve {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return allowed_ > 0; });
    if (allowed_ != kAny) --allowed_;
  }
  void close() { set(0); }
  void open() { set(kAny); }
  void let(int64_t calls) { set(calls); }

 private:
  static constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

  void set(int64_t allowed) {
    const std::lock_guard lock(mutex_);
    allowed_ = allowed;
    changed_.notify_all();
  }

  std::mutex mutex_;
  ConditionVariable changed_;
  int64_t allowed_ = kAny;
};

std::string model_cut_name(uint64_t number) { return "snap-" + std::to_string(number); }

// A row as the files of a snapshot have it, under SGD.
Bytes row_in_file(const RowDictionary::Row& row) {
  Bytes bytes(2 * sizeof(uint32_t) + 4 * sizeof(float));
  const uint32_t numbers[] = {row.count, static_cast<uint32_t>(row.last)};
  std::memcpy(bytes.data(), numbers, sizeof numbers);
  for (size_t i = 0; i < 4; ++i) {
    std::memcpy(bytes.data() + sizeof numbers + i * sizeof(float), &row.value, sizeof(float));
  }
  return bytes;
}

// What was there at a cut.
struct CutMoment {
  std::map<int64_t, RowDictionary::Row> rows;
  size_t gone = 0;  // keys that had gone by then, and may have come back
  uint64_t updates = 0;

  explicit CutMoment(const RowDictionary& model)
      : rows(model.rows()), gone(model.gone().size()), updates(model.updates()) {}
};

struct ModelFiles {
  RowsByKey rows;
  std::set<int64_t> gone;
};

ModelFiles read_model_files(const wire::CutStatus& status, const MemoryFiles& files,
                            uint64_t number) {
  ModelFiles found;
  const auto contents = files.contents();
  for (const wire::CutFile& told : status.files) {
    const Bytes& file = contents.at("/snaps/" + model_cut_name(number) + "/" + told.name);
    check_sums(told, file);
    if (told.table == 0) {
      found.rows.merge(rows_of(file, "emb", told.rows));
    } else if (told.name == "s000-gone.safetensors") {
      const TensorView keys = tensors_of(file).at("t000.keys");
      for (uint64_t at = keys.begin; at < keys.end; at += sizeof(int64_t)) {
        int64_t key = 0;
        std::memcpy(&key, file.data() + at, sizeof key);
        CHECK(found.gone.insert(key).second);
      }
      CHECK_EQ(found.gone.size(), told.rows);
    }
  }
  return found;
}

// `base`: null where all rows were to be written.
void check_model_files(const ModelFiles& found, const CutMoment& cut, const CutMoment* base,
                       const RowDictionary& model) {
  RowsByKey rows;
  for (const auto& [key, row] : cut.rows) {
    if (base == nullptr || row.last >= base->updates) rows[key] = row_in_file(row);
  }
  CHECK(found.rows == rows);
  std::set<int64_t> gone;
  for (size_t i = base == nullptr ? cut.gone : base->gone; i < cut.gone; ++i) {
    if (!cut.rows.contains(model.gone()[i])) gone.insert(model.gone()[i]);
  }
  CHECK(found.gone == gone);
  if (base == nullptr) return;
  // Put over its base it is what was there.
  RowsByKey whole;
  for (const auto& [key, row] : base->rows) whole[key] = row_in_file(row);
  for (const int64_t key : found.gone) whole.erase(key);
  for (const auto& [key, bytes] : found.rows) whole[key] = bytes;
  CHECK_EQ(whole.size(), cut.rows.size());
  for (const auto& [key, row] : cut.rows) CHECK(whole.at(key) == row_in_file(row));
}

server::ServerOptions model_options(EvictionWay way, const std::shared_ptr<MemoryFiles>& files) {
  server::ServerOptions options = server_options(way == EvictionWay::kOneGroup ? 2 : 3);
  options.files = files;
  options.snapshot_dir = "/snaps";
  return options;
}

struct EvictionSchedule {
  struct Waiting {
    uint64_t request = 0;
    RowGradients rows;
    uint64_t read = 0;  // of arrivals: after so many updates
  };
  struct Held {  // what a trainer in rounds has read ahead
    std::map<int64_t, float> rows;
    uint64_t since = 0;
  };
  struct OpenCut {
    uint64_t number = 0;
    uint64_t base = 0;
    std::map<uint32_t, uint64_t> marks;  // requests by rank
  };
  struct Snapshot {  // that is being written
    uint64_t number = 0;
    uint64_t base = 0;
    CutMoment moment;
  };
  static constexpr uint64_t kBases = 7;  // of which a server is asked to know

  EvictionWay way;
  std::mt19937 random;
  wire::Eviction rule;
  std::shared_ptr<MemoryFiles> files = std::make_shared<MemoryFiles>();
  Valve valve;
  World world;
  RowDictionary model;
  std::map<uint32_t, Waiting> waiting;
  std::vector<Held> held = std::vector<Held>(3);
  std::vector<uint64_t> rounds = std::vector<uint64_t>(3);  // of each trainer's group
  std::vector<uint64_t> reads = std::vector<uint64_t>(3);
  std::optional<OpenCut> cut;
  std::optional<Snapshot> writing;
  std::map<uint64_t, CutMoment> done;
  uint64_t last_number = 0;
  uint64_t unknown_reads = 0;
  uint64_t compared = 0;
  uint64_t changes = 0;  // snapshots of changes that name keys

  EvictionSchedule(EvictionWay chosen, uint32_t seed)
      : way(chosen),
        random(seed),
        rule(random_rule(random)),
        world(evicting_layout_of(way, rule), model_options(way, files), false),
        model(rule) {
    make_ready(world);
    files->watch([this] { valve.pass(); });
  }
  EvictionSchedule(const EvictionSchedule&) = delete;
  EvictionSchedule& operator=(const EvictionSchedule&) = delete;
  ~EvictionSchedule() { valve.open(); }

  bool one_in(uint32_t times) { return random() % times == 0; }

  std::vector<int64_t> some_keys(uint32_t most) {
    std::set<int64_t> keys;
    const uint32_t count = random() % (most + 1);
    for (uint32_t i = 0; i < count; ++i) keys.insert(random() % kModelKeys);
    std::vector<int64_t> shuffled(keys.begin(), keys.end());
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    return shuffled;
  }

  // Checked to the last column.
  std::vector<float> read(uint32_t rank, const std::vector<int64_t>& keys) {
    std::vector<float> values;
    if (keys.empty()) return values;
    const auto rows = pulled_rows(world[rank], world.layout, keys);
    for (size_t i = 0; i < keys.size(); ++i) {
      unknown_reads += model.rows().contains(keys[i]) ? 0 : 1;
      values.push_back(rows[i * 4]);
      for (size_t c = 0; c < 4; ++c) CHECK_EQ(rows[i * 4 + c], model.value(keys[i]));
    }
    return values;
  }

  // For steps to come. In rounds the servers tell of these rows from now on.
  void prefetch(uint32_t rank) {
    if (waiting.contains(rank)) return;
    Held& mine = held[rank];
    if (way == EvictionWay::kOnArrival || one_in(4)) mine.rows.clear();
    if (mine.rows.empty()) mine.since = model.updates();
    const std::vector<int64_t> keys = some_keys(6);
    const std::vector<float> values = read(rank, keys);
    for (size_t i = 0; i < keys.size(); ++i) mine.rows[keys[i]] = values[i];
  }

  // Whether a trainer that a round of this one waits for says so.
  template <typename Says>
  bool any_beside(uint32_t rank, const Says& says) const {
    for (uint32_t other = 0; other < world.trainers.size(); ++other) {
      const bool apart = way == EvictionWay::kTwoGroups && (other == 1) != (rank == 1);
      if (!apart && says(other)) return true;
    }
    return false;
  }
  bool has_marked(uint32_t rank) const { return cut && cut->marks.contains(rank); }
  // All of a round push before a marker, or behind it.
  bool may_push(uint32_t rank) const {
    if (waiting.contains(rank) || has_marked(rank)) return false;
    return way == EvictionWay::kOnArrival ||
           !any_beside(rank, [this](uint32_t other) { return has_marked(other); });
  }
  bool may_mark(uint32_t rank) const {
    if (waiting.contains(rank) || has_marked(rank)) return false;
    return way == EvictionWay::kOnArrival ||
           !any_beside(rank, [this](uint32_t other) { return waiting.contains(other); });
  }

  void push(uint32_t rank) {
    if (!may_push(rank)) return;
    if (one_in(2)) prefetch(rank);
    Waiting& mine = waiting[rank];
    for (const int64_t key : some_keys(5)) {
      mine.rows.push_back({key, static_cast<float>(random() % 8)});
    }
    wire::PushHeader header;
    header.configs = world.layout.configs;
    header.round = rounds[rank];
    const std::map<int64_t, float>& ahead = held[rank].rows;
    const bool holds = way != EvictionWay::kOnArrival && !ahead.empty();
    wire::HoldRefs refs;
    refs.since = held[rank].since;
    refs.tables = {{0, ahead.size(), 4, 0, false, 0}};
    const wire::TableRef table{0, mine.rows.size(), 4, 0, false, 0};
    wire::FilledPush push =
        wire::layout_push(header, {}, std::span(&table, 1), nullptr, holds ? &refs : nullptr);
    for (size_t i = 0; i < mine.rows.size(); ++i) {
      push.keys[0][i] = mine.rows[i].key;
      std::fill_n(push.rows[0] + i * 4, 4, mine.rows[i].value);
    }
    size_t at = 0;
    for (const auto& [key, value] : ahead) {
      if (holds) push.held[0][at++] = key;
    }
    mine.read = reads[rank];
    mine.request = world[rank].ask(wire::FrameKind::kPush, std::move(push.payload));
    way == EvictionWay::kOnArrival ? follow_arrivals(rank) : follow_rounds();
  }

  // At most one round was completed.
  void follow_rounds() {
    std::map<uint32_t, RowGradients> pushes;
    for (const auto& [rank, one] : waiting) {
      if (!world[rank].waits(one.request)) pushes[rank] = one.rows;
    }
    if (pushes.empty()) return;
    model.update(pushes);
    for (const auto& [rank, rows] : pushes) {
      const uint64_t request = waiting.extract(rank).mapped().request;
      ++rounds[rank];
      const wire::Frame frame = world[rank].reply(request);
      const wire::DenseView reply = world.dense(frame);
      Held& mine = held[rank];
      for (const wire::TableSection& told : reply.tables) {
        for (size_t i = 0; i < told.keys.size(); ++i) {
          CHECK(mine.rows.contains(told.keys[i]));
          mine.rows[told.keys[i]] = told.rows[i * 4];
        }
      }
      CHECK_EQ(reply.version.round, model.updates());
      mine.since = reply.version.round;
      for (const auto& [key, value] : mine.rows) {
        CHECK_EQ(value, model.value(key));
        ++compared;
      }
    }
  }

  // The one that came, if one did, then those that waited for it: the longest first.
  void follow_arrivals(std::optional<uint32_t> came) {
    std::vector<std::array<uint64_t, 3>> applied;
    for (const auto& [rank, one] : waiting) {
      if (!world[rank].waits(one.request)) applied.push_back({rank != came, one.read, rank});
    }
    std::sort(applied.begin(), applied.end());
    for (const auto& [unused, read, number] : applied) {
      const auto rank = static_cast<uint32_t>(number);
      world[rank].reply(waiting.at(rank).request);
      model.update({{rank, waiting.extract(rank).mapped().rows}});
      reads[rank] = model.updates();
    }
  }

  void pull() {
    std::vector<int64_t> keys(kModelKeys);
    for (int64_t key = 0; key < kModelKeys; ++key) keys[static_cast<size_t>(key)] = key;
    read(0, keys);
    const server::TableStats stats = world.server.table_stats()[0];
    CHECK_EQ(stats.rows, model.size());
    CHECK_EQ(stats.created, model.created());
    CHECK_EQ(stats.evicted, model.evicted());
    CHECK_EQ(stats.unknown_reads, unknown_reads);
    CHECK_EQ(world.server.stats().rounds, model.updates());
  }

  void shrink() {
    Trainer& trainer = world[world.trainers.size() - 1];
    // Its requests come one after the other.
    if (waiting.contains(trainer.rank()) || has_marked(trainer.rank())) return;
    const uint64_t request = trainer.ask(wire::FrameKind::kShrink, encode(wire::TableQuery{0}));
    CHECK(trainer.comes(request));
    const uint64_t evicted = wire::decode_shrunk(view(trainer.reply(request).payload)).evicted;
    CHECK_EQ(evicted, model.sweep());
  }

  // ---- snapshots: one is cut, and written, before the next one ----

  void begin_cut() {
    cut.emplace();
    cut->number = ++last_number;
    if (!done.empty() && !one_in(4)) {
      const auto back = random() % std::min<uint64_t>(done.size(), kBases);
      cut->base = std::next(done.rbegin(), static_cast<int64_t>(back))->first;
    }
    if (!one_in(3)) valve.close();
  }

  // Trainer 0 names it, whenever its marker comes.
  void mark(uint32_t rank) {
    if (!may_mark(rank)) return;
    const wire::Cut marker{cut->number, 600000, wire::CutStep::kMark,
                           rank == 0 ? model_cut_name(cut->number) : "", rank == 0 ? cut->base : 0};
    cut->marks[rank] = world[rank].ask(wire::FrameKind::kCut, encode(marker));
    // Nobody waits for its gradient any more.
    if (way == EvictionWay::kOnArrival) follow_arrivals(std::nullopt);
    if (cut->marks.size() < world.trainers.size()) return;
    for (const auto& [other, request] : cut->marks) {
      const auto told = wire::decode_cut_reply(view(world[other].reply(request).payload));
      CHECK_EQ(told.reason, "");
      CHECK(told.taken);
    }
    writing.emplace(Snapshot{cut->number, cut->base, CutMoment(model)});
    cut.reset();
  }

  void finish_snapshot() {
    valve.open();
    const TimePoint deadline = Clock::now() + kPatience;
    wire::CutStatus status;
    while (true) {
      const uint64_t request = world[0].plain(wire::FrameKind::kCutStatus, 0,
                                              encode(wire::CutQuery{writing->number, ""}));
      status = wire::decode_cut_status(view(world[0].reply(request).payload));
      if (status.state != wire::CutState::kWriting) break;
      CHECK(Clock::now() < deadline);
      std::this_thread::yield();
    }
    CHECK_EQ(status.reason, "");
    CHECK(status.state == wire::CutState::kDone && status.can_be_base);
    CHECK_EQ(status.base, writing->base);
    CHECK_EQ(status.version.round, writing->moment.updates);
    const ModelFiles found = read_model_files(status, *files, writing->number);
    const CutMoment* base = writing->base == 0 ? nullptr : &done.at(writing->base);
    check_model_files(found, writing->moment, base, model);
    changes += found.gone.empty() ? 0 : 1;
    done.emplace(writing->number, std::move(writing->moment));
    writing.reset();
  }

  void go_on_with_snapshots() {
    if (cut) {
      mark(random() % static_cast<uint32_t>(world.trainers.size()));
    } else if (!writing) {
      if (one_in(3)) begin_cut();
    } else if (one_in(4)) {
      finish_snapshot();
    } else if (one_in(3)) {
      one_in(2) ? valve.open() : valve.let(1 + random() % 3);
    }
  }

  void end_snapshots() {
    for (int turn = 0; cut; ++turn) {
      CHECK(turn < 1000);
      for (uint32_t rank = 0; cut && rank < world.trainers.size(); ++rank) {
        mark(rank);
        // A round that has begun ends first.
        if (cut && !has_marked(rank)) push(rank);
      }
    }
    if (writing) finish_snapshot();
  }

  void run() {
    const uint32_t steps = 10 + random() % 40;
    for (uint32_t step = 0; step < steps; ++step) {
      const uint32_t rank = random() % static_cast<uint32_t>(world.trainers.size());
      push(rank);
      if (one_in(4)) prefetch(rank);
      if (one_in(4)) pull();
      if (one_in(16)) shrink();
      if (one_in(2)) go_on_with_snapshots();
    }
    end_snapshots();
    pull();
  }
};

uint64_t eviction_schedules() {
  if (const char* given = std::getenv("CPUDIST_TEST_SCHEDULES")) return std::stoull(given);
  return kInstrumented ? 30 : 300;
}

void run_evictions(EvictionWay way) {
  uint64_t compared = 0;
  uint64_t evicted = 0;
  uint64_t snapshots = 0;
  uint64_t changes = 0;
  for (uint64_t i = 0; i < (eviction_schedules() + 2) / 3; ++i) {
    EvictionSchedule schedule(way, static_cast<uint32_t>(i * 3 + static_cast<uint64_t>(way)));
    try {
      schedule.run();
    } catch (const CheckFailure& failure) {
      fail(__FILE__, __LINE__, "schedule " + std::to_string(i) + ": " + failure.what());
    }
    compared += schedule.compared;
    evicted += schedule.model.evicted();
    snapshots += schedule.done.size();
    changes += schedule.changes;
  }
  CHECK(evicted > 0 && snapshots > 0 && changes > 0);
  CHECK_EQ(compared > 0, way != EvictionWay::kOnArrival);
}

}  // namespace

TEST(eviction_model_of_rounds) { run_evictions(EvictionWay::kOneGroup); }

TEST(eviction_model_of_rounds_of_two_groups) { run_evictions(EvictionWay::kTwoGroups); }

TEST(eviction_model_of_updates_on_arrival) { run_evictions(EvictionWay::kOnArrival); }

}  // namespace cpudist::testing
