// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// long: one class, the slices of an exchange, and the algebra of each

#include "client/geo/exchange.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "client/arrivals/pushes.h"
#include "client/push/cut.h"
#include "kernels/elementwise.h"
#include "kernels/hash.h"
#include "wire/codec/values.h"

namespace cpudist::client {
namespace {

// A slice takes some microseconds: a step is never late by more than that.
constexpr uint64_t kSliceElements = 4096;
constexpr uint64_t kSliceRows = 128;
constexpr uint64_t kAllSlices = std::numeric_limits<uint64_t>::max();
// Where steps pace an exchange, packing takes this part of the interval, and so does taking in: so
// long that no step is much longer than others, but short, because what others have moved is older
// with every step.
constexpr uint64_t kPacingParts = 10;
// Rows of one table in one push; more travel with the next, so that no message outgrows memory.
constexpr uint64_t kSentBytes = 32u << 20;
// Heads of a push and of each of its sections take less.
constexpr uint64_t kHeadBytes = 4096;
constexpr uint64_t kSectionBytes = 256;

// What a memory cap leaves to the rows of each table, beside dense deltas.
uint64_t room_for_rows(const SetState& set, uint32_t trainers, uint64_t cap_bytes) {
  const wire::ParamSetLayout& layout = set.layout;
  if (cap_bytes == 0 || layout.tables.empty()) return kSentBytes;
  // In rounds the pushes of all trainers wait for the last one.
  if (layout.mode == wire::UpdateMode::kRounds) cap_bytes /= std::max(trainers, 1u);
  std::vector<uint64_t> needed(set.server_count, kHeadBytes);
  for (uint32_t b = 0; b < layout.blocks.size(); ++b) {
    needed[layout.blocks[b].shard] += set.block_bytes(b) + kSectionBytes;
  }
  const uint64_t most = *std::max_element(needed.begin(), needed.end());
  const uint64_t sections = kSectionBytes * layout.tables.size();
  uint64_t row_bytes = 0;
  for (const wire::TableSpec& table : layout.tables) {
    row_bytes = std::max(row_bytes, sizeof(int64_t) + table.dim * sizeof(float));
  }
  if (cap_bytes >= most + sections + row_bytes * layout.tables.size()) {
    return std::min(kSentBytes, (cap_bytes - most - sections) / layout.tables.size());
  }
  throw Error(ErrorCode::kOverloaded,
              "the dense deltas of one exchange and a row of each table need " +
                  std::to_string(most + sections + row_bytes * layout.tables.size()) +
                  " bytes on a server, pushes may hold " + std::to_string(cap_bytes) +
                  " of each trainer; set CPUDIST_SERVER_MEMORY_CAP_BYTES higher, or to 0");
}

wire::ChangesView view_of(const wire::Frame& reply, const wire::ParamSetLayout& layout) {
  return wire::decode_changes(reply.payload.bytes(), layout);
}

double averaging_divisor(uint32_t members, double step) {
  const double count = members;
  return step == kRootStep ? std::sqrt(count) : std::max(count / step, 1.0);
}

constexpr size_t kPrefetchRows = 8;

[[noreturn]] void refuse(const ParamSet& set) {
  throw Error(ErrorCode::kInvalidArgument, "parameter set " + std::to_string(set.id()) +
                                               " exchanges no deltas, or has begun before");
}

// An exchange is one push at a time.
std::shared_ptr<PushQueue> queue_of(ParamSet& set) {
  set.check_open();
  const wire::ParamSetLayout& layout = set.state()->layout;
  if (!layout.exchanges_deltas || set.has_background()) refuse(set);
  QueueOptions options;
  options.mean.assign(layout.configs.size(), false);
  return start_queue(set, options);
}

std::vector<GeoTable> tables_of(ParamSet& set, const ExchangeOptions& options) {
  const wire::ParamSetLayout& layout = set.state()->layout;
  std::vector<GeoTable> tables;
  for (uint32_t t = 0; t < layout.tables.size(); ++t) {
    const wire::TableSpec& spec = layout.tables[t];
    const bool has_rule = t < options.rules.size();
    tables.emplace_back(spec, kernels::table_salt(spec.name), set.shared().owners,
                        set.state()->server_count, !options.alone,
                        has_rule ? &options.rules[t] : nullptr);
  }
  return tables;
}

}  // namespace

GeoExchange::GeoExchange(std::shared_ptr<ParamSet> set, ExchangeOptions options)
    : owner_(std::move(set)),
      set_(*owner_->state()),
      pool_(owner_->shared().pool),
      alone_(options.alone),
      rows_bytes_(room_for_rows(set_, owner_->shared().session.options().trainer_count,
                                options.push_cap_bytes)),
      queue_(queue_of(*owner_)),
      tables_(tables_of(*owner_, options)),
      slots_(*owner_, tables_, options.alone, options.cache_bytes),
      members_(owner_->shared().session.options().trainer_count) {
  for (uint32_t p = 0; p < set_.parameter_count && !alone_; ++p) {
    uint64_t size_bytes = 0;
    for (const uint32_t block : set_.blocks_of(p)) size_bytes += set_.block_bytes(block);
    dense_shadows_.emplace_back(size_bytes);
  }
}

GeoTable& GeoExchange::table(uint32_t index) {
  set_.table(index);  // throws for one that is not there
  return tables_[index];
}

void GeoExchange::check_idle(const char* what) const {
  owner_->check_open();
  if (phase_ == Phase::kIdle) return;
  throw Error(ErrorCode::kInternal, std::string("an exchange is under way while ") + what);
}

void GeoExchange::check(std::span<void* const> weights) const {
  owner_->check_open();
  set_.check_weights(weights);
}

void GeoExchange::update_rows(const TableGradient& gradient, const LocalRows& rows,
                              const kernels::OptimizerConfig& config, int64_t step) {
  owner_->check_open();
  if (const char* what = kernels::find_config_error(config)) {
    throw Error(ErrorCode::kInvalidArgument, std::string("step: ") + what);
  }
  if (table(gradient.table).slots() != nullptr) return slots_.update(gradient, config, step);
  table(gradient.table)
      .update(rows, config, step, {gradient.keys, static_cast<size_t>(gradient.count)},
              gradient.rows);
}

void GeoExchange::reset(std::span<void* const> weights) {
  check(weights);
  check_idle("weights are replaced");
  if (alone_) return;
  for (size_t p = 0; p < dense_shadows_.size(); ++p) {
    kernels::AlignedBuffer<uint8_t>& shadow = dense_shadows_[p];
    if (!shadow.empty()) std::memcpy(shadow.data(), weights[p], shadow.size());
  }
  for (GeoTable& table : tables_) table.forget_shadows();
  more_ = false;
}

void GeoExchange::undo(std::span<void* const> weights, std::span<const uint32_t> parameters,
                       std::span<const uint32_t> tables) {
  check(weights);
  if (alone_) return;
  for (const uint32_t p : parameters) {
    const auto& shadow = dense_shadows_.at(p);
    if (!shadow.empty()) std::memcpy(weights[p], shadow.data(), shadow.size());
  }
  for (const uint32_t t : tables) {
    GeoTable& rows = table(t);
    const size_t dim = rows.spec().dim;
    const auto held = slots_.lock(t);
    for (const auto& keys : rows.shadowed()) {
      for (const int64_t key : keys) {
        std::memcpy(row(t, key), rows.shadow(key), dim * sizeof(float));
      }
    }
  }
}

void GeoExchange::begin(bool whole, const OuterStep& step, uint64_t steps, uint64_t samples) {
  owner_->shared().settle();
  owner_->check_open();
  if (!set_.member) owner_->join();
  if (phase_ != Phase::kIdle || alone_) {
    throw Error(ErrorCode::kInternal, alone_ ? "there is nobody to exchange deltas with"
                                             : "the last exchange is still under way");
  }
  whole_ = whole;
  // In rounds the servers average.
  const bool on_arrival = set_.layout.mode == wire::UpdateMode::kOnArrival;
  averages_ = step.rows != 0.0 && on_arrival;
  rows_divisor_ = dense_divisor_ = on_arrival && !whole ? static_cast<double>(members_) : 1.0;
  if (averages_) {
    rows_divisor_ = averaging_divisor(members_, step.rows);
    dense_divisor_ = averaging_divisor(members_, step.dense);
  }
  outgoing_ = std::vector<Outgoing>(set_.server_count);
  for (uint32_t s = 0; s < set_.server_count; ++s) outgoing_[s].blocks = set_.shard_blocks[s];
  left_.clear();
  whole_ ? slots_.keep_all() : slots_.choose_retired();
  exact_ = whole_ || slots_.retires();
  for (uint32_t t = 0; t < tables_.size(); ++t) choose_rows(t);
  lay_out(steps, samples);
  // Nothing throws any more.
  for (GeoTable& table : tables_) table.next_interval();
  for (const Left& rows : left_) tables_[rows.table].put_back(rows.server, rows.keys);
  unsent_ = !left_.empty();
  left_.clear();
  for (const Outgoing& out : outgoing_) {
    for (const auto& keys : out.keys) stats_.rows_sent += keys.size();
  }
  travelling_ = steps;
  phase_ = Phase::kPack;
}

bool GeoExchange::has_more() const {
  owner_->check_open();
  return unsent_ || (more_ && set_.layout.mode == wire::UpdateMode::kOnArrival);
}

uint64_t GeoExchange::steps() const {
  owner_->check_open();
  return std::max(steps_, set_.dense_version(0).steps) + travelling_;
}

void GeoExchange::choose_rows(uint32_t index) {
  GeoTable& table = tables_[index];
  const size_t dim = table.spec().dim;
  auto keys = whole_ ? table.shadowed() : table.touched();
  if (whole_) {
    for (auto& owned : keys) {
      std::erase_if(owned, [&](int64_t key) {
        return std::memcmp(row(index, key), table.shadow(key), dim * sizeof(float)) == 0;
      });
    }
  }
  std::vector<std::vector<int64_t>> retired(set_.server_count);
  for (const int64_t key : slots_.retired(index)) retired[table.owner_of(key)].push_back(key);
  const size_t most = std::max<size_t>(rows_bytes_ / (sizeof(int64_t) + dim * sizeof(float)), 1);
  for (uint32_t s = 0; s < set_.server_count; ++s) {
    if (keys[s].size() > most) {
      const auto end = keys[s].begin() + static_cast<std::ptrdiff_t>(most);
      left_.push_back({index, s, {end, keys[s].end()}});
      table.make_room(s, left_.back().keys.size());
      keys[s].erase(end, keys[s].end());
    }
    // Those without room keep what they have moved, and their slots, until the next exchange.
    outgoing_[s].retired.push_back(keys[s].size());
    const size_t room = std::min(most - keys[s].size(), retired[s].size());
    keys[s].insert(keys[s].end(), retired[s].begin(),
                   retired[s].begin() + static_cast<std::ptrdiff_t>(room));
    outgoing_[s].keys.push_back(std::move(keys[s]));
  }
}

void GeoExchange::add_slices(uint32_t server, Part part, uint32_t index, uint64_t count,
                             uint64_t size) {
  for (uint64_t begin = 0; begin < count; begin += size) {
    slices_.push_back({server, part, index, begin, std::min(count, begin + size)});
  }
}

void GeoExchange::lay_out(uint64_t steps, uint64_t samples) {
  wire::PushHeader header;
  header.round = set_.round;
  header.samples = samples;
  header.steps = steps;
  header.configs = set_.layout.configs;
  slices_.clear();
  agreed_.clear();
  next_slice_ = 0;
  for (uint32_t s = 0; s < set_.server_count; ++s) {
    Outgoing& out = outgoing_[s];
    std::vector<wire::BlockRef> blocks;
    for (const uint32_t block : out.blocks) {
      add_slices(s, Part::kBlock, static_cast<uint32_t>(blocks.size()),
                 set_.layout.blocks[block].elements, kSliceElements);
      blocks.push_back({block, set_.block_bytes(block)});
    }
    std::vector<wire::TableRef> tables;
    for (uint32_t t = 0; t < tables_.size(); ++t) {
      wire::TableRef ref;
      ref.table = t;
      ref.row_count = out.keys[t].size();
      ref.dim = tables_[t].spec().dim;
      tables.push_back(ref);
      add_slices(s, Part::kRows, t, ref.row_count, kSliceRows);
      if (averages_) {
        agreed_.push_back({t, out.keys[t], std::vector<float>(ref.row_count * ref.dim)});
      }
    }
    out.filled = wire::layout_push(header, blocks, tables, pool_);
  }
  push_ = {};
  push_.configs = set_.layout.configs;
  push_.samples = samples;
  push_.dtype = dtype();
  push_.payloads.reserve(outgoing_.size());
}

void GeoExchange::send() {
  if (push_.payloads.empty()) {
    push_.read = set_.take_read();
    for (Outgoing& out : outgoing_) push_.payloads.push_back(std::move(out.filled.payload));
  }
  // An interrupt ends the wait for room, not the push.
  const auto note = [this] {
    if (!push_.payloads.empty()) return;
    outgoing_.clear();
    phase_ = Phase::kTravel;
  };
  try {
    queue_->add(std::move(push_));
  } catch (...) {
    note();
    throw;
  }
  note();
}

void GeoExchange::receive() {
  if (replies_.empty()) replies_ = queue_->take_arrived();
  views_.clear();
  slices_.clear();
  next_slice_ = 0;
  more_ = false;
  uint64_t rows_received = 0;
  // First: rows that somebody else has moved too come with the replies.
  for (uint32_t i = 0; i < agreed_.size(); ++i) {
    add_slices(0, Part::kAgreed, i, agreed_[i].keys.size(), kSliceRows);
  }
  for (uint32_t s = 0; s < replies_.size(); ++s) {
    views_.push_back(view_of(replies_[s], set_.layout));
    const wire::ChangesView& view = views_.back();
    more_ = more_ || view.header.more;
    set_.note_dense(s, view.header.version);
    for (uint32_t i = 0; i < view.blocks.size(); ++i) {
      add_slices(s, Part::kBlock, i, set_.layout.blocks[view.blocks[i].block].elements,
                 kSliceElements);
    }
    for (uint32_t i = 0; i < view.tables.size(); ++i) {
      add_slices(s, Part::kRows, i, view.tables[i].keys.size(), kSliceRows);
      rows_received += view.tables[i].keys.size();
    }
  }
  stats_.rows_received += rows_received;
  steps_ = views_.front().header.version.steps;
  travelling_ = 0;
  if (set_.layout.mode == wire::UpdateMode::kRounds)
    set_.round = views_.front().header.version.round;
  phase_ = Phase::kApply;
}

void GeoExchange::end_exchange() {
  // Before a barrier others have left already, and take part again after it.
  slots_.free_retired();
  if (!whole_) members_ = std::max(views_.front().header.members, 1u);
  replies_.clear();
  views_.clear();
  agreed_.clear();
  slices_.clear();
  ++stats_.exchanges;
  phase_ = Phase::kIdle;
}

bool GeoExchange::advance(std::span<void* const> weights, double budget_s) {
  check(weights);
  const auto budget =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(budget_s));
  return work(weights, Clock::now() + budget, kAllSlices);
}

