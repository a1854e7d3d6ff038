// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the pushes of an update are answered with.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "server/outbox.h"
#include "server/state.h"
#include "server/update/push.h"
#include "wire/messages.h"

namespace cpudist::server {

// Thread safety: that of the set, whose lock is held: shared for const members, else exclusively.
class Replies {
 public:
  virtual ~Replies() = default;

  // ---- who takes part ----
  virtual void add_member(uint32_t rank) = 0;
  virtual void remove_member(uint32_t rank) = 0;
  // `rank` takes part, and has all values as of now.
  virtual void follow(uint32_t rank) = 0;
  virtual void forget(uint32_t rank) = 0;  // it does not come back, or begins anew

  // ---- updates ----
  // Throws for a push that is not to be answered so.
  virtual void check_push(const wire::PushHeader& header) const = 0;
  // An update was made of these pushes.
  virtual void note(const Pushes& pushes) = 0;
  // The answer to each push of an update; `blocks` are those that the update has changed, or of
  // which the pushers may not know the values.
  virtual std::map<uint32_t, Answer> answers(const Pushes& pushes,
                                             const std::vector<uint32_t>& blocks) = 0;
  virtual uint64_t size_bytes() const = 0;  // of what it remembers
};

// The blocks themselves, and of the rows that the sender of a push holds those that have been
// updated since. Remembers nothing of anybody.
class ValueReplies final : public Replies {
 public:
  explicit ValueReplies(const ParamState& state) : state_(state) {}

  void add_member(uint32_t) override {}
  void remove_member(uint32_t) override {}
  void follow(uint32_t) override {}
  void forget(uint32_t) override {}
  void check_push(const wire::PushHeader&) const override {}
  void note(const Pushes&) override {}
  std::map<uint32_t, Answer> answers(const Pushes& pushes,
                                     const std::vector<uint32_t>& blocks) override;
  uint64_t size_bytes() const override { return 0; }

 private:
  SharedPayload held_reply(const std::vector<uint32_t>& blocks, const Push& push) const;

  const ParamState& state_;
};

}  // namespace cpudist::server
