// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "simulator/mover.h"

#include <utility>

#include "simulator/world.h"

namespace cpudist::simulator {
namespace {

client::ExchangeOptions options_of(const World& world) {
  client::ExchangeOptions options;
  options.rules = world.layout.configs;
  return options;
}

}  // namespace

Mover::Mover(World& world, uint32_t rank, std::shared_ptr<client::ParamSet> set,
             std::vector<float>& table, std::vector<void*> weights)
    : world_(world),
      rank_(rank),
      set_(std::move(set)),
      table_(table),
      weights_(std::move(weights)),
      counts_(table.size()),
      exchange_(set_, options_of(world)) {
  exchange_.reset(weights_);
}

void Mover::step(const client::TableGradient& gradient) {
  ++steps_;
  if (gradient.count > 0) {
    client::LocalRows rows;
    if (!world_.plan.is_remote()) rows = {table_.data(), nullptr, counts_.data()};
    exchange_.update_rows(gradient, rows, world_.layout.configs[0], steps_);
  }
  exchange_.forget_lookups();
  ++since_;
  const uint64_t interval = world_.plan.interval;
  if (since_ >= interval) {
    if (!idle_) finish();
    begin(false);
  }
  if (!idle_ && exchange_.keep_pace(weights_, interval - since_, interval)) finish();
}

void Mover::begin(bool whole) {
  world_.model.exchange(rank_);
  exchange_.begin(whole, {}, since_, since_);
  since_ = 0;
  idle_ = false;
}

void Mover::finish() {
  exchange_.finish(weights_);
  if (!idle_) ++world_.counts.exchanges;
  idle_ = true;
  world_.model.applied(rank_);
}

void Mover::hand_on_all() {
  finish();
  do {
    begin(true);
    finish();
  } while (exchange_.has_more());
}

void Mover::begin_to_hand_on() {
  finish();
  begin(true);
}

void Mover::mark_cut(uint64_t number, const std::string& name, uint64_t wait_ms) {
  exchange_.mark_cut(weights_, number, name, wait_ms);
}

}  // namespace cpudist::simulator
