// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the frames that are under way on a listener may take, of memory and of time, and the memory
// that they have taken: one budget over all its connections and both directions.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace cpudist::transport {

struct FlowLimits {
  FlowLimits();  // of what this machine has, and the default liveness
  // Silence that is none yet, of the process or on its way, is to end no frame.
  void heed(std::chrono::milliseconds liveness);
  // Of payloads that have begun to come in, and of what waits to be sent.
  uint64_t budget_bytes;
  // A frame that comes in and has neither got on by kFlowStepBytes nor to its end for so long is
  // given up, as silence is: a byte now and then is no sign of life.
  std::chrono::milliseconds slow{10000};
  // The same while others wait for its memory; and for what a peer does not take then.
  std::chrono::milliseconds stalled{1000};
  // The longest wait of a frame that comes in. It is longer than `stalled`; longer than a fraction
  // of a liveness it must not be, as its sender hears nothing meanwhile.
  std::chrono::milliseconds patience{1250};
};

inline constexpr uint64_t kFlowStepBytes = 64u << 10;

// Thread safety: all members.
class FlowBudget {
 public:
  explicit FlowBudget(uint64_t bytes) : bytes_(bytes) {}
  FlowBudget(const FlowBudget&) = delete;
  FlowBudget& operator=(const FlowBudget&) = delete;

  // Of what was `before` there is `now` so much; never refused: whoever looks stops in time.
  void change(uint64_t before_bytes, uint64_t now_bytes) {
    taken_bytes_.fetch_add(now_bytes - before_bytes, std::memory_order_relaxed);
  }
  uint64_t bytes() const { return bytes_; }
  uint64_t taken_bytes() const { return taken_bytes_.load(std::memory_order_relaxed); }
  bool exceeded() const { return taken_bytes() > bytes_; }
  // So far that nobody is to make it more.
  bool far_exceeded() const { return taken_bytes() / 2 > bytes_; }

 private:
  const uint64_t bytes_;
  std::atomic<uint64_t> taken_bytes_{0};  // wraps where a change makes it less
};

}  // namespace cpudist::transport
