// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/membership.h"

#include <string>
#include <utility>
#include <vector>

namespace cpudist::client {
namespace {

class ArrivalJoin final : public Operation {
 public:
  ArrivalJoin(Shared& shared, std::shared_ptr<SetState> set)
      : shared_(shared), set_(std::move(set)) {}

 private:
  std::vector<RequestPtr> send(size_t) override {
    return shared_.send_all(wire::FrameKind::kJoin, set_->id,
                            [] { return encode(wire::Join{wire::JoinStep::kMember, 0}); });
  }
  void receive(size_t, std::span<const RequestPtr>) override { set_->member = true; }

  Shared& shared_;
  const std::shared_ptr<SetState> set_;
};

// Server 0 holds its round until the others have this trainer as a member.
class RoundJoin final : public Operation {
 public:
  RoundJoin(Shared& shared, std::shared_ptr<SetState> set)
      : shared_(shared), set_(std::move(set)) {}

 private:
  enum Stage : size_t { kHold, kRegister, kRelease, kStages };

  size_t stage_count() const override { return kStages; }
  std::vector<RequestPtr> send(size_t stage) override {
    if (stage == kHold) return {to_server(0, wire::JoinStep::kHold)};
    if (stage == kRelease) return {to_server(0, wire::JoinStep::kRelease)};
    std::vector<RequestPtr> requests;
    for (uint32_t s = 1; s < shared_.server_count(); ++s) {
      requests.push_back(to_server(s, wire::JoinStep::kMember));
    }
    return requests;
  }
  void receive(size_t stage, std::span<const RequestPtr> replies) override {
    if (stage == kHold) set_->round = agreed_round(*set_, replies);
    if (stage == kRelease) set_->member = true;
  }
  RequestPtr to_server(uint32_t server, wire::JoinStep step) {
    return shared_.session.send(server, wire::FrameKind::kJoin, set_->id,
                                encode(wire::Join{step, set_->round}));
  }

  Shared& shared_;
  const std::shared_ptr<SetState> set_;
};

}  // namespace

std::shared_ptr<Operation> make_join(Shared& shared, const std::shared_ptr<SetState>& set) {
  if (set->layout.mode == wire::UpdateMode::kOnArrival) {
    return std::make_shared<ArrivalJoin>(shared, set);
  }
  return std::make_shared<RoundJoin>(shared, set);
}

uint64_t agreed_round(const SetState& set, std::span<const RequestPtr> replies) {
  uint64_t agreed = 0;
  if (set.layout.mode == wire::UpdateMode::kOnArrival) return agreed;
  for (size_t i = 0; i < replies.size(); ++i) {
    const uint64_t round = wire::decode_round_reply(replies[i]->reply.payload.bytes()).round;
    if (i > 0 && round != agreed) {
      throw Error(ErrorCode::kProtocol,
                  std::string(name_of(replies[i]->header.kind)) +
                      ": servers disagree about the round: " + std::to_string(agreed) + " and " +
                      std::to_string(round));
    }
    agreed = round;
  }
  return agreed;
}

}  // namespace cpudist::client
