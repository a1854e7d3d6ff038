// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Small messages: hello, error, probe, membership, norms.
#include "wire/control.h"

#include <cstring>

#include "wire/fields.h"

namespace cpudist::wire {

template <typename V>
void fields(V& v, Of<V, Hello>& m) {
  v.number(m.trainer_count);
  v.number(m.server_count);
  v.number(m.shard_id);
  v.zero();
  v.number(m.last_sequence);
  v.number(m.carried_out_before);
  v.text(m.host, kHostBytesMax);
}

template <typename V>
void fields(V& v, Of<V, ErrorReply>& m) {
  v.choice(m.code, ErrorCode::kInternal, ErrorCode::kCountedLost, "error code");
  v.zero();
  v.text(m.message, kErrorBytesMax);
}

template <typename V>
void fields(V& v, Of<V, ProbeReply>& m) {
  v.flag32(m.known, "probe reply");
  const uint32_t count = v.count32(m.waiting_for);
  v.number(m.stored_bytes);
  v.elements(m.waiting_for, count);
}

template <typename V>
void fields(V& v, Of<V, PushNorm>& m) {
  v.number(m.round);
  v.not_negative(m.squared_norms, "squared norm");
}

template <typename V>
void fields(V& v, Of<V, Commit>& m) {
  v.number(m.round);
  v.not_negative(m.norms, "total norm");
}

template <typename V>
void fields(V& v, Of<V, Join>& m) {
  v.choice(m.step, JoinStep::kHold, JoinStep::kCurrent, "join step");
  v.zero();
  v.number(m.round);
}

template <typename V>
void fields(V& v, Of<V, RoundReply>& m) {
  v.number(m.round);
  v.flag64(m.ready, "round reply");
  v.flag64(m.takes_parts, "round reply");
}

template <typename V>
void fields(V& v, Of<V, std::pair<uint32_t, uint64_t>>& m) {
  v.number(m.first);
  v.zero();
  v.number(m.second);
}

template <typename V>
void fields(V& v, Of<V, BarrierReply>& m) {
  const uint64_t count = v.count64(m.rounds);
  v.items(m.rounds, count, 16, "parameter sets");
}

template <typename V>
void fields(V& v, Of<V, TableQuery>& m) {
  v.number(m.table);
  v.zero();
}

template <typename V>
void fields(V& v, Of<V, TableCounts>& m) {
  v.number(m.rows);
  v.number(m.bytes);
  v.number(m.created);
  v.number(m.filtered);
  v.number(m.evicted);
  v.number(m.unknown_reads);
}

template <typename V>
void fields(V& v, Of<V, Shrunk>& m) {
  v.number(m.evicted);
}

Buffer encode(const Hello& message) {
  if (message.host.size() > kHostBytesMax) {
    throw Error(ErrorCode::kInvalidArgument, "a host name of " +
                                                 std::to_string(message.host.size()) +
                                                 " bytes does not fit into a hello");
  }
  return write_message(message);
}

Buffer encode(const ErrorReply& message) {
  if (message.message.size() <= kErrorBytesMax) return write_message(message);
  // An error is for people: a long one is cut rather than lost.
  return write_message(
      ErrorReply{message.code, message.message.substr(0, kErrorBytesMax - 4) + " ..."});
}

Buffer encode(const ProbeReply& message) { return write_message(message); }
Buffer encode(const PushNorm& message) { return write_message(message); }
void encode_again(const PushNorm& message, Buffer* encoded) noexcept {
  std::memcpy(encoded->data(), &message.round, sizeof message.round);
  std::memcpy(encoded->data() + sizeof message.round, message.squared_norms.data(),
              message.squared_norms.size() * sizeof(double));
}
Buffer encode(const Commit& message) { return write_message(message); }
Buffer encode(const Join& message) { return write_message(message); }
Buffer encode(const RoundReply& message) { return write_message(message); }
Buffer encode(const BarrierReply& message) { return write_message(message); }
Buffer encode(const TableQuery& message) { return write_message(message); }
Buffer encode(const TableCounts& message) { return write_message(message); }
Buffer encode(const Shrunk& message) { return write_message(message); }

using Bytes = std::span<const uint8_t>;
void put_carried_out_before(Buffer* hello, uint64_t number) noexcept {
  constexpr size_t kOffset = 4 * sizeof(uint32_t) + sizeof(uint64_t);  // see fields() of a Hello
  std::memcpy(hello->data() + kOffset, &number, sizeof(number));
}

Hello decode_hello(Bytes payload) { return read_message<Hello>(payload); }
ErrorReply decode_error(Bytes payload) { return read_message<ErrorReply>(payload); }
ProbeReply decode_probe_reply(Bytes payload) { return read_message<ProbeReply>(payload); }
PushNorm decode_push_norm(Bytes payload, uint64_t count) {
  return read_message(payload, PushNorm{0, std::vector<double>(count)});
}
Commit decode_commit(Bytes payload, uint64_t count) {
  return read_message(payload, Commit{0, std::vector<double>(count)});
}
Join decode_join(Bytes payload) { return read_message<Join>(payload); }
RoundReply decode_round_reply(Bytes payload) { return read_message<RoundReply>(payload); }
BarrierReply decode_barrier_reply(Bytes payload) { return read_message<BarrierReply>(payload); }
TableQuery decode_table_query(Bytes payload) { return read_message<TableQuery>(payload); }
TableCounts decode_table_counts(Bytes payload) { return read_message<TableCounts>(payload); }
Shrunk decode_shrunk(Bytes payload) { return read_message<Shrunk>(payload); }

}  // namespace cpudist::wire
