// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The values that rows of a table begin with, where nobody stores them: a short program evaluated
// at a row's key. They depend on the program, the seed, the table's salt, the key and the element's
// place only, so that every host, process, vector level and number of servers makes the same bits.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace cpudist::kernels {

// What a step does to an element; normal, uniform and fill replace what stood before.
enum class InitialOp : uint32_t {
  kNormal = 1,   // mean a, standard deviation b
  kUniform = 2,  // from a to b
  kFill = 3,     // a
  kMul = 4,      // times a
  kAdd = 5,      // plus a
  kClamp = 6,    // at least a, at most b
  kErfinv = 7,   // the inverse of the error function; not a number beyond -1 and 1
};
constexpr uint32_t kInitialOpCount = 7;
const char* initial_op_name(InitialOp op);  // "unknown" for others

// Arguments that a step has no use for are zero.
struct InitialStep {
  InitialOp op = InitialOp::kFill;
  double a = 0.0;
  double b = 0.0;
  friend bool operator==(const InitialStep&, const InitialStep&) = default;
};

// Rows begin to end (exclusive) are `value`, whatever the program makes; later ones win. Keys are
// taken as uint64; an end of 0 is 2^64, so that the key -1 can be named too.
struct RowOverride {
  uint64_t begin = 0;
  uint64_t end = 0;
  double value = 0.0;
  friend bool operator==(const RowOverride&, const RowOverride&) = default;
};

constexpr size_t kInitialStepsMax = 8;
constexpr size_t kRowOverridesMax = 16;

// Null if the program can run, else a static message. Use it on every program that came over a
// wire.
const char* find_initial_error(std::span<const InitialStep> steps,
                               std::span<const RowOverride> overrides);

// Element j of the row of key k comes from u = mix64(mix64(k ^ salt ^ seed) + j * 2^64 / phi) >> 11
// of 53 bits. All steps are taken in double, what comes out is rounded to float once. Without steps
// it is zero. Thread safety: const members from any number of threads.
class InitialRows {
 public:
  // Programs are those of which find_initial_error() says nothing.
  InitialRows(std::span<const InitialStep> steps, std::span<const RowOverride> overrides,
              uint64_t salt, uint64_t seed);

  // The rows of `keys`, [keys, dim].
  void fill(std::span<const int64_t> keys, size_t dim, float* out) const;
  void set_seed(uint64_t seed) { seed_ = seed; }

 private:
  void finish(double* values, size_t n, float* out) const;
  void override_rows(std::span<const int64_t> keys, size_t dim, float* out) const;

  std::vector<InitialStep> steps_;  // from the last that replaces what stood before
  std::vector<RowOverride> overrides_;
  uint64_t salt_;
  uint64_t seed_;
};

}  // namespace cpudist::kernels
