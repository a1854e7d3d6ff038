// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The kinds of frames and what holds for each: its name in messages to people, whether a server
// carries it out exactly once, whether it may be coded, whether other trainers may hold it up.
// Both ends read it from the one table below.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace cpudist::wire {

enum class FrameKind : uint16_t {
  kHello = 1,      // first frame of every connection, both ways
  kHeartbeat = 2,  // either way; answered with kHeartbeatAck
  kHeartbeatAck = 3,
  kError = 4,     // reply to any request: ErrorReply; from a client: why it is about to close
  kOpen = 5,      // layout of a parameter set
  kStore = 6,     // initial values or loaded state, in chunks
  kReady = 7,     // trainer 0 has stored all; opens the parameter set for everybody
  kPush = 8,      // gradients of one step
  kCommit = 9,    // second phase of a round with a global norm
  kLeave = 10,    // this trainer's part in rounds ends
  kJoin = 11,     // in steps, see JoinStep
  kBarrier = 12,  // until every trainer is there
  kClose = 13,    // drop a parameter set (last trainer frees it)
  kGoodbye = 14,  // this trainer is done for good
  kProbe = 15,    // "did you get sequence n?": answered with kProbeReply or the reply itself
  kProbeReply = 16,
  kPullRows = 17,    // idempotent
  kPullDense = 18,   // idempotent
  kFetchState = 19,  // idempotent: weights, optimizer state and counts
  kReply = 20,       // reply to a request, payload by the request's kind
  // Between trainers, see data/shuffle/exchange.h; numbered by the stream they belong to.
  kShuffle = 21,      // records
  kShuffleEnd = 22,   // what the stream's records were together
  kShuffleDone = 23,  // the sender's records have all arrived
  kShuffleAck = 24,   // carries the last number that was taken
  kStoreRun = 25,     // as kStore: rows of a run of keys
  kFetchRun = 26,     // idempotent: as kFetchState, rows of a run of keys
  kCut = 27,          // marker of a snapshot's cut, between two pushes
  kCutStatus = 28,    // idempotent: how far a server is with what was cut
  kLoad = 29,         // rows of a snapshot's file, which the server reads itself
  kTableStats = 30,   // idempotent: what a server counts of a table
  kShrink = 31,       // rows of a table that are to go, go now
  kAuth = 32,         // before the hello, where a key is set: see wire/handshake/handshake.h
  kPart = 33,         // idempotent: dense gradients of a push that is to come
};

struct FrameTraits {
  FrameKind kind;
  const char* name;
  bool sequenced;  // a request that a server numbers by trainer and carries out exactly once
  bool coded;      // the payload may be coded (codec/codec.h)
  bool waits;      // a request that other trainers may hold up
  bool stays;      // a request that is wanted though whoever waits for it gives up; not a read
};

// By number, without gaps, beginning at 1.
inline constexpr std::array<FrameTraits, 33> kFrameTraits = {{
    // kind, name, sequenced, coded, waits, stays
    {FrameKind::kHello, "hello", false, false, false, false},
    {FrameKind::kHeartbeat, "heartbeat", false, false, false, false},
    {FrameKind::kHeartbeatAck, "heartbeat answer", false, false, false, false},
    {FrameKind::kError, "error", false, false, false, false},
    {FrameKind::kOpen, "open", true, false, false, true},
    {FrameKind::kStore, "store", true, false, false, true},
    {FrameKind::kReady, "ready", true, false, true, true},
    {FrameKind::kPush, "push", true, true, true, true},
    {FrameKind::kCommit, "commit", true, false, true, true},
    {FrameKind::kLeave, "leave", true, false, false, true},
    {FrameKind::kJoin, "join", true, false, true, true},
    {FrameKind::kBarrier, "barrier", true, false, true, true},
    {FrameKind::kClose, "close", true, false, false, true},
    {FrameKind::kGoodbye, "goodbye", true, false, false, true},
    {FrameKind::kProbe, "probe", false, false, false, false},
    {FrameKind::kProbeReply, "probe reply", false, false, false, false},
    {FrameKind::kPullRows, "pull", false, true, false, false},
    {FrameKind::kPullDense, "dense pull", false, true, false, false},
    {FrameKind::kFetchState, "fetch", false, false, false, false},
    {FrameKind::kReply, "reply", false, true, false, false},
    {FrameKind::kShuffle, "shuffle", false, false, false, false},
    {FrameKind::kShuffleEnd, "shuffle end", false, false, false, false},
    {FrameKind::kShuffleDone, "shuffle done", false, false, false, false},
    {FrameKind::kShuffleAck, "shuffle answer", false, false, false, false},
    {FrameKind::kStoreRun, "run store", true, false, false, true},
    {FrameKind::kFetchRun, "run fetch", false, false, false, false},
    {FrameKind::kCut, "cut", true, false, true, true},
    {FrameKind::kCutStatus, "cut status", false, false, false, false},
    {FrameKind::kLoad, "load", true, false, false, true},
    {FrameKind::kTableStats, "table stats", false, false, false, false},
    {FrameKind::kShrink, "shrink", true, false, false, true},
    {FrameKind::kAuth, "handshake", false, false, false, false},
    {FrameKind::kPart, "part", false, false, false, true},
}};

inline constexpr FrameTraits kUnknownFrame = {FrameKind{}, "unknown", false, false, false, false};

constexpr bool known_frame_kind(unsigned number) {
  return number >= 1 && number <= kFrameTraits.size();
}

// Of a kind that decode_header let through; others, which only a frame that never was on a wire can
// have, have no traits and the name "unknown".
constexpr const FrameTraits& traits_of(FrameKind kind) {
  const auto number = static_cast<unsigned>(kind);
  return known_frame_kind(number) ? kFrameTraits[number - 1] : kUnknownFrame;
}

constexpr const char* name_of(FrameKind kind) { return traits_of(kind).name; }

}  // namespace cpudist::wire
