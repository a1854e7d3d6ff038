// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a parameter set consists of and how it is updated: sent by every trainer to every server
// when it is opened.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "kernels/initial.h"
#include "kernels/optimizers.h"
#include "wire/dtype.h"

namespace cpudist::wire {

enum class DType : uint32_t { kFloat32 = 1, kFloat64 = 2 };
size_t size_of(DType dtype);

using kernels::InitialStep;
using kernels::RowOverride;

// Which keys that are pushed get a row.
enum class AdmissionKind : uint32_t {
  kAll = 0,
  kCount = 1,        // those that were pushed `count` times, each trainer and push counting once
  kProbability = 2,  // a fraction of `probability` of all keys, the same ones for ever
};

// What a kind has no use for is as it stands here.
struct Admission {
  AdmissionKind kind = AdmissionKind::kAll;
  uint32_t count = 0;         // kCount: 1 to 15
  double probability = 1.0;   // kProbability: above 0, at most 1
  uint64_t sketch_bytes = 0;  // kCount: what each server counts in; a multiple of 64
  friend bool operator==(const Admission&, const Admission&) = default;
};

// Which rows go first where there are too many.
enum class EvictionOrder : uint32_t {
  kLru = 0,  // those whose last update is longest ago
  kLfu = 1,  // those with the fewest updates
};

// Which rows lose their place. 0: not given.
struct Eviction {
  bool on = false;
  uint64_t unseen_steps = 0;  // updates of the parameter set since the row's last one
  uint64_t unseen_ms = 0;     // by the server's clock
  uint32_t min_count = 0;     // and only rows with fewer updates
  uint64_t max_rows = 0;      // of all servers; those above it go in this order
  EvictionOrder order = EvictionOrder::kLru;
  friend bool operator==(const Eviction&, const Eviction&) = default;
};

struct TableSpec {
  std::string name;
  uint64_t rows = 0;  // valid keys are 0 .. rows-1
  uint32_t dim = 0;
  uint32_t group = 0;  // index into ParamSetLayout::configs
  // Of a remote table nobody but the servers holds the rows. One that was never pushed or stored is
  // what the program below makes of its key, and takes no memory. A table that is not remote has no
  // program and seed 0.
  bool remote = false;
  uint64_t seed = 0;  // that of trainer 0 counts
  std::vector<InitialStep> initial{};
  std::vector<RowOverride> overrides{};
  // All of these are of remote tables only. In an open one every int64 is a key, whatever `rows`
  // says; overrides name keys as uint64.
  bool open = false;
  bool unknown_zeros = false;  // a key without a row reads zeros, not what its row would begin with
  uint64_t max_rows = 0;       // of all servers; a push that would make more fails. 0: any number
  Admission admission{};
  Eviction eviction{};

  // A negative key is a huge unsigned one.
  bool has_key(int64_t key) const { return open || static_cast<uint64_t>(key) < rows; }
};

struct BlockSpec {
  std::string name;  // parameter name, or "name.block3"
  uint64_t elements = 0;
  DType dtype = DType::kFloat32;
  uint32_t shard = 0;  // the server that owns it
  uint32_t group = 0;
  uint32_t parameter = 0;  // index of the parameter it is cut from
  uint64_t offset = 0;     // first element inside that parameter
  uint64_t row_width = 1;  // elements per row of that parameter, for row-wise optimizers
};

// When gradients are applied.
enum class UpdateMode : uint32_t {
  kRounds = 0,     // once every member has pushed: averaged, one update
  kOnArrival = 1,  // each push as it comes
};

inline constexpr uint64_t kAnyStaleness = 0xffffffffffffffffu;

// How many updates a parameter set has had on one server, and the samples and steps of trainers
// behind them.
struct Version {
  Version(uint64_t updates = 0, uint64_t sample_count = 0, uint64_t step_count = 0)
      : round(updates), samples(sample_count), steps(step_count) {}
  uint64_t round;
  uint64_t samples;
  uint64_t steps;  // not in replies to kPullRows
};

// How gradients make up for the updates between reading their values and their own (DC-ASGD).
enum class Compensation : uint32_t {
  kNone = 0,
  kConstant = 1,  // g + factor * g * g * (weight - what the trainer had read)
  kAdaptive = 2,  // the factor divided by the root of a running mean of g * g
};

struct DelayCompensation {
  Compensation kind = Compensation::kNone;
  double factor = 0;    // finite, >= 0
  double momentum = 0;  // kAdaptive: of the running mean; >= 0, < 1
  double epsilon = 0;   // kAdaptive: added to the running mean; finite, > 0
};

// Sent by every trainer to every server in kOpen; all must be byte-equal but for the seeds.
struct ParamSetLayout {
  UpdateMode mode = UpdateMode::kRounds;
  // kOnArrival: no gradient is applied later than so many updates after the values it was computed
  // on were read.
  uint64_t max_staleness = kAnyStaleness;
  // Trainers step by themselves. A push is the negated movement of its trainer's weights, and its
  // reply a ChangesView.
  bool exchanges_deltas = false;
  // kRounds: the group of every trainer, by rank; the trainers of a group share their rounds.
  // Groups are numbered in the order of their lowest ranks. Empty: all trainers are one group.
  std::vector<uint32_t> trainer_groups;
  DelayCompensation compensation;  // kOnArrival only
  // What values are rounded to before they travel: those of pushes, and those of replies, which are
  // no int8.
  WireDType push_dtype = WireDType::kFloat32;
  WireDType pull_dtype = WireDType::kFloat32;
  // Of the moving average that servers keep of every value: in [0, 1), 0 for none.
  double average_decay = 0;
  std::vector<kernels::OptimizerConfig> configs;
  std::vector<TableSpec> tables;
  std::vector<BlockSpec> blocks;
};

// Whether values travel as something else than they are.
inline bool is_lossy(const ParamSetLayout& layout) {
  return layout.push_dtype != WireDType::kFloat32 || layout.pull_dtype != WireDType::kFloat32;
}

// Whether gradients are rounded on their way, and what was rounded off is to be held back. Deltas
// hold nothing back: what is rounded off of them stays movement.
inline bool rounds_gradients(const ParamSetLayout& layout) {
  return layout.push_dtype != WireDType::kFloat32 && !layout.exchanges_deltas;
}

// How many dense parameters there are, by their numbers. Throws kInvalidArgument for one that is
// not below the number of blocks.
uint32_t parameter_count(const ParamSetLayout& layout);

// Row `key` of `table` belongs to bucket_of(key, table_salt(its name)). Each server owns a run of
// buckets, all runs as long as can be.
uint32_t owner_of_bucket(uint32_t bucket, uint32_t server_count);

// What the rows of a table begin with, of a remote table or one that is all zeros.
kernels::InitialRows initial_rows(const TableSpec& table);

Buffer encode(const ParamSetLayout& message);
ParamSetLayout decode_layout(std::span<const uint8_t> payload);

}  // namespace cpudist::wire
