// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/update/parts.h"

#include <string>
#include <utility>

#include "base/errors.h"
#include "server/update/push.h"
#include "wire/malformed.h"

namespace cpudist::server {
namespace {

// With a second between two, on links that lose nothing but themselves: a minute.
constexpr uint32_t kMostMissed = 64;

}  // namespace

void PushParts::keep(uint32_t rank, Buffer payload, const wire::ParamSetLayout& layout,
                     uint32_t shard, ServerCounters& counters) {
  const auto part = std::make_shared<PushPart>();
  part->pending = CountedBytes(counters.pending_bytes, payload.size());
  part->payload = std::move(payload);
  part->view = wire::decode_frame([&] { return wire::decode_part(part->payload.bytes(), layout); });
  for (const wire::DenseSection& section : part->view.blocks) {
    const wire::BlockSpec& spec = layout.blocks[section.block];
    if (spec.shard == shard) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "part: block " + spec.name + " belongs to another server");
  }
  const std::lock_guard lock(mutex_);
  Kept& kept = kept_[rank];
  if (part->view.round < kept.round) return;
  if (part->view.round > kept.round) kept = Kept{part->view.round, {}, 0};
  for (const wire::DenseSection& section : part->view.blocks) {
    kept.blocks.try_emplace(section.block, Block{part, section.values});
  }
}

PushParts::Found PushParts::complete(const wire::ParamSetLayout& layout, uint32_t shard,
                                     Push* push) {
  const uint64_t round = push->view.header.round;
  const std::lock_guard lock(mutex_);
  for (wire::DenseSection& section : push->view.blocks) {
    const wire::BlockSpec& spec = layout.blocks[section.block];
    if (!section.values.empty() || spec.elements == 0) continue;
    if (spec.shard != shard) {
      throw Error(ErrorCode::kInvalidArgument,
                  "push: block " + spec.name + " belongs to another server");
    }
    Kept& kept = kept_[push->ticket.rank];
    if (kept.round < round) kept = Kept{round, {}, 0};
    const auto found = kept.blocks.find(section.block);
    if (kept.round == round && found != kept.blocks.end()) {
      section.values = found->second.values;
      push->parts.push_back(found->second.part);
      continue;
    }
    if (++kept.missed > kMostMissed) {
      throw Error(ErrorCode::kProtocol, "the push of trainer " + std::to_string(push->ticket.rank) +
                                            " for round " + std::to_string(round) + " came " +
                                            std::to_string(kMostMissed) +
                                            " times and names block " + spec.name +
                                            " as one whose gradient came before it; it did not");
    }
    return kept.missed == 1 ? Found::kSendAgain : Found::kWait;
  }
  return Found::kAll;
}

void PushParts::taken(uint32_t rank, uint64_t round) {
  const std::lock_guard lock(mutex_);
  const auto kept = kept_.find(rank);
  if (kept != kept_.end()) kept->second = Kept{round + 1, {}, 0};
}

void PushParts::forget(uint32_t rank) {
  const std::lock_guard lock(mutex_);
  kept_.erase(rank);
}

void PushParts::clear() {
  const std::lock_guard lock(mutex_);
  kept_.clear();
}

}  // namespace cpudist::server