bool GeoExchange::keep_pace(std::span<void* const> weights, uint64_t left, uint64_t interval) {
  check(weights);
  if (phase_ == Phase::kTravel) work(weights, TimePoint::max(), 0);
  if (next_slice_ == 0) more_calls_ = std::min(left, interval / kPacingParts);
  const uint64_t slices = slices_.size() - next_slice_;
  work(weights, TimePoint::max(), (slices + more_calls_) / (more_calls_ + 1));
  if (more_calls_ > 0) --more_calls_;
  return phase_ == Phase::kIdle;
}

bool GeoExchange::work(std::span<void* const> weights, TimePoint deadline, uint64_t slices) {
  const TimePoint began = Clock::now();
  while (phase_ != Phase::kIdle) {
    if (phase_ == Phase::kTravel) {
      if (!queue_->is_answered()) break;
      receive();
    } else if (next_slice_ < slices_.size()) {
      if (slices == 0) break;
      --slices;
      const Slice& slice = slices_[next_slice_];
      phase_ == Phase::kPack ? pack(slice, weights) : apply(slice, weights);
      ++next_slice_;
    } else if (phase_ == Phase::kPack) {
      send();
    } else {
      end_exchange();
    }
    if (Clock::now() >= deadline) break;
  }
  stats_.busy_s += std::chrono::duration<double>(Clock::now() - began).count();
  return phase_ == Phase::kIdle;
}

