// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A trainer: one process after another, each of which connects, takes the servers' values, steps,
// leaves, marks cuts, and makes two more steps when no faults are left.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "client/arrivals/pushes.h"
#include "client/client.h"
#include "simulator/model.h"
#include "simulator/mover.h"

namespace cpudist::simulator {

class World;

// Thread safety: none of its own; it is for threads that run one at a time.
class Trainer {
 public:
  Trainer(World& world, uint32_t rank);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Until it has made its steps, or servers are lost: the body of its thread.
  void live();
  // Its process ends at once; another one follows.
  void kill();
  uint32_t incarnation() const { return incarnation_; }
  bool running() const { return client_ != nullptr; }
  // Whether it has been told that it goes on no more.
  bool has_failed() const;
  // Of a trainer that has made its steps: everything that servers hold.
  Values read();
  // Of one that steps by itself: what it has itself, once it has taken in what others have moved.
  Values take_in();
  void say_goodbye();
  void stop();  // its process has ended
  void begin_life() { incarnation_ = 0; }

 private:
  void start();
  void connect_as_before();
  void store_values();
  void take_snapshot();
  void load_values();
  void train();
  void step();
  std::vector<float> look_up(const std::vector<int64_t>& keys, bool keep);
  StepRows rows_of_step() const;
  void move(const std::vector<int64_t>& keys);
  void push_some_early(const client::StepPush& push);
  void push_round(const client::StepPush& push, std::optional<float> before);
  void push_later(const client::StepPush& push);
  void leave();
  void pause();
  void drain();
  void save_if_due();
  void begin_save();
  void mark(uint64_t number, const std::string& name);
  void take_answer();
  void note_answer(const client::CutAnswer& answer);
  void poll_saves();
  bool ended_by(const Error& error);
  bool chance(uint64_t in) { return (random_() >> 11) % in == 0; }
  std::vector<void*> weights();
  std::string name() const;

  World& world_;
  const uint32_t rank_;
  std::mt19937_64 random_;
  uint32_t incarnation_ = 0;  // with these servers
  std::unique_ptr<client::Client> client_;
  std::shared_ptr<client::ParamSet> set_;
  std::unique_ptr<client::AsyncPushes> pushes_;  // Async
  std::unique_ptr<Mover> mover_;                 // Geo
  std::vector<float> table_;
  std::vector<std::vector<float>> dense_;  // by server
  bool killed_ = false;
  bool connecting_ = false;
  bool member_ = false;  // since its last step
  bool away_ = false;
  bool marking_ = false;
  uint64_t marked_ = 0;
};

}  // namespace cpudist::simulator
