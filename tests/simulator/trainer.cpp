// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

// long: one class, all that a trainer does

#include "simulator/trainer.h"

#include <algorithm>
#include <utility>

#include "base/wait.h"
#include "simulator/world.h"

namespace cpudist::simulator {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kLastSteps = 2;  // when no faults are left
constexpr uint64_t kCutsMost = 6;
constexpr uint64_t kRestartMs = 600;  // at most, until another process starts

}  // namespace

Trainer::Trainer(World& world, uint32_t rank)
    : world_(world), rank_(rank), random_(world.plan.seed * 64 + rank) {}

Trainer::~Trainer() { stop(); }

std::string Trainer::name() const { return "trainer " + std::to_string(rank_); }

std::vector<void*> Trainer::weights() {
  std::vector<void*> bases;
  for (auto& block : dense_) bases.push_back(block.data());
  return bases;
}

// ---- one process after another ----

void Trainer::live() {
  while (world_.goes_on() && !world_.life_over()) {
    try {
      start();
      train();
      world_.events.note(name() + " has made its steps");
      return;
    } catch (const Error& error) {
      if (!ended_by(error)) return;
    } catch (const std::exception& error) {
      world_.fail(name() + ": " + error.what());
      return;
    }
    let_pass(milliseconds(random_() % kRestartMs));
  }
}

// Whether another process is to follow.
bool Trainer::ended_by(const Error& error) {
  world_.events.note(name() + " ends: " + error.what());
  const bool over = world_.life_over() && error.code() == ErrorCode::kInterrupted;
  const bool refused = world_.plan.memory_cap > 0 &&
                       (error.code() == ErrorCode::kFull || error.code() == ErrorCode::kOverloaded);
  if (refused) {
    world_.full = true;
    ++world_.counts.refused;
  }
  // Who was refused in a round has gone without a goodbye.
  const bool told = error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kCountedLost;
  const bool lost = (world_.plan.may_lose() || world_.full) && told;
  if (!killed_ && !over && !lost && !refused) world_.fail(name() + ": " + error.what());
  stop();
  ++world_.counts.processes;
  if (world_.plan.in_rounds()) world_.end_life(name() + " is lost");
  return !world_.life_over();
}

void Trainer::kill() {
  killed_ = true;
  client_->abort("killed");
}

