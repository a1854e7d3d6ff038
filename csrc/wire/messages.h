// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the payload of each frame kind means, and its encoding. Everything is little-endian; arrays
// start at multiples of 8 bytes so that they are read in place. Decoders return views into the
// payload, check every count against the bytes that are there with overflow-safe arithmetic, and
// throw Error(kProtocol).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/errors.h"
#include "kernels/optimizers.h"
#include "wire/dtype.h"
#include "wire/frame.h"
#include "wire/primitives.h"

namespace cpudist::wire {

inline constexpr uint32_t kNoParamSet = 0xffffffffu;

// ---- hello, error, probe -----------------------------------------------------------------------

struct Hello {  // both ways; the server's reply names itself
  uint32_t trainer_count = 0;
  uint32_t server_count = 0;
  uint32_t shard_id = 0;       // the server that the client means to talk to / that answers
  uint64_t last_sequence = 0;  // reply: last sequence applied from this client
  std::string host;            // host name and pid, for messages: "host-a pid 123"
};

struct ErrorReply {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
};

struct ProbeReply {
  bool known = false;                 // the request has arrived and is waiting
  std::vector<uint32_t> waiting_for;  // trainer ranks
};

// ---- layout of a parameter set -----------------------------------------------------------------

enum class DType : uint32_t { kFloat32 = 1, kFloat64 = 2 };
size_t size_of(DType dtype);

struct TableSpec {
  std::string name;
  uint64_t rows = 0;  // valid keys are 0 .. rows-1
  uint32_t dim = 0;
  uint32_t group = 0;  // index into ParamSetLayout::configs
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

// Sent by every trainer to every server in kOpen; all must be byte-equal.
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
  std::vector<kernels::OptimizerConfig> configs;
  std::vector<TableSpec> tables;
  std::vector<BlockSpec> blocks;
};

// Whether values travel as something else than they are.
inline bool is_lossy(const ParamSetLayout& layout) {
  return layout.push_dtype != WireDType::kFloat32 || layout.pull_dtype != WireDType::kFloat32;
}

// Row `key` of `table` belongs to bucket_of(key, table_salt(table)), and bucket b to server
// b % server_count.
uint32_t owner_of_bucket(uint32_t bucket, uint32_t server_count);

// ---- store and fetch: weights with optimizer state and counts ----------------------------------

// A run of rows of one table or one whole block. `state` holds state_elements per row (or for the
// block) or nothing = the optimizer's initial state. `counts`: updates so far, per row, or nothing.
struct TableRows {
  uint32_t table = 0;
  uint64_t step = 0;  // updates of the table as a whole
  std::span<const int64_t> keys;
  std::span<const float> weights;  // keys.size() * dim
  std::span<const float> state;
  std::span<const uint32_t> counts;
};

struct BlockValues {
  uint32_t block = 0;
  uint64_t step = 0;                 // updates of the block
  std::span<const uint8_t> weights;  // elements * size_of(dtype) bytes
  std::span<const uint8_t> state;    // same dtype, or empty
};

struct StoreView {
  std::vector<TableRows> tables;
  std::vector<BlockValues> blocks;
};

inline constexpr uint32_t kEveryParameter = 0xffffffffu;

struct FetchRequest {  // kFetchState: blocks of the server and/or these rows
  bool blocks = false;
  uint32_t parameter = kEveryParameter;  // with `blocks`: only blocks cut from this parameter
  uint32_t table = 0;
  std::span<const int64_t> keys;  // may be empty
};  // reply: encoded as a store; keys in the order asked

// ---- pull --------------------------------------------------------------------------------------

struct PullTable {
  uint32_t table = 0;
  std::span<const int64_t> keys;
};
// Reply to kPullRows: the version (2 x u64, no steps), then per table of the request, in its order,
// the rows (no keys).
//
// A pull for a batch to come tells, in the place of the step, the number of its prefetch with this
// bit set: which gradient uses the rows is known when that gradient is pushed.
inline constexpr uint64_t kPrefetchBit = 1ull << 63;
// kPullDense: the step or nothing; its reply is a DenseView with all blocks of that server.
//
// A pull tells for which gradient of this trainer it reads, counted from 1: the server keeps what
// it answers until that gradient has come, if gradients are compensated for delay. 0: for none.

// ---- push and commit ---------------------------------------------------------------------------

struct PushHeader {
  // kRounds: the round. kOnArrival: updates behind the dense values that the gradient was computed
  // on.
  uint64_t round = 0;
  uint64_t step = 0;        // kOnArrival: which gradient of this trainer, as in its pulls
  double weight = 1.0;      // this trainer's weight in the mean; 0 allowed
  uint64_t samples = 0;     // counted only
  uint64_t steps = 1;       // of the trainer's optimizer behind it; counted only
  bool by_samples = false;  // what `weight` is: a number of samples, or 1 for every trainer
  bool want_dense = true;   // kOnArrival: the reply brings every dense block of the server
  double clip_value = 0.0;  // > 0: clamp the averaged gradient elementwise
  double clip_norm = 0.0;   // > 0: two phases; the reply is a PushNorm, kCommit follows
  std::span<const kernels::OptimizerConfig> configs;  // as of this step; equal among trainers
};

struct DenseSection {
  uint32_t block = 0;
  std::span<const uint8_t> values;  // gradient or weight, elements * size_of(dtype) bytes
};

struct TableSection {  // present (perhaps empty) iff this trainer has a gradient for the table
  uint32_t table = 0;
  std::span<const int64_t> keys;  // distinct
  std::span<const float> rows;    // keys.size() * dim
};

// What a trainer has read for batches to come.
struct PushHolds {
  // kRounds: these rows, all as they were after `since` updates or later. The reply brings those
  // that were updated after that.
  uint64_t since = 0;
  std::vector<PullTable> tables;
  // kOnArrival, with delay compensation: the prefetches that the gradient was computed on, in the
  // order of use, and the lowest that a later one may be.
  std::vector<uint64_t> used;
  uint64_t kept_from = 0;
};

struct PushView {
  PushHeader header;
  std::vector<DenseSection> blocks;
  std::vector<TableSection> tables;
  PushHolds holds;
};

// Reply to kPush, kCommit (blocks updated in the round; with trainer groups all; kOnArrival: all or
// none) and kPullDense (all).
struct DenseView {
  Version version;  // with one group `round` is also the number of its next round
  std::vector<DenseSection> blocks;
  std::vector<TableSection> tables;  // to kPush and kCommit: held rows that were updated
};

// Reply to kPush of a set that exchanges deltas.
struct ChangesHeader {
  Version version;
  uint32_t members = 0;  // trainers that take part
  bool more = false;     // rows that did not fit: the next reply brings them
};
struct ChangesView {
  ChangesHeader header;
  std::vector<DenseSection> blocks;  // all of the server
  std::vector<TableSection> tables;  // rows that others changed since the trainer's last reply
};

struct PushNorm {  // reply to a two-phase kPush
  uint64_t round = 0;
  double squared_norm = 0;  // of this server's share of the averaged gradient
};

struct Commit {
  uint64_t round = 0;
  double total_norm = 0;  // over all servers; equal from every trainer
};

// ---- membership --------------------------------------------------------------------------------

enum class JoinStep : uint32_t {
  kHold = 0,     // to server 0: name the round at which I join, and apply nothing until kRelease
  kMember = 1,   // to the other servers: I am a member from `round` on
  kRelease = 2,  // to server 0
};

struct Join {
  JoinStep step = JoinStep::kHold;
  uint64_t round = 0;
};

struct RoundReply {  // reply to kReady, kLeave, kJoin, kOpen, kStore, kClose
  uint64_t round = 0;
  bool ready = false;  // the servers hold values: trainer 0 has stored all
};

struct BarrierReply {  // every open parameter set and the round at which all are members again
  std::vector<std::pair<uint32_t, uint64_t>> rounds;
};

// ---- encoders and decoders ---------------------------------------------------------------------

Buffer encode(const Hello& message);
Buffer encode(const ErrorReply& message);
Buffer encode(const ProbeReply& message);
Buffer encode(const ParamSetLayout& message);
Buffer encode(const PushNorm& message);
Buffer encode(const Commit& message);
Buffer encode(const Join& message);
Buffer encode(const RoundReply& message);
Buffer encode(const BarrierReply& message);
Buffer encode(const FetchRequest& message);
Buffer encode_pull_dense(uint64_t step);

Hello decode_hello(std::span<const uint8_t> payload);
ErrorReply decode_error(std::span<const uint8_t> payload);
ProbeReply decode_probe_reply(std::span<const uint8_t> payload);
ParamSetLayout decode_layout(std::span<const uint8_t> payload);
PushNorm decode_push_norm(std::span<const uint8_t> payload);
Commit decode_commit(std::span<const uint8_t> payload);
Join decode_join(std::span<const uint8_t> payload);
RoundReply decode_round_reply(std::span<const uint8_t> payload);
BarrierReply decode_barrier_reply(std::span<const uint8_t> payload);
FetchRequest decode_fetch(std::span<const uint8_t> payload);
uint64_t decode_pull_dense(std::span<const uint8_t> payload);

// Large payloads are laid out first and filled in place, so that values are copied once, straight
// from their source. Each `layout_*` returns the payload with headers written and, in the same
// order as asked, pointers to the arrays to fill; block ids and table ids must each be strictly
// increasing, else Error(kInvalidArgument). Decoders check sizes against `layout` (dims, dtypes,
// element counts, known ids, ids increasing, 0 <= key < rows) and throw Error(kProtocol). Left to
// the receiver, who knows more: that keys are distinct, that a block's shard is this server, and in
// a store that the state has the length this optimizer needs.
struct BlockRef {
  uint32_t block = 0;
  uint64_t size_bytes = 0;
  uint64_t state_bytes = 0;  // store only
  uint64_t step = 0;         // store only
};
struct TableRef {
  uint32_t table = 0;
  uint64_t row_count = 0;
  uint32_t dim = 0;
  uint32_t state_elements = 0;  // per row; store only
  bool counts = false;          // store only
  uint64_t step = 0;            // store only
};
struct FilledPush {
  Buffer payload;
  std::vector<uint8_t*> blocks;
  std::vector<int64_t*> keys;
  std::vector<float*> rows;
  std::vector<int64_t*> held;  // by table of the holds
};
struct HoldRefs {
  uint64_t since = 0;
  uint64_t kept_from = 0;
  std::vector<TableRef> tables;
  std::span<const uint64_t> used;
};
struct FilledRows {
  Buffer payload;
  std::vector<float*> rows;
};
struct FilledKeys {
  Buffer payload;
  std::vector<int64_t*> keys;
};
struct FilledStore {
  Buffer payload;
  std::vector<int64_t*> keys;
  std::vector<float*> weights;
  std::vector<float*> state;      // nullptr where the ref has none
  std::vector<uint32_t*> counts;  // nullptr where the ref has none
  std::vector<uint8_t*> block_weights;
  std::vector<uint8_t*> block_state;  // nullptr where the ref has none
};
using Pool = std::shared_ptr<BufferPool>;

FilledPush layout_push(const PushHeader& header, std::span<const BlockRef> blocks,
                       std::span<const TableRef> tables, const Pool& pool,
                       const HoldRefs* holds = nullptr);
FilledPush layout_dense(Version version, std::span<const BlockRef> blocks, const Pool& pool,
                        std::span<const TableRef> tables = {});
FilledPush layout_changes(const ChangesHeader& header, std::span<const BlockRef> blocks,
                          std::span<const TableRef> tables, const Pool& pool);
FilledKeys layout_pull(std::span<const TableRef> tables, const Pool& pool, uint64_t step = 0);
FilledRows layout_rows(Version version, std::span<const TableRef> tables, const Pool& pool);
FilledStore layout_store(std::span<const BlockRef> blocks, std::span<const TableRef> tables,
                         const Pool& pool);

PushView decode_push(std::span<const uint8_t> payload, const ParamSetLayout& layout);
DenseView decode_dense(std::span<const uint8_t> payload, const ParamSetLayout& layout);
ChangesView decode_changes(std::span<const uint8_t> payload, const ParamSetLayout& layout);
std::vector<PullTable> decode_pull(std::span<const uint8_t> payload, const ParamSetLayout& layout,
                                   uint64_t* step = nullptr);
// Rows per table of the request `asked` (table ids and key counts known to the caller).
std::vector<std::span<const float>> decode_rows(std::span<const uint8_t> payload,
                                                std::span<const TableRef> asked, Version* version);
StoreView decode_store(std::span<const uint8_t> payload, const ParamSetLayout& layout);

}  // namespace cpudist::wire
