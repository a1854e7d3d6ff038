// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "table/admission/sketch.h"

#include <algorithm>

namespace cpudist::table {
namespace {

// Additions for which one line is halved: there are 64 bytes in it, and 2 additions for each.
constexpr uint64_t kAdditionsPerLine = 2 * kernels::kCacheLineBytes;
constexpr uint64_t kHalves = 0x7777777777777777u;  // what halving may leave of 16 counters

}  // namespace

KeySketch::KeySketch(uint64_t size_bytes)
    : lines_(size_bytes / kernels::kCacheLineBytes),
      words_(static_cast<size_t>(lines_) * kLineWords) {}

void KeySketch::write(uint64_t* line, uint32_t counter, uint32_t value) {
  const uint32_t shift = counter % kWordCounters * 4;
  uint64_t& word = line[counter / kWordCounters];
  word = (word & ~(uint64_t{15} << shift)) | (uint64_t{value} << shift);
}

uint32_t KeySketch::count(uint64_t hash) const {
  const uint64_t* const line = line_of(hash);
  return std::min(read(line, first_of(hash)), read(line, second_of(hash)));
}

void KeySketch::add(uint64_t hash, uint32_t times) noexcept {
  if (times == 0) return;
  const uint32_t wanted = std::min(count(hash) + times, kMost);
  uint64_t* const line = line_of(hash);
  // What is higher already is so by another key.
  for (const uint32_t counter : {first_of(hash), second_of(hash)}) {
    if (read(line, counter) < wanted) write(line, counter, wanted);
  }
  age(times);
}

void KeySketch::age(uint64_t additions) noexcept {
  additions_ += additions;
  const uint64_t lines = additions_ / kAdditionsPerLine;
  for (; halved_ + lines_ < lines; ++halved_) {
    uint64_t* const line = words_.data() + static_cast<size_t>(halved_ % lines_) * kLineWords;
    for (size_t i = 0; i < kLineWords; ++i) line[i] = (line[i] >> 1) & kHalves;
  }
}

void KeySketch::forget(uint64_t hash) noexcept {
  const uint32_t here = count(hash);
  uint64_t* const line = line_of(hash);
  for (const uint32_t counter : {first_of(hash), second_of(hash)}) {
    if (read(line, counter) == here) write(line, counter, 0);
  }
}

void KeySketch::clear() noexcept {
  std::fill_n(words_.data(), words_.size(), uint64_t{0});
  additions_ = 0;
  halved_ = 0;
}

}  // namespace cpudist::table