bool Trainer::has_failed() const {
  try {
    client_->check();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void Trainer::stop() {
  if (client_ == nullptr) return;
  world_.model.end(rank_);
  if (rank_ == 0) world_.saves.forget();
  world_.counts.resent += client_->stats().resent;
  client_.reset();
  mover_.reset();
  pushes_.reset();
  set_.reset();
}

void Trainer::start() {
  ++incarnation_;
  killed_ = connecting_ = member_ = away_ = marking_ = false;
  marked_ = rank_ == 0 ? world_.saves.begun() : 0;  // nobody waits for those of before
  if (!world_.model.start(rank_)) {
    throw std::runtime_error("does not come to rest: so many processes of it were lost");
  }
  world_.events.note(name() + " starts process " + std::to_string(incarnation_));
  client::ClientOptions options = world_.cluster->client_options(rank_, incarnation_);
  options.interrupted = [this] { return connecting_ && world_.life_over(); };
  client_ =
      std::make_unique<client::Client>(options, [this](transport::ConnectionHandler* handler) {
        return make_connector(world_.cluster->connector(handler, rank_, incarnation_), nullptr);
      });
  connecting_ = true;
  client_->connect();
  connecting_ = false;
  set_ = client_->open(world_.layout);
  table_.assign(world_.model.row_count(), 0.0f);
  dense_.assign(world_.plan.servers, std::vector<float>(world_.model.element_count()));
  if (rank_ == 0 && !set_->holds_values()) store_values();
  set_->ready();
  if (world_.plan.in_rounds() && world_.from_snapshot) take_snapshot();
  if (!world_.plan.is_remote()) set_->bind_table(0, table_.data());
  const std::vector<void*> bases = weights();
  set_->pull_dense(bases);
  if (world_.plan.strategy == Strategy::kGeo) {
    if (!world_.plan.is_remote()) set_->pull_all_rows();
    mover_ = std::make_unique<Mover>(world_, rank_, set_, table_, bases);
  } else if (!world_.plan.in_rounds()) {
    client::QueueOptions queue;
    queue.size = world_.plan.queue_size;
    queue.max_merge = world_.plan.max_merge;
    queue.mean = {false};
    pushes_ = std::make_unique<client::AsyncPushes>(set_, queue);
  }
  if (incarnation_ == 1) ++world_.started;
  if (incarnation_ > 1) connect_as_before();
}

// The process before this one lives on somewhere: no server that has met this one lets it in again.
void Trainer::connect_as_before() {
  const uint32_t before = incarnation_ - 1;
  client::ClientOptions options = world_.cluster->client_options(rank_, before);
  options.connect_deadline_ms = kLivenessMs;
  options.interrupted = [this] { return world_.life_over(); };
  client::Client client(options, [&](transport::ConnectionHandler* handler) {
    return make_connector(world_.cluster->connector(handler, rank_, before), nullptr);
  });
  try {
    client.connect();
  } catch (const Error& error) {
    world_.events.note(name() + ", process " + std::to_string(before) + ": " + error.what());
    if (error.code() == ErrorCode::kFenced) ++world_.counts.fenced;
    return;
  }
  world_.fail(name() + ": its process " + std::to_string(before) +
              " was let in, though another one has taken its place");
}

void Trainer::store_values() {
  // Of others servers know what rows begin with.
  if (!world_.plan.is_remote()) {
    set_->store_table(0, world_.model.keys(), table_.data(), nullptr, nullptr, 0);
  }
  for (uint32_t server = 0; server < world_.plan.servers; ++server) {
    set_->store_parameter(server, dense_[server].data(), nullptr, 0);
  }
  // Of others nobody is to see the rounds of before, and of after: take_snapshot().
  if (world_.from_snapshot && !world_.plan.in_rounds()) load_values();
}

// The others are at the second barrier meanwhile.
void Trainer::take_snapshot() {
  client_->barrier();
  if (rank_ == 0) load_values();
  client_->barrier();
}

void Trainer::load_values() {
  world_.events.note("servers load cut " + std::to_string(world_.saves.newest()->number));
  world_.saves.load(*set_, world_.disks);
  ++world_.counts.restored;
}

// ---- steps ----

void Trainer::train() {
  while (world_.goes_on() && world_.model.issued(rank_) < world_.plan.steps) {
    step();
    take_answer();
    if (rank_ == 0) poll_saves();
    if (chance(2)) let_pass(milliseconds(random_() % 30));
    if (world_.plan.leaves && chance(6)) {
      leave();
      pause();
    } else {
      save_if_due();
    }
  }
  leave();
  while (world_.goes_on() && !world_.faults_over) pause();
  for (uint64_t i = 0; i < kLastSteps && world_.goes_on(); ++i) {
    if (!world_.model.has_steps(rank_, 1)) throw std::runtime_error("has no rows left");
    step();
    take_answer();
  }
  drain();
  leave();
  while (world_.goes_on() && rank_ == 0 && world_.saves.pending()) {
    poll_saves();
    pause();
  }
}

void Trainer::step() {
  Model& model = world_.model;
  if (away_ && world_.plan.strategy == Strategy::kBounded) set_->join();
  away_ = false;
  const StepRows named = rows_of_step();
  std::vector<int64_t> keys;
  if (named == StepRows::kOwn) {
    keys.push_back(model.keys()[model.step_row(rank_, model.issued(rank_))]);
  }
  const size_t own = keys.size();
  for (size_t which = 0; named != StepRows::kNone && which < Model::kSharedRows; ++which) {
    keys.push_back(model.keys()[model.shared_row(which)]);
  }
  std::optional<float> before;
  if (!keys.empty()) {
    const float shared = look_up(keys, true)[own];
    if (member_) before = shared - model.first_rows()[model.shared_row(0)];
  }
  model.issue(rank_, named);
  ++world_.counts.steps;
  world_.events.note(name() + " makes step " + std::to_string(model.issued(rank_)));
  if (mover_ != nullptr) return move(keys);
  const std::vector<float> rows(keys.size(), Model::kGradient);
  std::vector<float> gradient(model.element_count());
  gradient[model.element_of(rank_)] = Model::kGradient;
  client::StepPush push;
  push.samples = 1;
  push.configs = world_.layout.configs;
  for (uint32_t s = 0; s < world_.plan.servers; ++s) {
    push.parameters.push_back({s, gradient.data()});
  }
  push.tables = {{0, keys.data(), keys.size(), rows.data()}};
  push.weights = weights();
  if (world_.plan.in_rounds()) {
    push_some_early(push);
    push_round(push, before);
  } else {
    push_later(push);
  }
}

// A server that is full makes no more rows, and trains those that it has.
StepRows Trainer::rows_of_step() const {
  if (!world_.full) return StepRows::kOwn;
  return world_.model.has_shared_rows() ? StepRows::kShared : StepRows::kNone;
}

std::vector<float> Trainer::look_up(const std::vector<int64_t>& keys, bool keep) {
  std::vector<float> rows(keys.size());
  if (world_.plan.is_remote()) {
    set_->lookup(0, keys.data(), keys.size(), false, rows.data(), keep);
    return rows;
  }
  if (mover_ == nullptr) set_->pull(0, keys.data(), keys.size(), false);
  for (size_t i = 0; i < keys.size(); ++i) rows[i] = table_[world_.model.row_of(keys[i])];
  return rows;
}

// A step of its own, of rows and of the element of this process on each server.
void Trainer::move(const std::vector<int64_t>& keys) {
  away_ = false;
  const std::vector<float> rows(keys.size(), Model::kGradient);
  for (auto& block : dense_) block[world_.model.element_of(rank_)] -= Model::kGradient;
  mover_->step({0, keys.data(), keys.size(), rows.data()});
}

// Some gradients go before their push, and some of those are others by then.
void Trainer::push_some_early(const client::StepPush& push) {
  for (const client::ParameterGradient& one : push.parameters) {
    const uint64_t drawn = random_() % 4;
    if (drawn == 0) continue;
    const auto* values = static_cast<const float*>(one.gradient);
    std::vector<float> early(values, values + world_.model.element_count());
    if (drawn == 1) early[random_() % early.size()] += Model::kGradient;
    const client::ParameterGradient ready{one.parameter, early.data()};
    world_.counts.early_bytes += set_->push_early({&ready, 1});
  }
}

void Trainer::push_round(const client::StepPush& push, std::optional<float> before) {
  const uint64_t round = set_->push(push);
  world_.events.note(name() + " has made round " + std::to_string(round));
  world_.model.in_round(rank_, round, dense_, before);
  world_.model.applied(rank_);
  member_ = true;
}

void Trainer::push_later(const client::StepPush& push) {
  pushes_->enqueue(push);
  // A queue goes on behind a push that is refused; the model has a process end with it.
  if (world_.plan.memory_cap > 0) set_->drain();
  if (world_.plan.strategy == Strategy::kBounded) world_.model.applied(rank_);
}

void Trainer::drain() {
  if (mover_ != nullptr) mover_->hand_on_all();
  set_->drain();
  world_.model.applied(rank_);
}

// An evaluation, or the end.
void Trainer::leave() {
  drain();
  world_.model.left(rank_);  // servers know of it before this trainer has their answers
  set_->leave();
  away_ = true;
  member_ = false;
  ++world_.counts.leaves;
  if (rank_ == 0) marked_ = world_.saves.begun();  // what it has announced is given up
  take_answer();
  if (marking_) throw std::runtime_error("a marker is not answered when its trainer has left");
}

// It does nothing, and hears of losses.
void Trainer::pause() {
  let_pass(milliseconds(1 + random_() % 20));
  client_->check();
  if (world_.life_over() && world_.plan.in_rounds()) {
    throw Error(ErrorCode::kInterrupted, "the others have ended");
  }
}

Values Trainer::read() {
  const std::vector<void*> bases = weights();
  set_->pull_dense(bases);
  if (!world_.plan.is_remote()) {
    set_->pull_all_rows();
    return {dense_, table_, 0};
  }
  set_->fetch_rows(0, world_.model.keys(), table_.data());
  return {dense_, table_, set_->table_counts(0).rows};
}

Values Trainer::take_in() {
  mover_->hand_on_all();
  set_->leave();
  return {dense_, look_up(world_.model.keys(), false), 0};
}

void Trainer::say_goodbye() { client_->goodbye(); }

// ---- cuts ----

void Trainer::save_if_due() {
  if (!world_.plan.saves || marking_) return;
  const uint64_t wanted = set_->cut_wanted();
  if (wanted > marked_) {
    mark(wanted, rank_ == 0 ? Saves::name_of(wanted) : "");
  } else if (rank_ == 0 && !world_.saves.pending() && chance(2)) {
    begin_save();
  }
}

void Trainer::begin_save() {
  if (world_.saves.begun() == kCutsMost || world_.saves.begun() > marked_) return;
  const uint64_t number = world_.saves.begin();
  ++world_.counts.cuts;
  if (!world_.plan.in_rounds()) return mark(number, Saves::name_of(number));
  const std::string refusal = set_->announce_cut(number, Saves::name_of(number), kMarkersMs);
  world_.events.note(name() + " announces cut " + std::to_string(number) + " " + refusal);
  if (refusal.empty()) return;
  set_->abandon_cut(number);
  marked_ = number;
}

void Trainer::mark(uint64_t number, const std::string& cut) {
  marked_ = number;
  if (mover_ != nullptr) mover_->begin_to_hand_on();
  world_.saves.mark(number, rank_, world_.model.mark(rank_));
  world_.events.note(name() + " marks cut " + std::to_string(number));
  if (world_.plan.in_rounds()) {
    note_answer(set_->mark_cut(number, cut, kMarkersMs));
    return;
  }
  if (mover_ != nullptr) {
    mover_->mark_cut(number, cut, kMarkersMs);
  } else {
    pushes_->mark_cut(number, cut, kMarkersMs);
  }
  marking_ = true;
}

void Trainer::take_answer() {
  if (pushes_ == nullptr && mover_ == nullptr) return;
  const auto answer = mover_ == nullptr ? pushes_->cut_answer() : mover_->cut_answer();
  if (!answer) return;
  marking_ = false;
  note_answer(*answer);
}

void Trainer::note_answer(const client::CutAnswer& answer) {
  world_.events.note(name() + ": cut " + std::to_string(answer.number) +
                     (answer.taken ? " is taken" : " is not taken: " + answer.reason));
  world_.model.applied(world_.saves.mark_of(answer.number, rank_), rank_);
  if (rank_ == 0 && answer.taken) world_.saves.taken(answer.number);
}

void Trainer::poll_saves() {
  uint64_t failed = 0;
  const std::string wrong = world_.saves.poll(*set_, *world_.cluster, &failed);
  if (!wrong.empty()) world_.fail(wrong);
  if (failed == 0) return;
  ++world_.counts.unwritten;
  drain();
  set_->abandon_cut(failed);
}

}  // namespace cpudist::simulator
