// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Putting memory on huge pages beside who uses it.

#include "client/huge_pages.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "support/check.h"

using namespace cpudist;  // NOLINT

namespace {

constexpr auto kLong = std::chrono::seconds(60);

// Stands for the system: notes what it is given, and holds who gives it while it is closed.
class GatedSystem {
 public:
  struct Step {
    const uint8_t* begin;
    size_t size_bytes;
  };

  void pass(void* memory, size_t size_bytes) {
    std::unique_lock lock(mutex_);
    steps_.push_back({static_cast<const uint8_t*>(memory), size_bytes});
    inside_ = true;
    changed_.notify_all();
    CHECK(changed_.wait_for(lock, kLong, [this] { return open_; }));
    inside_ = false;
  }
  void set_open(bool open) {
    const std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }
  void wait_until_inside() {
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_for(lock, kLong, [this] { return inside_; }));
  }
  bool inside() {
    const std::lock_guard lock(mutex_);
    return inside_;
  }
  std::vector<Step> steps() {
    const std::lock_guard lock(mutex_);
    return steps_;
  }
  client::HugePages::Prefer prefer() {
    return [this](void* memory, size_t size_bytes) { pass(memory, size_bytes); };
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Step> steps_;
  bool open_ = true;
  bool inside_ = false;
};

}  // namespace

TEST(huge_pages_change_no_value_and_let_go) {
  std::vector<uint32_t> small(1000, 7);
  std::vector<uint32_t> large((48u << 20) / sizeof(uint32_t), 7);
  std::vector<uint32_t> larger(large);
  client::HugePages pages;
  pages.prefer(small.data(), small.size() * sizeof(uint32_t));
  pages.prefer(large.data(), large.size() * sizeof(uint32_t));
  pages.prefer(larger.data(), larger.size() * sizeof(uint32_t));
  large[0] = 8;
  pages.forget(larger.data());
  pages.forget(small.data());
  pages.wait();
  CHECK_EQ(large[0], 8u);
  for (size_t i = 1; i < large.size(); ++i) CHECK_EQ(large[i], 7u);
  CHECK(larger == std::vector<uint32_t>(larger.size(), 7));
  // It goes while there is work left.
  pages.prefer(larger.data(), larger.size() * sizeof(uint32_t));
}

TEST(huge_pages_reach_every_byte_once) {
  GatedSystem gate;
  std::vector<uint8_t> small(1000);
  std::vector<uint8_t> large((20u << 20) + 12345);
  client::HugePages pages(gate.prefer());
  pages.prefer(small.data(), small.size());
  CHECK_EQ(gate.steps().size(), 1u);  // at once, in this thread
  pages.prefer(large.data(), large.size());
  pages.wait();
  const auto steps = gate.steps();
  CHECK(steps.size() > 3);  // none may take long
  CHECK(steps[0].begin == small.data() && steps[0].size_bytes == small.size());
  const uint8_t* next = large.data();
  for (size_t i = 1; i < steps.size(); ++i) {
    CHECK(steps[i].begin == next);
    next += steps[i].size_bytes;
  }
  CHECK(next == large.data() + large.size());
}

TEST(huge_pages_touch_nothing_that_is_forgotten) {
  GatedSystem gate;
  std::vector<uint8_t> first(20u << 20);
  std::vector<uint8_t> second(20u << 20);
  client::HugePages pages(gate.prefer());
  gate.set_open(false);
  pages.prefer(first.data(), first.size());
  pages.prefer(second.data(), second.size());
  gate.wait_until_inside();
  pages.forget(second.data());  // not begun: nobody waits
  std::atomic<size_t> steps_then{0};
  std::thread forgets([&] {
    pages.forget(first.data());
    CHECK(!gate.inside());  // the step under way has ended
    steps_then = gate.steps().size();
  });
  gate.set_open(true);
  forgets.join();
  pages.wait();
  CHECK(steps_then > 0);
  CHECK_EQ(gate.steps().size(), steps_then.load());
  for (const GatedSystem::Step& step : gate.steps()) {
    CHECK(step.begin >= first.data() && step.begin < first.data() + first.size());
  }
}
