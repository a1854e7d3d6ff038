// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/arrivals/join.h"

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

}  // namespace

std::shared_ptr<Operation> ArrivalMembership::make_join(
    Shared& shared, const std::shared_ptr<SetState>& set) const {
  return std::make_shared<ArrivalJoin>(shared, set);
}

}  // namespace cpudist::client
