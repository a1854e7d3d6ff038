// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The exponential moving average of values, kept beside them: as torch.optim.swa_utils does it
// after every step, but only where values change.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpudist::table {

// average = decay * average + (1 - decay) * value after every update of the set, and the value
// itself after the first one. Where a value stays the same for k updates, that is
// average = value + decay^k * (average - value), so that what no gradient touches costs nothing.
struct Averaging {
  double decay = 0;  // in (0, 1); 0: no average is kept

  bool on() const { return decay > 0; }
  // What an average keeps of itself in the update that follows `updates` others.
  double kept(uint64_t updates) const { return updates == 0 ? 0.0 : decay; }
  // decay^updates, by multiplications alone: hosts with other maths libraries give the same bits.
  double power(uint64_t updates) const;
};

// average[i] = values[i] + kept * (average[i] - values[i]), in double, rounded once.
template <typename T>
void draw_average(T* average, const T* values, size_t count, double kept);

}  // namespace cpudist::table
