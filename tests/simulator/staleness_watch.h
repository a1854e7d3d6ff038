// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the frames of one server say of the bound on staleness: how many updates came between what
// a gradient has read and its own.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>

#include "wire/codec/codec.h"
#include "wire/control.h"
#include "wire/cut.h"
#include "wire/push.h"
#include "wire/sections.h"

namespace cpudist::simulator {

// Thread safety: none of its own; it is for threads that run one at a time.
class StalenessWatch {
 public:
  // The layout outlives it. `bound`: what must hold, whatever the layout says.
  StalenessWatch(const wire::ParamSetLayout& layout, uint64_t bound)
      : layout_(layout), bound_(bound) {}

  // The server takes this frame. Whether it is a request that it has not taken before.
  bool asked(const wire::Frame& frame) {
    Stream& stream = streams_[frame.header.rank];
    if (frame.header.incarnation > stream.incarnation) {
      stream = {};
      stream.incarnation = frame.header.incarnation;
    }
    if (frame.header.incarnation < stream.incarnation) return false;
    const bool again = frame.header.sequence <= stream.received;
    if (frame.header.sequence == 0 || frame.header.kind == wire::FrameKind::kProbe || again) {
      return false;
    }
    stream.received = frame.header.sequence;
    stream.kind = frame.header.kind;
    if (frame.header.kind == wire::FrameKind::kLeave) {
      stream.read.reset();
      stream.marked_at.reset();
    }
    if (frame.header.kind == wire::FrameKind::kCut &&
        wire::decode_cut(frame.payload.bytes()).step == wire::CutStep::kMark) {
      stream.marked_at = version_;
    }
    return true;
  }

  // The server answers this trainer. False for a gradient that was applied though it is older than
  // the bound.
  bool answered(uint32_t rank, const wire::Frame& frame) {
    Stream& stream = streams_[rank];
    const uint64_t sequence = frame.header.sequence;
    if (frame.header.incarnation != stream.incarnation) return true;
    if (frame.header.kind != wire::FrameKind::kReply || sequence <= stream.answered) return true;
    stream.answered = sequence;
    if (stream.kind == wire::FrameKind::kReady || stream.kind == wire::FrameKind::kJoin) {
      stream.read = wire::decode_round_reply(frame.payload.bytes()).round;
    }
    // Deltas are of no values that were read.
    if (stream.kind != wire::FrameKind::kPush || layout_.exchanges_deltas) return true;
    return note_applied(stream, frame);
  }

  // Gradients that were older, as they may be where their trainers have marked cuts.
  uint64_t excused() const { return excused_; }

 private:
  struct Stream {  // of a trainer
    uint32_t incarnation = 0;
    uint64_t received = 0;  // sequence numbers
    uint64_t answered = 0;
    wire::FrameKind kind = wire::FrameKind::kError;  // of the last one received
    std::optional<uint64_t> read;                    // update that its next gradient has seen
    std::optional<uint64_t> marked_at;
  };

  bool note_applied(Stream& stream, const wire::Frame& frame) {
    wire::Decoded decoded;
    std::span<const uint8_t> bytes = frame.payload.bytes();
    if (frame.header.coded) {
      decoded = wire::decode_sections(wire::SectionKind::kDense, bytes, layout_,
                                      wire::allocate_from(nullptr));
      bytes = decoded.payload.bytes();
    }
    version_ = wire::decode_dense(bytes, layout_).version.round;
    bool holds = true;
    if (stream.read && bound_ != wire::kAnyStaleness) {
      const uint64_t age = version_ - 1 - *stream.read;
      if (age > bound_) ++excused_;
      // From its marker on its trainer lets others pass.
      const uint64_t passed = stream.marked_at ? version_ - 1 - *stream.marked_at : 0;
      holds = age <= bound_ + passed;
    }
    if (stream.read) stream.read = version_;
    stream.marked_at.reset();
    return holds;
  }

  const wire::ParamSetLayout& layout_;
  const uint64_t bound_;
  uint64_t version_ = 0;  // updates so far
  uint64_t excused_ = 0;
  std::map<uint32_t, Stream> streams_;
};

}  // namespace cpudist::simulator
