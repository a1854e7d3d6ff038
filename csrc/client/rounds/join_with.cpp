// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/rounds/join_with.h"

#include <span>
#include <utility>
#include <vector>

namespace cpudist::client {
namespace {

enum class To { kServerZero, kOtherServers, kAllServers };

struct Stage {
  bool first = false;  // the set
  wire::JoinStep step = wire::JoinStep::kHold;
  To to = To::kServerZero;
};

// Others cannot go on to the step that is joined without a push for it in `first`.
constexpr Stage kFirstInRounds[] = {
    {false, wire::JoinStep::kHoldPushed, To::kServerZero},
    {true, wire::JoinStep::kCurrent, To::kAllServers},
    {false, wire::JoinStep::kMember, To::kOtherServers},
    {false, wire::JoinStep::kRelease, To::kServerZero},
};
// Pushes are applied in `first` as they come: none may before others have marked the step before.
constexpr Stage kFirstOnArrival[] = {
    {false, wire::JoinStep::kHold, To::kServerZero},
    {false, wire::JoinStep::kMember, To::kOtherServers},
    {false, wire::JoinStep::kRelease, To::kServerZero},
    {false, wire::JoinStep::kOthersPushed, To::kServerZero},
    {true, wire::JoinStep::kCurrent, To::kAllServers},
};

class JoinWith final : public Operation {
 public:
  JoinWith(Shared& shared, Joining first, Joining last)
      : shared_(shared),
        first_(std::move(first)),
        last_(std::move(last)),
        stages_(first_.membership.counts_rounds() ? std::span<const Stage>(kFirstInRounds)
                                                  : kFirstOnArrival) {}

 private:
  size_t stage_count() const override { return stages_.size(); }

  std::vector<RequestPtr> send(size_t stage) override {
    const auto [first, step, to] = stages_[stage];
    const SetState& set = first ? *first_.set : *last_.set;
    const uint32_t begin = to == To::kOtherServers ? 1 : 0;
    const uint32_t end = to == To::kServerZero ? 1 : shared_.server_count();
    std::vector<RequestPtr> requests;
    for (uint32_t s = begin; s < end; ++s) {
      requests.push_back(shared_.session.send(s, wire::FrameKind::kJoin, set.id,
                                              encode(wire::Join{step, set.round})));
    }
    return requests;
  }

  void receive(size_t stage, std::span<const RequestPtr> replies) override {
    if (stage == 0) last_.set->round = agreed_round(last_.membership, replies);
    if (stages_[stage].first) first_.set->round = agreed_round(first_.membership, replies);
    if (stage + 1 == stages_.size()) first_.set->member = last_.set->member = true;
  }

  Shared& shared_;
  const Joining first_;
  const Joining last_;
  const std::span<const Stage> stages_;
};

}  // namespace

std::shared_ptr<Operation> make_join_with(Shared& shared, Joining first, Joining last) {
  return std::make_shared<JoinWith>(shared, std::move(first), std::move(last));
}

}  // namespace cpudist::client
