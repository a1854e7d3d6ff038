// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/values/runs.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kernels/gather_scatter.h"
#include "kernels/hash.h"

namespace cpudist::client {

namespace {

// Which rows of a piece of a run are whose.
class Deal {
 public:
  Deal(const Shared& shared, const SetState& set, const wire::TableSpec& spec)
      : whole_(set.server_count == 1),
        split_(shared.owners, set.server_count, kernels::table_salt(spec.name)) {}

  void run(uint64_t begin, uint64_t end) {
    size_ = static_cast<size_t>(end - begin);
    if (whole_) return;
    keys_.resize(size_);
    std::iota(keys_.begin(), keys_.end(), static_cast<int64_t>(begin));
    split_.run(keys_);
  }
  size_t count(uint32_t server) const { return whole_ ? size_ : split_.count(server); }

  // The rows of one server, from the piece and back to it.
  void gather(uint32_t server, const void* from, size_t row_bytes, void* to) const {
    if (whole_) {
      if (size_ > 0) std::memcpy(to, from, size_ * row_bytes);
      return;
    }
    const auto positions = split_.positions(server);
    kernels::gather_rows(from, row_bytes, positions.data(), positions.size(), row_bytes, to,
                         row_bytes);
  }
  void scatter(uint32_t server, const void* from, size_t row_bytes, void* to) const {
    if (whole_) {
      if (size_ > 0) std::memcpy(to, from, size_ * row_bytes);
      return;
    }
    const auto positions = split_.positions(server);
    kernels::scatter_rows(to, row_bytes, positions.data(), positions.size(), row_bytes, from,
                          row_bytes);
  }

