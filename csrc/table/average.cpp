// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "table/average.h"

namespace cpudist::table {

double Averaging::power(uint64_t updates) const {
  double result = 1.0;
  double factor = decay;
  for (uint64_t left = updates; left != 0 && result != 0.0; left >>= 1) {
    if ((left & 1) != 0) result *= factor;
    factor *= factor;
  }
  return result;
}

template <typename T>
void draw_average(T* average, const T* values, size_t count, double kept) {
  for (size_t i = 0; i < count; ++i) {
    const double value = values[i];
    average[i] = static_cast<T>(value + kept * (average[i] - value));
  }
}

template void draw_average(float* average, const float* values, size_t count, double kept);
template void draw_average(double* average, const double* values, size_t count, double kept);

}  // namespace cpudist::table
