// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The small messages: hello, error, probe, norms and membership, and their encoding.
//
// Little-endian, as all payloads are; arrays start at multiples of 8 bytes so that they are read in
// place. Decoders return views into the payload, check every count against the bytes that are there
// with overflow-safe arithmetic, and throw Error(kProtocol).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/errors.h"

namespace cpudist::wire {

struct Hello {  // both ways; the server's reply names itself
  uint32_t trainer_count = 0;
  uint32_t server_count = 0;
  uint32_t shard_id = 0;       // the server that the client means to talk to / that answers
  uint64_t last_sequence = 0;  // reply: last sequence applied from this client
  std::string host;            // host name and pid, for messages: "host-a pid 123"
  // Reply: the last request that was carried out, and not refused, of the last incarnation before
  // this one that had any; 0: there is none.
  uint64_t carried_out_before = 0;
};

struct ErrorReply {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
};

struct ProbeReply {
  bool known = false;                 // the request has arrived and is waiting
  std::vector<uint32_t> waiting_for;  // trainer ranks
  // Of values that trainer 0 has sent for the parameter set that is waited for.
  uint64_t stored_bytes = 0;
};

struct PushNorm {  // reply to a two-phase kPush
  uint64_t round = 0;
  // Of this server's share of the averaged gradient: one, or where tensors are clipped apart one of
  // every dense parameter, by number, and then of every table.
  std::vector<double> squared_norms;
};

struct Commit {
  uint64_t round = 0;
  std::vector<double> norms;  // as many, over all servers; equal from every trainer
};

enum class JoinStep : uint32_t {
  kHold = 0,     // to server 0: name the round at which I join, and apply nothing until kRelease
  kMember = 1,   // to the other servers: I am a member from `round` on
  kRelease = 2,  // to server 0
  // Of who joins two sets at one step, see client/rounds/join_with.h.
  // As kHold, answered once all others have pushed for the round that is held.
  kHoldPushed = 3,
  // To server 0: answered once all others have pushed for the round at which I join.
  kOthersPushed = 4,
  // To all servers. In rounds: I am a member from the current one on, for which nobody can have
  // pushed. On arrival: I am one now, also of cuts, and not only from my first push on.
  kCurrent = 5,
};

struct Join {
  JoinStep step = JoinStep::kHold;
  uint64_t round = 0;
};

struct RoundReply {  // reply to kReady, kLeave, kJoin, kOpen, kStore, kClose
  uint64_t round = 0;
  bool ready = false;        // the servers hold values: trainer 0 has stored all
  bool takes_parts = false;  // of pushes to come
};

struct BarrierReply {  // every open parameter set and the round at which all are members again
  std::vector<std::pair<uint32_t, uint64_t>> rounds;
};

struct TableQuery {  // kTableStats, kShrink
  uint32_t table = 0;
};

struct TableCounts {  // reply to kTableStats: of the server's share of the table
  uint64_t rows = 0;
  uint64_t bytes = 0;          // row records and their index
  uint64_t created = 0;        // rows that pushes have made, ever
  uint64_t filtered = 0;       // rows of pushes that were not admitted, ever
  uint64_t evicted = 0;        // rows that have gone, ever
  uint64_t unknown_reads = 0;  // rows that were pulled and not there, ever
};

struct Shrunk {  // reply to kShrink
  uint64_t evicted = 0;
};

Buffer encode(const Hello& message);
// Writes the number into a hello that was encoded before it was known; takes no memory.
void put_carried_out_before(Buffer* hello, uint64_t number) noexcept;
Buffer encode(const ErrorReply& message);
Buffer encode(const ProbeReply& message);
Buffer encode(const PushNorm& message);
// Over what was encoded of one with as many norms. Takes no memory.
void encode_again(const PushNorm& message, Buffer* encoded) noexcept;
Buffer encode(const Commit& message);
Buffer encode(const Join& message);
Buffer encode(const RoundReply& message);
Buffer encode(const BarrierReply& message);
Buffer encode(const TableQuery& message);
Buffer encode(const TableCounts& message);
Buffer encode(const Shrunk& message);

Hello decode_hello(std::span<const uint8_t> payload);
ErrorReply decode_error(std::span<const uint8_t> payload);
ProbeReply decode_probe_reply(std::span<const uint8_t> payload);
// `count` norms, no more and no fewer.
PushNorm decode_push_norm(std::span<const uint8_t> payload, uint64_t count = 1);
Commit decode_commit(std::span<const uint8_t> payload, uint64_t count = 1);
Join decode_join(std::span<const uint8_t> payload);
RoundReply decode_round_reply(std::span<const uint8_t> payload);
BarrierReply decode_barrier_reply(std::span<const uint8_t> payload);
TableQuery decode_table_query(std::span<const uint8_t> payload);
TableCounts decode_table_counts(std::span<const uint8_t> payload);
Shrunk decode_shrunk(std::span<const uint8_t> payload);

}  // namespace cpudist::wire