void GeoExchange::finish(std::span<void* const> weights) {
  check(weights);
  while (!work(weights, TimePoint::max(), kAllSlices)) {
    const TimePoint began = Clock::now();
    const auto note = [&] {
      stats_.wait_s += std::chrono::duration<double>(Clock::now() - began).count();
    };
    try {
      queue_->drain_pushes("exchange");
    } catch (const Error&) {
      note();
      throw;
    }
    note();
  }
}

void GeoExchange::mark_cut(std::span<void* const> weights, uint64_t number, const std::string& name,
                           uint64_t wait_ms, uint64_t hold_ms) {
  wire::Cut cut = make_cut(number, name, wait_ms);
  owner_->shared().settle();
  check(weights);
  while (phase_ == Phase::kPack) work(weights, TimePoint::max(), 1);
  queue_->mark(std::move(cut), hold_ms);
}

std::optional<CutAnswer> GeoExchange::cut_answer() {
  owner_->check_open();
  return queue_->take_cut_answer();
}

ExchangeStats GeoExchange::stats() const {
  owner_->check_open();
  ExchangeStats stats = stats_;
  for (const GeoTable& table : tables_) {
    stats.shadow_rows += table.shadow_rows();
    stats.memory_bytes += table.size_bytes();
    if (table.slots() != nullptr) stats.slot_rows += table.slots()->size();
  }
  stats.slot_bytes = slots_.size_bytes();
  stats.retired_rows = slots_.retired_rows();
  for (const auto& shadow : dense_shadows_) stats.memory_bytes += shadow.size();
  for (const Agreed& rows : agreed_) {
    stats.memory_bytes += rows.keys.size() * sizeof(int64_t) + rows.rows.size() * sizeof(float);
  }
  return stats;
}

