// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/push/early.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "wire/push.h"

namespace cpudist::client {

// With the lock.
void EarlyGradients::begin(uint64_t round) {
  if (round == round_) return;
  round_ = round;
  round_bytes_ = 0;
  closed_ = false;
  forget_blocks();
  requests_.clear();
}

// With the lock.
void EarlyGradients::forget_blocks() {
  for (const auto& [block, sent] : blocks_) {
    if (!sent.named) changed_bytes_ += sent.values.size();
  }
  blocks_.clear();
}

bool EarlyGradients::has_takers(const Session& session) const {
  for (uint32_t server = 0; server < takers_.size(); ++server) {
    if (takers_[server] && session.over_network(server)) return true;
  }
  return false;
}

uint64_t EarlyGradients::send(Session& session, uint32_t set, const wire::ParamSetLayout& layout,
                              std::span<const std::vector<uint32_t>> parameter_blocks,
                              uint64_t round, std::span<const ParameterGradient> gradients,
                              const wire::Pool& pool) {
  std::vector<std::map<uint32_t, const uint8_t*>> shares(takers_.size());
  {
    const std::lock_guard lock(mutex_);
    begin(round);
    if (closed_) return 0;
    for (const ParameterGradient& gradient : gradients) {
      if (gradient.parameter >= parameter_blocks.size()) continue;
      for (const uint32_t b : parameter_blocks[gradient.parameter]) {
        const wire::BlockSpec& block = layout.blocks[b];
        if (!takers_[block.shard] || block.elements == 0 || blocks_.contains(b)) continue;
        if (!session.over_network(block.shard)) continue;
        const uint64_t size_bytes = block.elements * size_of(block.dtype);
        if (round_bytes_ + size_bytes > kMostBytes) continue;
        round_bytes_ += size_bytes;
        const auto* base = static_cast<const uint8_t*>(gradient.gradient);
        shares[block.shard][b] = base + block.offset * size_of(block.dtype);
      }
    }
  }
  uint64_t sent_bytes = 0;
  for (uint32_t server = 0; server < shares.size(); ++server) {
    if (shares[server].empty()) continue;
    std::vector<wire::BlockRef> refs;
    for (const auto& [b, values] : shares[server]) {
      const wire::BlockSpec& block = layout.blocks[b];
      refs.push_back({b, block.elements * size_of(block.dtype)});
    }
    wire::FilledPush filled = wire::layout_part(round, refs, pool);
    size_t i = 0;
    for (const auto& [b, values] : shares[server]) {
      std::memcpy(filled.blocks[i], values, refs[i].size_bytes);
      sent_bytes += refs[i++].size_bytes;
    }
    const Buffer kept = filled.payload.share();
    const RequestPtr request =
        session.send(server, wire::FrameKind::kPart, set, std::move(filled.payload));
    const std::lock_guard lock(mutex_);
    requests_.push_back(request);
    for (i = 0; i < refs.size(); ++i) {
      blocks_.emplace(refs[i].block,
                      Sent{kept.share(), {filled.blocks[i], refs[i].size_bytes}, request, false});
    }
  }
  sent_bytes_ += sent_bytes;
  return sent_bytes;
}

void EarlyGradients::drop_refused(Session& session) {
  const std::lock_guard lock(mutex_);
  const auto refused = [&](const RequestPtr& request) { return session.refused({&request, 1}); };
  std::erase_if(blocks_, [&](const auto& entry) { return refused(entry.second.request); });
  std::erase_if(requests_, refused);
}

bool EarlyGradients::holds(uint32_t block, uint64_t round, std::span<const uint8_t> gradient) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  if (round != round_ || found == blocks_.end()) return false;
  const std::span<const uint8_t> sent = found->second.values;
  found->second.named =
      sent.size() == gradient.size() && std::memcmp(sent.data(), gradient.data(), sent.size()) == 0;
  return found->second.named;
}

std::vector<RequestPtr> EarlyGradients::take(uint64_t round) {
  const std::lock_guard lock(mutex_);
  begin(round);
  closed_ = true;
  forget_blocks();
  return std::exchange(requests_, {});
}

void EarlyGradients::drop(Session& session) {
  std::vector<RequestPtr> requests;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    forget_blocks();
    requests.swap(requests_);
  }
  session.give_up(requests);
}

}  // namespace cpudist::client
