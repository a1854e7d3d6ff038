// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Per-element optimizer updates, included once per vector level inside that level's namespace.
// Each comment gives the formula with torch's rounding order: every operation is rounded on its
// own, products before sums (the build forbids contraction to fused multiply-add).

// Where an L1 decay is set, but for FTRL, g += l1 * sign(w) comes right after g += wd * w.

// The sign of w, 0 of 0.
template <typename T>
CPUDIST_INLINE T sign_of(T w) {
  return static_cast<T>(w > T(0)) - static_cast<T>(w < T(0));
}

// SGD: g += wd * w; b = mu * b + (1 - dampening) * g (first step b = g);
// d = nesterov ? g + mu * b : b; w += -lr * d.
template <typename T>
CPUDIST_INLINE void update_sgd(const StepScalars<T>& s, T* __restrict w, T* __restrict buffer,
                               const T* __restrict g, size_t n) {
  const bool decay = s.has_weight_decay;
  const bool lasso = s.has_l1_decay;
  const T weight_decay = s.weight_decay;
  const T l1 = s.l1;
  const T negative_lr = s.negative_lr;
  if (!s.has_momentum) {
    for (size_t i = 0; i < n; ++i) {
      T grad = g[i];
      if (decay) grad = grad + weight_decay * w[i];
      if (lasso) grad = grad + l1 * sign_of(w[i]);
      w[i] = w[i] + negative_lr * grad;
    }
    return;
  }
  const bool first = s.first_update;
  const bool nesterov = s.nesterov;
  const T momentum = s.momentum;
  const T one_minus_dampening = s.one_minus_dampening;
  for (size_t i = 0; i < n; ++i) {
    T grad = g[i];
    if (decay) grad = grad + weight_decay * w[i];
    if (lasso) grad = grad + l1 * sign_of(w[i]);
    const T moved = buffer[i] * momentum + one_minus_dampening * grad;
    const T velocity = first ? grad : moved;
    buffer[i] = velocity;
    const T direction = nesterov ? grad + momentum * velocity : velocity;
    w[i] = w[i] + negative_lr * direction;
  }
}

// Adagrad: g += wd * w; a += g * g; w += (-clr * g) / (sqrt(a) + eps),
// clr = lr / (1 + (step - 1) * lr_decay).
template <typename T>
CPUDIST_INLINE void update_adagrad(const StepScalars<T>& s, T* __restrict w, T* __restrict sum,
                                   const T* __restrict g, size_t n) {
  const bool decay = s.has_weight_decay;
  const bool lasso = s.has_l1_decay;
  const T weight_decay = s.weight_decay;
  const T l1 = s.l1;
  const T negative_lr = s.negative_lr;
  const T eps = s.eps;
  for (size_t i = 0; i < n; ++i) {
    T grad = g[i];
    if (decay) grad = grad + weight_decay * w[i];
    if (lasso) grad = grad + l1 * sign_of(w[i]);
    const T total = sum[i] + grad * grad;
    sum[i] = total;
    w[i] = w[i] + (negative_lr * grad) / (square_root(total) + eps);
  }
}

// Row-wise Adagrad (Gupta et al. 2014): g += wd * w; a += mean(g * g) over the row;
// w += (-clr * g) / (sqrt(a) + eps). n is one row, sum one element.
template <typename T>
CPUDIST_INLINE void update_row_wise(const StepScalars<T>& s, T* __restrict w, T* __restrict sum,
                                    const T* __restrict g, size_t n) {
  const bool decay = s.has_weight_decay;
  const bool lasso = s.has_l1_decay;
  const T weight_decay = s.weight_decay;
  const T l1 = s.l1;
  const T negative_lr = s.negative_lr;
  T lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) {
      T grad = g[i + j];
      if (decay) grad = grad + weight_decay * w[i + j];
      if (lasso) grad = grad + l1 * sign_of(w[i + j]);
      lanes[j] = lanes[j] + grad * grad;
    }
  }
  for (size_t j = 0; i + j < n; ++j) {
    T grad = g[i + j];
    if (decay) grad = grad + weight_decay * w[i + j];
    if (lasso) grad = grad + l1 * sign_of(w[i + j]);
    lanes[j] = lanes[j] + grad * grad;
  }
  const T total = sum[0] + fold_lanes(lanes) / static_cast<T>(n);
  sum[0] = total;
  const T denominator = square_root(total) + s.eps;
  for (size_t k = 0; k < n; ++k) {
    T grad = g[k];
    if (decay) grad = grad + weight_decay * w[k];
    if (lasso) grad = grad + l1 * sign_of(w[k]);
    w[k] = w[k] + (negative_lr * grad) / denominator;
  }
}

