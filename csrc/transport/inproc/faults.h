// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Faults of an in-process network: what happens to each frame is drawn from one seeded generator,
// and one thread delivers what is left in order of time.
#pragma once

#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "base/wait.h"
#include "transport/inproc/channel.h"
#include "transport/inproc/link.h"

namespace cpudist::transport::inproc {

// Shared by the network, its links and the delivery thread. Thread-safe.
class FaultSchedule {
 public:
  explicit FaultSchedule(const FaultPlan& plan);
  const FaultPlan& plan() const { return plan_; }

  // Takes a frame for `to`, an end of `link`; false once stopped.
  bool send(const std::shared_ptr<Link>& link, End& to, wire::Frame frame);
  // Closes `to` behind the frames that are under way. Never subject to faults.
  void close(const std::shared_ptr<Link>& link, End& to, const std::string& reason);
  FaultCounts counts() const;

  void run();   // the delivery thread's body; returns after stop()
  void stop();  // drops what is under way

 private:
  enum class What { kFrame, kRelease, kClose, kCut };
  struct Event {
    TimePoint when;
    uint64_t order = 0;
    What what = What::kFrame;
    std::shared_ptr<Link> link;
    End* to = nullptr;
    wire::Frame frame;
    uint64_t held_id = 0;
    std::string reason;
  };
  static bool later(const Event& a, const Event& b);
  void push(Event event);
  Event pop();
  void release_held(const std::shared_ptr<Link>& link, End& to, TimePoint when);
  void happen(Event event);
  void count(uint64_t FaultCounts::* counter);
  double draw();

  const FaultPlan plan_;
  mutable std::mutex mutex_;
  ConditionVariable changed_;
  std::mt19937_64 generator_;
  std::vector<Event> heap_;
  uint64_t next_order_ = 0;
  FaultCounts counts_;
  bool stopped_ = false;
};

}  // namespace cpudist::transport::inproc