// ---- slots of remote tables ---------------------------------------------------------------------

void GeoExchange::forget_lookups() {
  owner_->check_open();
  slots_.forget_lookups();
}

void GeoExchange::refresh_slots() {
  check_idle("slots are refreshed");
  slots_.refresh();
}

void GeoExchange::store_slots() {
  check_idle("slots are stored");
  slots_.store();
}

void GeoExchange::keep_budget() {
  check_idle("a budget is kept");
  slots_.keep_budget();
}

uint64_t GeoExchange::slot_count(uint32_t index) {
  owner_->check_open();
  return slots_.count(index);
}

void GeoExchange::read_slots(uint32_t index, const SlotArrays& to) {
  owner_->check_open();
  slots_.read(index, to);
}

void GeoExchange::write_slots(uint32_t index, uint64_t rows, const SlotArrays& from) {
  check_idle("slots are replaced");
  slots_.write(index, rows, from);
}

// ---- movement that is not handed on, as a snapshot has it ---------------------------------------

void GeoExchange::check_movement(const char* what) const {
  check_idle(what);
  if (alone_) throw Error(ErrorCode::kInternal, "there is nobody to exchange deltas with");
}

std::vector<int64_t> GeoExchange::moved_keys(uint32_t index, size_t* touched) {
  check_movement("movement is read");
  GeoTable& own = table(index);
  // What was handed on in full leaves nothing in rows that nobody has touched since.
  const bool exact = set_.layout.push_dtype == wire::WireDType::kFloat32;
  return own.moved(set_.table(index).weight(), exact, touched);
}