// Adam: g += wd * w; AdamW: w *= 1 - lr * wd. Then m = lerp(m, g, 1 - b1);
// v = b2 * v + ((1 - b2) * g) * g; w += (-step_size * m) / (sqrt(v) / sqrt(1 - b2^t) + eps),
// step_size = lr / (1 - b1^t). torch's lerp uses the far end for weights of 0.5 and more.
template <bool kDecoupled, typename T>
CPUDIST_INLINE void update_adam(const StepScalars<T>& s, T* __restrict w, T* __restrict state,
                                const T* __restrict g, size_t n) {
  T* __restrict m = state;
  T* __restrict v = state + n;
  const bool decay = s.has_weight_decay;
  const bool lasso = s.has_l1_decay;
  const T weight_decay = s.weight_decay;
  const T l1 = s.l1;
  const T decay_factor = s.decay_factor;
  const T lerp_weight = s.one_minus_beta1;
  const T lerp_rest = T(1) - lerp_weight;
  const bool far_end = lerp_weight >= T(0.5);
  const T beta2 = s.beta2;
  const T one_minus_beta2 = s.one_minus_beta2;
  const T negative_step = s.negative_lr;
  const T correction = s.bias_correction2_sqrt;
  const T eps = s.eps;
  for (size_t i = 0; i < n; ++i) {
    T weight = w[i];
    T grad = g[i];
    if (decay) {
      if constexpr (kDecoupled) {
        weight = weight * decay_factor;
      } else {
        grad = grad + weight_decay * weight;
      }
    }
    if (lasso) grad = grad + l1 * sign_of(w[i]);
    const T step_to = grad - m[i];
    const T mean = far_end ? grad - step_to * lerp_rest : m[i] + lerp_weight * step_to;
    const T square = v[i] * beta2 + (one_minus_beta2 * grad) * grad;
    m[i] = mean;
    v[i] = square;
    w[i] = weight + (negative_step * mean) / (square_root(square) / correction + eps);
  }
}

// SparseAdam: m += (1 - b1) * (g - m); v += (1 - b2) * (g * g - v);
// w += -step_size * (m / (sqrt(v) + eps)), step_size = lr * sqrt(1 - b2^t) / (1 - b1^t):
// eps is not divided by the bias correction, unlike Adam's.
template <typename T>
CPUDIST_INLINE void update_sparse_adam(const StepScalars<T>& s, T* __restrict w,
                                       T* __restrict state, const T* __restrict g, size_t n) {
  T* __restrict m = state;
  T* __restrict v = state + n;
  const T one_minus_beta1 = s.one_minus_beta1;
  const T one_minus_beta2 = s.one_minus_beta2;
  const T negative_step = s.negative_lr;
  const T eps = s.eps;
  const bool lasso = s.has_l1_decay;
  const T l1 = s.l1;
  for (size_t i = 0; i < n; ++i) {
    T grad = g[i];
    if (lasso) grad = grad + l1 * sign_of(w[i]);
    const T mean = m[i] + (grad - m[i]) * one_minus_beta1;
    const T square = v[i] + (grad * grad - v[i]) * one_minus_beta2;
    m[i] = mean;
    v[i] = square;
    w[i] = w[i] + negative_step * (mean / (square_root(square) + eps));
  }
}

