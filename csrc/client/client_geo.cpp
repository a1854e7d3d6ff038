// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Steps and exchanges of a trainer that steps by itself, as the training thread takes them.

#include "client/client_impl.h"
#include "client/geo/exchange.h"

namespace cpudist::client {
namespace {

TimePoint after(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// Shared: an abort from another thread takes it out of the set.
using GeoExchangePtr = std::shared_ptr<GeoExchange>;

GeoExchangePtr exchange_in(const ClientSetPtr& set, std::mutex& sets_mutex) {
  const std::lock_guard lock(sets_mutex);
  if (set->exchange) return set->exchange;
  throw Error(ErrorCode::kInvalidArgument, "parameter set " + std::to_string(set->id) +
                                               " exchanges no deltas: call start_exchange first");
}

}  // namespace

void Client::start_exchange(uint32_t param_set, bool alone, uint64_t memory_cap_bytes) {
  const ClientSetPtr set = impl_->find(param_set);
  auto queue = impl_->queue_of(*set);
  if (!set->layout.exchanges_deltas || !queue || set->exchange) {
    throw Error(ErrorCode::kInvalidArgument,
                "parameter set " + std::to_string(param_set) +
                    " exchanges no deltas, has no queue, or has begun before");
  }
  auto exchange = std::make_shared<GeoExchange>(*set, std::move(queue), impl_->pool, impl_->owners,
                                                impl_->session.options().trainer_count, alone,
                                                memory_cap_bytes);
  const std::lock_guard lock(impl_->sets_mutex);
  set->exchange = std::move(exchange);
}

void Client::reset_exchange(uint32_t param_set, std::span<void* const> weights) {
  const ClientSetPtr set = impl_->find(param_set);
  set->check_weights(weights);
  exchange_in(set, impl_->sets_mutex)->reset(weights);
}

void Client::undo_movement(uint32_t param_set, std::span<void* const> weights,
                           std::span<const uint32_t> parameters, std::span<const uint32_t> tables) {
  const ClientSetPtr set = impl_->find(param_set);
  set->check_weights(weights);
  exchange_in(set, impl_->sets_mutex)->undo(weights, parameters, tables);
}

void Client::update_rows(uint32_t param_set, const TableGradient& gradient, const LocalRows& rows,
                         const kernels::OptimizerConfig& config, int64_t step) {
  const ClientSetPtr set = impl_->find(param_set);
  if (const char* what = kernels::find_config_error(config)) {
    throw Error(ErrorCode::kInvalidArgument, std::string("step: ") + what);
  }
  exchange_in(set, impl_->sets_mutex)
      ->table(gradient.table)
      .update(rows, config, step, {gradient.keys, static_cast<size_t>(gradient.count)},
              gradient.rows);
}

void Client::begin_exchange(uint32_t param_set, bool whole, bool averages, uint64_t steps,
                            uint64_t samples) {
  impl_->settle();
  const ClientSetPtr set = impl_->find(param_set);
  if (!set->member) join(param_set);
  exchange_in(set, impl_->sets_mutex)->begin(whole, averages, steps, samples);
}

bool Client::advance_exchange(uint32_t param_set, std::span<void* const> weights, double budget_s) {
  const ClientSetPtr set = impl_->find(param_set);
  set->check_weights(weights);
  return exchange_in(set, impl_->sets_mutex)->advance(weights, after(budget_s));
}

void Client::finish_exchange(uint32_t param_set, std::span<void* const> weights) {
  const ClientSetPtr set = impl_->find(param_set);
  set->check_weights(weights);
  exchange_in(set, impl_->sets_mutex)->finish(weights);
}

bool Client::exchange_has_more(uint32_t param_set) {
  return exchange_in(impl_->find(param_set), impl_->sets_mutex)->has_more();
}

uint64_t Client::exchange_steps(uint32_t param_set) {
  return exchange_in(impl_->find(param_set), impl_->sets_mutex)->steps();
}

ExchangeStats Client::exchange_stats(uint32_t param_set) {
  return exchange_in(impl_->find(param_set), impl_->sets_mutex)->stats();
}

}  // namespace cpudist::client