uint64_t GeoExchange::moved_count(uint32_t index) {
  size_t touched = 0;
  return moved_keys(index, &touched).size();
}

void GeoExchange::read_moved(uint32_t index, const MovedArrays& to) {
  size_t touched = 0;
  const std::vector<int64_t> keys = moved_keys(index, &touched);
  const size_t dim = tables_[index].spec().dim;
  for (size_t i = 0; i < keys.size(); ++i) {
    to.keys[i] = keys[i];
    to.touched[i] = i < touched ? 1 : 0;
    std::copy_n(row(index, keys[i]), dim, to.values + i * dim);
    std::copy_n(tables_[index].shadow(keys[i]), dim, to.agreed + i * dim);
  }
}

uint64_t GeoExchange::write_moved(uint32_t index, uint64_t rows, const MovedArrays& from) {
  check_movement("movement is put back");
  GeoTable& own = table(index);
  const size_t dim = own.spec().dim;
  float* const weight = set_.table(index).weight();
  // A run whose wire rounded has kept movement of rows that were not touched since. Without that
  // the next exchange takes it along: later ones look at what was touched alone.
  const bool exact = set_.layout.push_dtype == wire::WireDType::kFloat32;
  const auto held = slots_.lock(index);
  uint64_t put = 0;
  for (size_t i = 0; i < rows; ++i) {
    const int64_t key = from.keys[i];
    const bool here = own.slots() == nullptr ? static_cast<uint64_t>(key) < own.spec().rows
                                             : own.slots()->find(key) != nullptr;
    if (!here) continue;
    own.set_moved(key, weight, from.values + i * dim, from.agreed + i * dim,
                  exact || from.touched[i] != 0);
    ++put;
  }
  return put;
}