// RMSprop: g += wd * w; v = alpha * v + ((1 - alpha) * g) * g; d = sqrt(v) + eps;
// with momentum b = mu * b + g / d and w += -lr * b, else w += (-lr * g) / d.
template <typename T>
CPUDIST_INLINE void update_rmsprop(const StepScalars<T>& s, T* __restrict w, T* __restrict state,
                                   const T* __restrict g, size_t n) {
  const bool decay = s.has_weight_decay;
  const bool lasso = s.has_l1_decay;
  const T weight_decay = s.weight_decay;
  const T l1 = s.l1;
  const T negative_lr = s.negative_lr;
  const T alpha = s.beta2;
  const T one_minus_alpha = s.one_minus_beta2;
  const T eps = s.eps;
  T* __restrict v = state;
  if (!s.has_momentum) {
    for (size_t i = 0; i < n; ++i) {
      T grad = g[i];
      if (decay) grad = grad + weight_decay * w[i];
      if (lasso) grad = grad + l1 * sign_of(w[i]);
      const T square = v[i] * alpha + (one_minus_alpha * grad) * grad;
      v[i] = square;
      w[i] = w[i] + (negative_lr * grad) / (square_root(square) + eps);
    }
    return;
  }
  T* __restrict buffer = state + n;
  const T momentum = s.momentum;
  for (size_t i = 0; i < n; ++i) {
    T grad = g[i];
    if (decay) grad = grad + weight_decay * w[i];
    if (lasso) grad = grad + l1 * sign_of(w[i]);
    const T square = v[i] * alpha + (one_minus_alpha * grad) * grad;
    v[i] = square;
    const T velocity = buffer[i] * momentum + grad / (square_root(square) + eps);
    buffer[i] = velocity;
    w[i] = w[i] + negative_lr * velocity;
  }
}

// FTRL-Proximal, algorithm 1 of McMahan et al. 2013 with the square root generalised to
// n^p, p = -lr_power: a' = a + g * g; sigma = (a'^p - a^p) / lr; z = (z + g) - sigma * w;
// w = |z| <= l1 ? 0 : (sign(z) * l1 - z) / ((beta + a'^p) / lr + l2), beta in eps.
// A coordinate with a' = 0 has never seen a gradient and keeps its initial weight.
template <bool kSquareRoot, typename T>
CPUDIST_INLINE void ftrl_loop(const StepScalars<T>& s, T* __restrict w, T* __restrict state,
                              const T* __restrict g, size_t n) {
  T* __restrict z = state;
  T* __restrict sum = state + n;
  const T lr = s.lr;
  const T beta = s.eps;
  const T l1 = s.l1;
  const T l2 = s.l2;
  const T exponent = s.power;
  for (size_t i = 0; i < n; ++i) {
    const T grad = g[i];
    const T total = sum[i] + grad * grad;
    const T before = kSquareRoot ? square_root(sum[i]) : power(sum[i], exponent);
    const T after = kSquareRoot ? square_root(total) : power(total, exponent);
    const T linear = (z[i] + grad) - ((after - before) / lr) * w[i];
    sum[i] = total;
    z[i] = linear;
    const T magnitude = linear < T(0) ? -linear : linear;
    const T shrink = linear < T(0) ? -l1 : l1;
    const T solved = (shrink - linear) / ((beta + after) / lr + l2);
    const T next = magnitude <= l1 ? T(0) : solved;
    w[i] = total == T(0) ? w[i] : next;
  }
}

template <typename T>
CPUDIST_INLINE void update_ftrl(const StepScalars<T>& s, T* __restrict w, T* __restrict state,
                                const T* __restrict g, size_t n) {
  if (s.power_is_half) {
    ftrl_loop<true>(s, w, state, g, n);
  } else {
    ftrl_loop<false>(s, w, state, g, n);
  }
}
