// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/rounds/join.h"

#include <utility>
#include <vector>

namespace cpudist::client {
namespace {

// Server 0 holds its round until the others have this trainer as a member.
class RoundJoin final : public Operation {
 public:
  RoundJoin(const Membership& membership, Shared& shared, std::shared_ptr<SetState> set)
      : membership_(membership), shared_(shared), set_(std::move(set)) {}

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
    if (stage == kHold) set_->round = agreed_round(membership_, replies);
    if (stage == kRelease) set_->member = true;
  }
  RequestPtr to_server(uint32_t server, wire::JoinStep step) {
    return shared_.session.send(server, wire::FrameKind::kJoin, set_->id,
                                encode(wire::Join{step, set_->round}));
  }

  const Membership& membership_;
  Shared& shared_;
  const std::shared_ptr<SetState> set_;
};

}  // namespace

std::shared_ptr<Operation> RoundMembership::make_join(Shared& shared,
                                                      const std::shared_ptr<SetState>& set) const {
  return std::make_shared<RoundJoin>(*this, shared, set);
}

}  // namespace cpudist::client