void GeoExchange::read_agreed(std::span<void* const> to) const {
  check_movement("shadows are read");
  for (size_t p = 0; p < dense_shadows_.size(); ++p) {
    const auto& shadow = dense_shadows_[p];
    if (to[p] != nullptr && !shadow.empty()) std::memcpy(to[p], shadow.data(), shadow.size());
  }
}

void GeoExchange::write_agreed(std::span<void* const> from) {
  check_movement("shadows are put back");
  for (size_t p = 0; p < dense_shadows_.size(); ++p) {
    auto& shadow = dense_shadows_[p];
    if (from[p] != nullptr && !shadow.empty()) std::memcpy(shadow.data(), from[p], shadow.size());
  }
}

// ---- a slice: what a trainer hands on, and what it takes in -------------------------------------

template <typename T>
T* GeoExchange::weight_of(const wire::BlockSpec& block, std::span<void* const> weights,
                          uint64_t element) const {
  return static_cast<T*>(weights[block.parameter]) + block.offset + element;
}

template <typename T>
T* GeoExchange::shadow_of(const wire::BlockSpec& block, uint64_t element) {
  return reinterpret_cast<T*>(dense_shadows_[block.parameter].data()) + block.offset + element;
}

void GeoExchange::pack(const Slice& slice, std::span<void* const> weights) {
  slice.part == Part::kBlock ? pack_block(slice, weights) : pack_rows(slice);
}

template <typename T, typename Round>
void GeoExchange::hand_on(T* weight, T* shadow, T* negated, size_t count, T divisor,
                          const Round& round, T* agreed) {
  const bool lossy = dtype() != wire::WireDType::kFloat32 && std::is_same_v<T, float>;
  if (lossy) unmoved_.assign(shadow, shadow + count);
  kernels::take_delta(weight, shadow, divisor, negated, count);
  const auto shadow_moves = [&](T share) {
    std::copy(unmoved_.begin(), unmoved_.end(), shadow);
    kernels::accumulate(shadow, negated, -share, count);
  };
  if (lossy) {
    round(negated);
    shadow_moves(1);  // what rounding leaves stays in weight - shadow
  }
  if (!averages_) return;
  if (agreed != nullptr) std::copy_n(shadow, count, agreed);
  lossy ? shadow_moves(divisor) : void(std::copy_n(weight, count, shadow));
}

