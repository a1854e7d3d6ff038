// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Storage and update of a dense block.

#include "table/dense_block.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/errors.h"

namespace cpudist::table {
DenseBlock::DenseBlock(uint32_t id, wire::BlockSpec spec, const kernels::OptimizerConfig& config,
                       Averaging averaging, std::shared_ptr<MemoryCap> cap)
    : id_(id),
      spec_(std::move(spec)),
      config_(config),
      averaging_(averaging),
      kept_(std::make_unique<MemoryCap::Kept>(std::move(cap))) {
  kept_->promise(planned_bytes());
}

uint64_t DenseBlock::planned_bytes() const {
  const size_t values = spec_.elements * size_of(spec_.dtype) * (averaging_.on() ? 2 : 1);
  const size_t state = kernels::state_elements(config_, spec_.elements, spec_.row_width);
  return values + state * size_of(spec_.dtype);
}

void DenseBlock::check(const wire::BlockValues& values) const {
  const size_t size = size_of(spec_.dtype);
  const size_t state_count = kernels::state_elements(config_, spec_.elements, spec_.row_width);
  const bool fits = values.weights.size() == spec_.elements * size &&
                    (values.state.empty() || values.state.size() == state_count * size) &&
                    (values.average.empty() || values.average.size() == values.weights.size());
  if (!fits) {
    throw Error(ErrorCode::kInvalidArgument,
                "block " + spec_.name + ": " + std::to_string(values.weights.size()) +
                    " bytes of weights and " + std::to_string(values.state.size()) +
                    " of state do not fit " + std::to_string(spec_.elements) + " elements with " +
                    std::to_string(state_count) + " of state");
  }
}

uint64_t DenseBlock::image_bytes() const {
  return weight_.size() + state_.size() + average_.size();
}

void DenseBlock::keep() noexcept {
  const std::shared_ptr<BlockImage> image = std::move(image_);
  if (image == nullptr) return;
  image->values.reset(new (std::nothrow) uint8_t[image_bytes()]);
  uint8_t* to = image->values.get();
  if (to == nullptr) return image->memory->fail(ImageMemory::Failure::kMemory);
  for (const auto part : {weight(), state()}) {
    if (!part.empty()) std::memcpy(to, part.data(), part.size());
    to += part.size();
  }
  read_average(image->updates, to);
}

void DenseBlock::store(const wire::BlockValues& values, uint64_t updates) {
  check(values);
  keep();
  const size_t size = size_of(spec_.dtype);
  const size_t state_count = kernels::state_elements(config_, spec_.elements, spec_.row_width);
  if (!stored_) {
    weight_ = kernels::AlignedBuffer<uint8_t>(spec_.elements * size);
    state_ = kernels::AlignedBuffer<uint8_t>(kernels::checked_size_bytes(state_count, size));
    if (averaging_.on()) average_ = kernels::AlignedBuffer<uint8_t>(weight_.size());
    stored_ = true;
  }
  if (!values.weights.empty()) {
    std::memcpy(weight_.data(), values.weights.data(), values.weights.size());
  }
  if (!values.state.empty()) {
    std::memcpy(state_.data(), values.state.data(), values.state.size());
  } else if (spec_.dtype == wire::DType::kFloat64) {
    init_state<double>();
  } else {
    init_state<float>();
  }
  step_ = values.step;
  if (average_.empty()) return;
  const auto average = values.average.empty() ? weight() : values.average;
  std::memcpy(average_.data(), average.data(), average_.size());
  averaged_ = updates;
}

void DenseBlock::renumber(uint64_t before, uint64_t after) {
  keep();
  if (before > averaged_) read_average(before, average_.data());
  averaged_ = after;
}

void DenseBlock::update(const kernels::OptimizerConfig& config, const void* gradient,
                        uint64_t round) {
  keep();
  if (averaging_.on() && round > averaged_) {
    draw_average_to(average_.data(), averaging_.power(round - averaged_));
  }
  if (spec_.dtype == wire::DType::kFloat64) {
    update_as(config, static_cast<const double*>(gradient));
  } else {
    update_as(config, static_cast<const float*>(gradient));
  }
  if (!averaging_.on()) return;
  // One that was loaded goes on also in the first update of this set.
  draw_average_to(average_.data(),
                  averaging_.kept(step_ > 1 ? std::max<uint64_t>(round, 1) : round));
  averaged_ = round + 1;
}

void DenseBlock::read_average(uint64_t updates, uint8_t* out) const {
  if (average_.empty()) return;
  if (out != average_.data()) std::memcpy(out, average_.data(), average_.size());
  if (updates > averaged_) draw_average_to(out, averaging_.power(updates - averaged_));
}

void DenseBlock::draw_average_to(uint8_t* out, double kept) const {
  const auto draw = [&](auto zero) {
    using T = decltype(zero);
    draw_average(reinterpret_cast<T*>(out), reinterpret_cast<const T*>(weight_.data()),
                 spec_.elements, kept);
  };
  if (spec_.dtype == wire::DType::kFloat64) {
    draw(double{});
  } else {
    draw(float{});
  }
}

template <typename T>
void DenseBlock::init_state() {
  if (state_.empty()) return;
  kernels::init_state(config_, reinterpret_cast<T*>(state_.data()), spec_.elements,
                      spec_.row_width);
}

template <typename T>
void DenseBlock::update_as(const kernels::OptimizerConfig& config, const T* gradient) {
  ++step_;
  const auto scalars = kernels::make_step<T>(config, static_cast<int64_t>(step_));
  kernels::update(scalars, reinterpret_cast<T*>(weight_.data()),
                  reinterpret_cast<T*>(state_.data()), gradient, spec_.elements, spec_.row_width);
}

}  // namespace cpudist::table
