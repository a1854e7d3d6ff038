// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "wire/codec/keys.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "wire/checks.h"

namespace cpudist::wire {
namespace {

constexpr size_t kBlockKeys = 128;
constexpr uint32_t kShiftBits = 6;
constexpr uint32_t kShiftMax = 61;  // gaps are below 2^64: at most seven zeros then
constexpr uint32_t kWordBits = 64;
constexpr uint32_t kStepBits = 32;

// Bits of the block without its parameter.
uint64_t cost_of(std::span<const uint64_t> gaps, uint32_t shift) {
  uint64_t bits = gaps.size() * (shift + 1);
  for (const uint64_t gap : gaps) bits += gap >> shift;
  return bits;
}

// The best parameter lies next to the logarithm of the mean.
uint32_t best_shift(std::span<const uint64_t> gaps) {
  uint64_t sum = 0;
  for (const uint64_t gap : gaps) sum += gap;
  const auto middle = static_cast<uint32_t>(std::bit_width(sum / gaps.size()));
  const uint32_t first = std::min(middle < 2 ? 0 : middle - 2, kShiftMax);
  uint32_t best = first;
  uint64_t least = cost_of(gaps, first);
  for (uint32_t shift = first + 1; shift <= std::min(middle, kShiftMax); ++shift) {
    const uint64_t cost = cost_of(gaps, shift);
    if (cost >= least) continue;
    best = shift;
    least = cost;
  }
  return best;
}

// What is added to keys, modulo 2^64, so that they increase from 0 on.
constexpr uint64_t offset_of(bool open) { return open ? uint64_t{1} << 63 : 0; }

}  // namespace

void BitWriter::put(uint64_t value, uint32_t count) {
  for (; count > kStepBits; count -= kStepBits) {
    put(value & 0xffffffffu, kStepBits);
    value >>= kStepBits;
  }
  word_ |= value << used_;
  used_ += count;
  if (used_ < kStepBits) return;
  const auto step = static_cast<uint32_t>(word_);
  const auto* bytes = reinterpret_cast<const uint8_t*>(&step);
  bytes_->insert(bytes_->end(), bytes, bytes + sizeof(step));
  word_ >>= kStepBits;
  used_ -= kStepBits;
}

void BitWriter::put_zeros(uint64_t count) {
  for (; count > kStepBits; count -= kStepBits) put(0, kStepBits);
  put(0, static_cast<uint32_t>(count));
}

void BitWriter::finish() {
  for (; used_ > 0; used_ -= std::min(used_, 8u)) {
    bytes_->push_back(static_cast<uint8_t>(word_));
    word_ >>= 8;
  }
}

void BitReader::refill() {
  // Whole words where they are there, else byte by byte.
  if (bytes_.size() - next_ >= sizeof(uint64_t)) {
    uint64_t more;
    std::memcpy(&more, bytes_.data() + next_, sizeof(more));
    const uint32_t taken = (kWordBits - 1 - available_) / 8;
    if (taken < 8) more &= (uint64_t{1} << (taken * 8)) - 1;
    word_ |= more << available_;
    available_ += taken * 8;
    next_ += taken;
    return;
  }
  while (available_ <= kWordBits - 8 && next_ < bytes_.size()) {
    word_ |= static_cast<uint64_t>(bytes_[next_++]) << available_;
    available_ += 8;
  }
}

uint64_t BitReader::take(uint32_t count) {
  if (count == 0) return 0;
  constexpr uint32_t kStep = 32;
  if (count > kStep) {
    const uint64_t low = take(kStep);
    return low | (take(count - kStep) << kStep);
  }
  if (available_ < count) refill();
  if (available_ < count) refuse("coded keys end too early");
  const uint64_t value = word_ & ((uint64_t{1} << count) - 1);
  word_ >>= count;
  available_ -= count;
  return value;
}

uint64_t BitReader::take_zeros() {
  uint64_t zeros = 0;
  while (word_ == 0) {
    zeros += available_;
    available_ = 0;
    refill();
    if (available_ == 0) refuse("coded keys end too early");
  }
  const auto more = static_cast<uint32_t>(std::countr_zero(word_));
  // The bit itself may be the last of the word.
  word_ = more + 1 == kWordBits ? 0 : word_ >> (more + 1);
  available_ -= more + 1;
  return zeros + more;
}

size_t BitReader::finish() {
  const uint32_t rest = available_ % 8;
  if ((word_ & ((uint64_t{1} << rest) - 1)) != 0) refuse("padding of coded keys is not zero");
  return next_ - available_ / 8;
}

void encode_keys(std::span<const int64_t> keys, bool open, std::vector<uint8_t>* out) {
  const uint64_t offset = offset_of(open);
  out->reserve(out->size() + keys.size() * sizeof(uint32_t));
  BitWriter writer(out);
  uint64_t gaps[kBlockKeys];
  uint64_t next = 0;  // the lowest that the next key can be
  for (size_t begin = 0; begin < keys.size(); begin += kBlockKeys) {
    const size_t count = std::min(kBlockKeys, keys.size() - begin);
    for (size_t i = 0; i < count; ++i) {
      const uint64_t key = static_cast<uint64_t>(keys[begin + i]) + offset;
      gaps[i] = key - next;
      next = key + 1;
    }
    const uint32_t shift = best_shift({gaps, count});
    writer.put(shift, kShiftBits);
    for (size_t i = 0; i < count; ++i) {
      const uint64_t zeros = gaps[i] >> shift;
      const uint64_t low = gaps[i] & ((uint64_t{1} << shift) - 1);
      if (zeros + 1 + shift <= kStepBits) {  // as nearly always
        writer.put((low << 1 | 1) << zeros, static_cast<uint32_t>(zeros) + 1 + shift);
        continue;
      }
      writer.put_zeros(zeros);
      writer.put(1, 1);
      writer.put(low, shift);
    }
  }
  writer.finish();
}

size_t decode_keys(std::span<const uint8_t> bytes, const KeyRange& range, std::span<int64_t> keys) {
  BitReader reader(bytes);
  const uint64_t offset = offset_of(range.open);
  const uint64_t last = range.open ? ~uint64_t{0} : range.rows - 1;
  bool any = range.open || range.rows > 0;  // keys that may still come: next to last
  uint64_t next = 0;
  for (size_t begin = 0; begin < keys.size(); begin += kBlockKeys) {
    const size_t count = std::min(kBlockKeys, keys.size() - begin);
    const auto shift = static_cast<uint32_t>(reader.take(kShiftBits));
    if (shift > kShiftMax) refuse("coded keys with an unknown parameter");
    for (size_t i = 0; i < count; ++i) {
      const uint64_t high = reader.take_zeros();
      // Before it is shifted.
      if (!any || high > last >> shift) refuse("a coded key is outside the rows of its table");
      const uint64_t gap = (high << shift) | reader.take(shift);
      if (gap > last - next) refuse("a coded key is outside the rows of its table");
      const uint64_t key = next + gap;
      keys[begin + i] = static_cast<int64_t>(key - offset);
      any = key != last;
      next = key + 1;
    }
  }
  return reader.finish();
}

}  // namespace cpudist::wire