void GeoExchange::pack_block(const Slice& slice, std::span<void* const> weights) {
  Outgoing& out = outgoing_[slice.server];
  const size_t count = slice.end - slice.begin;
  const wire::BlockSpec& block = set_.layout.blocks[out.blocks[slice.index]];
  uint8_t* target = out.filled.blocks[slice.index];
  // The answer has every dense value: nothing has to be kept for it.
  if (block.dtype == wire::DType::kFloat64) {
    hand_on<double>(
        weight_of<double>(block, weights, slice.begin), shadow_of<double>(block, slice.begin),
        reinterpret_cast<double*>(target) + slice.begin, count, dense_divisor_, [](double*) {},
        nullptr);
    return;
  }
  // A slice begins where a scale does.
  const auto round = [&](float* values) { round_block(dtype(), values, count); };
  hand_on<float>(weight_of<float>(block, weights, slice.begin),
                 shadow_of<float>(block, slice.begin),
                 reinterpret_cast<float*>(target) + slice.begin, count,
                 static_cast<float>(dense_divisor_), round, nullptr);
}

void GeoExchange::pack_rows(const Slice& slice) {
  Outgoing& out = outgoing_[slice.server];
  GeoTable& table = tables_[slice.index];
  const size_t dim = table.spec().dim;
  float* weight = set_.table(slice.index).weight();
  const bool is_static = table.slots() == nullptr;
  const auto held = slots_.lock(slice.index);
  const int64_t* keys = out.keys[slice.index].data();
  Agreed* agreed = averages_ ? &agreed_[slice.server * tables_.size() + slice.index] : nullptr;
  const auto round = [&](float* row) { round_rows(dtype(), row, 1, dim); };
  for (uint64_t i = slice.begin; i < slice.end; ++i) {
    if (is_static && i + kPrefetchRows < slice.end) {
      __builtin_prefetch(weight + static_cast<size_t>(keys[i + kPrefetchRows]) * dim);
      __builtin_prefetch(table.shadow(keys[i + kPrefetchRows]), 1);
    }
    out.filled.keys[slice.index][i] = keys[i];
    // The whole residue of a row that goes; averaging leaves none.
    const bool goes = i >= out.retired[slice.index] && !averages_;
    hand_on<float>(table.row(keys[i], weight), table.shadow(keys[i]),
                   out.filled.rows[slice.index] + i * dim, dim,
                   goes ? 1.0f : static_cast<float>(rows_divisor_), round,
                   agreed == nullptr ? nullptr : agreed->rows.data() + i * dim);
  }
}

void GeoExchange::apply(const Slice& slice, std::span<void* const> weights) {
  if (slice.part == Part::kAgreed) {
    const Agreed& agreed = agreed_[slice.index];
    apply_rows(slice, agreed.table, agreed.keys, agreed.rows);
    return;
  }
  const wire::ChangesView& view = views_[slice.server];
  if (slice.part == Part::kRows) {
    const wire::TableSection& section = view.tables[slice.index];
    apply_rows(slice, section.table, section.keys, section.rows);
    return;
  }
  const size_t count = slice.end - slice.begin;
  const wire::DenseSection& section = view.blocks[slice.index];
  const wire::BlockSpec& block = set_.layout.blocks[section.block];
  if (block.dtype == wire::DType::kFloat64) {
    kernels::merge_fresh(
        weight_of<double>(block, weights, slice.begin), shadow_of<double>(block, slice.begin),
        reinterpret_cast<const double*>(section.values.data()) + slice.begin, count);
  } else {
    kernels::merge_fresh(
        weight_of<float>(block, weights, slice.begin), shadow_of<float>(block, slice.begin),
        reinterpret_cast<const float*>(section.values.data()) + slice.begin, count);
  }
}

void GeoExchange::apply_rows(const Slice& slice, uint32_t index, std::span<const int64_t> keys,
                             std::span<const float> rows) {
  GeoTable& table = tables_[index];
  const size_t dim = table.spec().dim;
  float* weight = set_.table(index).weight();
  const auto held = slots_.lock(index);
  // What lookups have brought of rows without a slot may be older than what has come.
  if (table.slots() != nullptr) set_.table(index).refresh();
  for (uint64_t i = slice.begin; i < slice.end; ++i) {
    float* own = table.row(keys[i], weight);
    const float* fresh = rows.data() + i * dim;
    if (float* shadow = table.shadow(keys[i])) {
      kernels::merge_fresh(own, shadow, fresh, dim);
    } else if (own != nullptr) {
      std::memcpy(own, fresh, dim * sizeof(float));
    }
  }
}

}  // namespace cpudist::client
