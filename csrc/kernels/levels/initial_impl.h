// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What initial values are drawn with; included by level_impl.h in the namespace of a level. The
// quantiles of the normal distribution are Wichura's (Algorithm AS 241, Applied Statistics 37,
// 1988: about 16 digits). The logarithm is one of our own: those of C libraries differ in the last
// bit.

CPUDIST_INLINE double as_double(uint64_t bits) { return __builtin_bit_cast(double, bits); }
CPUDIST_INLINE uint64_t as_bits(double value) { return __builtin_bit_cast(uint64_t, value); }

// Of an integer below 2^52; processors without AVX-512 have no such instruction.
CPUDIST_INLINE double to_double(uint64_t value) {
  return as_double(value | 0x4330000000000000ULL) - 0x1p52;
}

// As kernels::mix64, which must not be shared between levels.
CPUDIST_INLINE uint64_t mix_bits(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

void draw(uint64_t base, uint64_t first, double* __restrict out, size_t n) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;
  const uint64_t start = base + first * kGolden;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t bits = mix_bits(start + i * kGolden) >> 11;
    out[i] = to_double(bits >> 32) * 0x1p-21 + to_double(bits & 0xffffffffULL) * 0x1p-53;
  }
}

// Of a positive number that is not subnormal. m * 2^e with m from sqrt(1/2) to sqrt(2) has the
// logarithm e * ln(2) + 2 * artanh((m - 1) / (m + 1)), of which this is Taylor's series: the first
// term that is left out is below 2^-60 of the sum.
CPUDIST_INLINE double natural_log(double x) {
  const uint64_t bits = as_bits(x);
  const double m1 = as_double((bits & 0xfffffffffffffULL) | 0x3ff0000000000000ULL);
  const double e1 = to_double(bits >> 52) - 1023.0;
  const bool high = m1 > 0x1.6a09e667f3bcdp+0;
  const double m = high ? m1 * 0.5 : m1;
  const double e = high ? e1 + 1.0 : e1;
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double sum = 1.0 / 23.0;
  sum = sum * z + 1.0 / 21.0;
  sum = sum * z + 1.0 / 19.0;
  sum = sum * z + 1.0 / 17.0;
  sum = sum * z + 1.0 / 15.0;
  sum = sum * z + 1.0 / 13.0;
  sum = sum * z + 1.0 / 11.0;
  sum = sum * z + 1.0 / 9.0;
  sum = sum * z + 1.0 / 7.0;
  sum = sum * z + 1.0 / 5.0;
  sum = sum * z + 1.0 / 3.0;
  const double twice = s + s;
  // ln(2) in two parts, the first with zeros at its end: e times it is exact.
  return e * 0x1.62e42fefa3800p-1 + (e * 0x1.ef35793c76730p-45 + (twice * z * sum + twice));
}

// 0.5 + q is at most 0.425 away from the middle.
CPUDIST_INLINE double central_quantile(double q) {
  const double r = 0.180625 - q * q;
  double above = 2.5090809287301226727e+3;
  above = above * r + 3.3430575583588128105e+4;
  above = above * r + 6.7265770927008700853e+4;
  above = above * r + 4.5921953931549871457e+4;
  above = above * r + 1.3731693765509461125e+4;
  above = above * r + 1.9715909503065514427e+3;
  above = above * r + 1.3314166789178437745e+2;
  above = above * r + 3.3871328727963666080e0;
  double below = 5.2264952788528545610e+3;
  below = below * r + 2.8729085735721942674e+4;
  below = below * r + 3.9307895800092710610e+4;
  below = below * r + 2.1213794301586595867e+4;
  below = below * r + 5.3941960214247511077e+3;
  below = below * r + 6.8718700749205790830e+2;
  below = below * r + 4.2313330701600911252e+1;
  below = below * r + 1.0;
  return q * above / below;
}

// r = sqrt(-ln(p)) of the smaller tail p, up to 5.
CPUDIST_INLINE double near_quantile(double root) {
  const double r = root - 1.6;
  double above = 7.74545014278341407640e-4;
  above = above * r + 2.27238449892691845833e-2;
  above = above * r + 2.41780725177450611770e-1;
  above = above * r + 1.27045825245236838258e0;
  above = above * r + 3.64784832476320460504e0;
  above = above * r + 5.76949722146069140550e0;
  above = above * r + 4.63033784615654529590e0;
  above = above * r + 1.42343711074968357734e0;
  double below = 1.05075007164441684324e-9;
  below = below * r + 5.47593808499534494600e-4;
  below = below * r + 1.51986665636164571966e-2;
  below = below * r + 1.48103976427480074590e-1;
  below = below * r + 6.89767334985100004550e-1;
  below = below * r + 1.67638483018380384940e0;
  below = below * r + 2.05319162663775882187e0;
  below = below * r + 1.0;
  return above / below;
}

// The same beyond 5.
CPUDIST_INLINE double far_quantile(double root) {
  const double r = root - 5.0;
  double above = 2.01033439929228813265e-7;
  above = above * r + 2.71155556874348757815e-5;
  above = above * r + 1.24266094738807843860e-3;
  above = above * r + 2.65321895265761230930e-2;
  above = above * r + 2.96560571828504891230e-1;
  above = above * r + 1.78482653991729133580e0;
  above = above * r + 5.46378491116411436990e0;
  above = above * r + 6.65790464350110377720e0;
  double below = 2.04426310338993978564e-15;
  below = below * r + 1.42151175831644588870e-7;
  below = below * r + 1.84631831751005468180e-5;
  below = below * r + 7.86869131145613259100e-4;
  below = below * r + 1.48753612908506148525e-2;
  below = below * r + 1.36929880922735805310e-1;
  below = below * r + 5.99832206555887937690e-1;
  below = below * r + 1.0;
  return above / below;
}

// Of the tails, which are few, those together that a run has.
void tail_quantiles(const double* __restrict tails, double* __restrict out, size_t n) {
  double roots[kQuantileRun];
  for (size_t i = 0; i < n; ++i) {
    roots[i] = square_root(-natural_log(tails[i]));
    out[i] = near_quantile(roots[i]);
  }
  for (size_t i = 0; i < n; ++i) {
    if (roots[i] <= 5.0) continue;
    out[i] = tails[i] > 0.0    ? far_quantile(roots[i])
             : tails[i] == 0.0 ? __builtin_inf()
                               : __builtin_nan("");
  }
}

void normal_quantiles(double* values, size_t n) {
  double central[kQuantileRun];
  double tails[kQuantileRun];
  double found[kQuantileRun];
  uint32_t places[kQuantileRun];
  for (size_t begin = 0; begin < n; begin += kQuantileRun) {
    double* run = values + begin;
    const size_t count = n - begin < kQuantileRun ? n - begin : kQuantileRun;
    for (size_t i = 0; i < count; ++i) central[i] = central_quantile(run[i]);
    size_t tail_count = 0;
    for (size_t i = 0; i < count; ++i) {
      const double distance = run[i] < 0.0 ? -run[i] : run[i];
      tails[tail_count] = 0.5 - distance;
      places[tail_count] = static_cast<uint32_t>(i);
      tail_count += distance <= 0.425 ? 0 : 1;
    }
    tail_quantiles(tails, found, tail_count);
    for (size_t i = 0; i < tail_count; ++i) {
      const size_t place = places[i];
      central[place] = run[place] < 0.0 ? -found[i] : found[i];
    }
    for (size_t i = 0; i < count; ++i) run[i] = central[i];
  }
}