 private:
  const bool whole_;
  size_t size_ = 0;
  KeySplit split_;
  std::vector<int64_t> keys_;
};

template <typename Run>
void check_run(const Run& rows, const wire::TableSpec& spec) {
  if (spec.open) {
    throw Error(ErrorCode::kInvalidArgument,
                "table '" + spec.name + "' is open: its keys are no run of rows; name them");
  }
  if (rows.begin <= rows.end && rows.end <= spec.rows) return;
  throw Error(ErrorCode::kRowOutOfRange,
              "table '" + spec.name + "': rows " + std::to_string(rows.begin) + " .. " +
                  std::to_string(rows.end) + " of " + std::to_string(spec.rows));
}

// Rows that travel at once, over all servers.
uint64_t piece_of(const SetState& set, const wire::TableSpec& spec, uint32_t state_elements) {
  const uint64_t row_bytes = (spec.dim + state_elements) * sizeof(float) + sizeof(uint32_t);
  const uint64_t rows = std::max<uint64_t>(kChunkBytes / row_bytes, 1) * set.server_count;
  return std::min(rows, wire::kRunKeysMax);
}

bool are_alike(const float* rows, uint64_t count, uint32_t dim) {
  if (count < 2) return false;
  const size_t row_bytes = dim * sizeof(float);
  return std::memcmp(rows + dim, rows, static_cast<size_t>(count - 1) * row_bytes) == 0;
}

// The part of a run that begins at row `begin`, all of one server's rows of it.
Buffer pack_run(const RunValues& rows, wire::RunRef ref, uint32_t server, const Deal& deal,
                const wire::Pool& pool) {
  ref.rows = deal.count(server);
  wire::FilledRun filled = wire::layout_run(ref, pool);
  const uint64_t offset = ref.begin - rows.begin;
  const float* const weights = rows.weights + offset * ref.dim;
  if (ref.alike) {
    std::memcpy(filled.weights, weights, ref.dim * sizeof(float));
  } else {
    deal.gather(server, weights, ref.dim * sizeof(float), filled.weights);
  }
  if (ref.state_elements > 0) {
    deal.gather(server, rows.state + offset * ref.state_elements,
                ref.state_elements * sizeof(float), filled.state);
  }
  if (ref.counts) deal.gather(server, rows.counts + offset, sizeof(uint32_t), filled.counts);
  return std::move(filled.payload);
}

[[noreturn]] void refuse_answer(const std::string& what) {
  throw Error(ErrorCode::kProtocol, "fetch: a server's answer has " + what);
}

// What one server has answered for rows begin .. end.
uint64_t take_run(const wire::Frame& reply, const SetState& set, const RunPlaces& rows,
                  const wire::FetchRun& asked, uint32_t server, const Deal& deal) {
  const wire::RunView run = wire::decode_run(reply.payload.bytes(), set.layout);
  const wire::RunRef& ref = run.ref;
  const uint32_t state_elements = set.row_state_elements(rows.table);
  if (ref.table != asked.table || ref.begin != asked.begin || ref.end != asked.end) {
    refuse_answer("other rows");
  }
  if (ref.rows != deal.count(server) || ref.alike || !ref.counts ||
      ref.state_elements != state_elements) {
    refuse_answer("rows, state or counts of another size");
  }
  const uint64_t offset = ref.begin - rows.begin;
  const auto scatter = [&](auto* to, uint64_t elements, const auto* from) {
    if (to == nullptr || elements == 0) return;
    deal.scatter(server, from, elements * sizeof(*to), to + offset * elements);
  };
  scatter(rows.weights, ref.dim, run.weights.data());
  scatter(rows.state, state_elements, run.state.data());
  scatter(rows.counts, 1, run.counts.data());
  return ref.step;
}

}  // namespace

void store_run(Shared& shared, SetState& set, const RunValues& rows, uint64_t step) {
  const wire::TableSpec& spec = set.table(rows.table).spec();
  check_run(rows, spec);
  wire::RunRef ref;
  ref.table = rows.table;
  ref.dim = spec.dim;
  ref.state_elements = rows.state == nullptr ? 0 : set.row_state_elements(rows.table);
  ref.counts = rows.counts != nullptr;
  ref.step = step;
  const uint64_t piece = piece_of(set, spec, ref.state_elements);
  Deal deal(shared, set, spec);
  std::vector<Buffer> packed(set.server_count);
  const auto pack = [&](uint64_t begin) {
    ref.begin = begin;
    ref.end = std::min(begin + piece, rows.end);
    ref.alike =
        are_alike(rows.weights + (begin - rows.begin) * spec.dim, ref.end - begin, spec.dim);
    deal.run(begin, ref.end);
    for (uint32_t s = 0; s < set.server_count; ++s) {
      packed[s] = pack_run(rows, ref, s, deal, shared.pool);
    }
  };
  pack(rows.begin);
  // Also of a run without rows one piece is sent: it carries the step.
  uint64_t begin = rows.begin;
  do {
    const uint64_t next = ref.end;
    const auto send_piece = [&] {
      std::vector<RequestPtr> requests;
      for (const uint32_t s : shared.session.send_order()) {
        requests.push_back(
            shared.session.send(s, wire::FrameKind::kStoreRun, set.id, std::move(packed[s])));
      }
      if (next < rows.end) pack(next);
      return requests;
    };
    shared.run(send_piece, [](std::span<const RequestPtr>) {});
    begin = next;
  } while (begin < rows.end);
}

uint64_t fetch_run(Shared& shared, SetState& set, const RunPlaces& rows) {
  const wire::TableSpec& spec = set.table(rows.table).spec();
  check_run(rows, spec);
  const uint64_t piece = piece_of(set, spec, set.row_state_elements(rows.table));
  const auto ask = [&](uint64_t begin) {
    const wire::FetchRun request{rows.table, begin, std::min(begin + piece, rows.end)};
    return shared.send_all(wire::FrameKind::kFetchRun, set.id, [&] { return encode(request); });
  };
  Deal deal(shared, set, spec);
  uint64_t step = 0;
  uint64_t begin = rows.begin;
  std::vector<RequestPtr> coming = ask(begin);
  do {
    const uint64_t next = std::min(begin + piece, rows.end);
    const std::vector<RequestPtr> requests = std::exchange(coming, {});
    try {
      if (next < rows.end) coming = ask(next);
      shared.session.wait(requests);
      deal.run(begin, next);
      const wire::FetchRun asked{rows.table, begin, next};
      for (uint32_t s = 0; s < set.server_count; ++s) {
        step = std::max(step, take_run(requests[s]->reply, set, rows, asked, s, deal));
      }
    } catch (...) {
      shared.session.give_up(requests);
      shared.session.give_up(coming);
      throw;
    }
    begin = next;
  } while (begin < rows.end);
  return step;
}

}  // namespace cpudist::client
