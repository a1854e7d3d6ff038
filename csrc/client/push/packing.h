// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How a step is packed into one payload per server, and its answers are taken apart.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "client/push/step.h"
#include "wire/frame.h"
#include "wire/messages.h"

namespace cpudist::client {

class Prefetcher;
struct SetState;

// Checks a step and finds the distinct keys of its gradients. Throws kInvalidArgument,
// kRowOutOfRange, kUnpulledRow; only scratch memory was changed then.
void prepare_push(SetState& set, const StepPush& step);
// One payload per server of the step that was prepared last. Duplicate keys are summed in order.
// Updates on arrival: weight and clipping of the step are not in it.
// Rows are in the order of their keys if `ordered`, else in that of the gradient. It tells which
// rows of batches to come `prefetcher` holds; null for none.
std::vector<Buffer> pack_push(SetState& set, const StepPush& step, const wire::Pool& pool,
                              const Prefetcher* prefetcher = nullptr, bool want_dense = true,
                              bool ordered = false);
// Rows pushed by the last pack_push, duplicates summed.
uint64_t packed_rows(const SetState& set);
// Writes the blocks of a dense reply; returns its version. No weights: the blocks are skipped.
// `cut_wanted` is raised to what the reply asks for.
wire::Version unpack_dense(const SetState& set, const wire::Frame& reply,
                           std::span<void* const> weights, uint64_t* cut_wanted = nullptr);

}  // namespace cpudist::client
