// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Frames of a handshake by somebody without the key: any bytes, and true frames that were changed.
// Each is refused as malformed or as unproven, in little memory; nothing that was changed is let
// in, and what was not is.

#include <cstring>
#include <memory>

#include "wire/handshake/handshake.h"
#include "wire_checks.h"

using namespace cpudist;  // NOLINT
using fuzz::Bytes;
using fuzz::require;
using fuzz::view;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

constexpr char kAddress[] = "tcp:10.0.0.1:4000";
constexpr size_t kHead = 16;  // of an input: what is changed of a header, and where

std::shared_ptr<const wire::Credentials> key_of(const wire::Identity& own) {
  return wire::make_credentials("a key of at least thirty-two bytes", own, wire::Purpose::kServers);
}

// Whether it was taken. Refused it is for one of two reasons.
template <typename Take>
bool taken(size_t size, const Take& take) {
  bool proven = true;
  const bool sound = fuzz::accepts(size, [&] {
    try {
      take();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kAuthentication) throw;
      proven = false;
    }
  });
  return sound && proven;
}

// A frame as it is, but for the header's fields and the payload that the input names. True if
// nothing came of that.
bool change(wire::Frame* frame, Bytes head, Bytes payload) {
  wire::FrameHeader& header = frame->header;
  header.run_id ^= head[2];
  header.epoch ^= head[3];
  header.incarnation ^= head[4];
  header.rank = static_cast<uint16_t>(header.rank ^ head[5]);
  if (head[6] % 2 == 1) header.role = wire::Role::kServer;
  if (head[7] % 4 == 1) header.kind = wire::FrameKind::kError;
  if (head[7] % 4 == 2) header.kind = wire::FrameKind::kHello;
  const Buffer before = frame->payload.share();
  if (head[8] % 4 == 1) {
    frame->payload = fuzz::copied(payload);
  } else {
    Buffer mixed = fuzz::copied(view(before));
    for (size_t i = 0; i < mixed.size() && i < payload.size(); ++i) mixed.data()[i] ^= payload[i];
    frame->payload = std::move(mixed);
  }
  return fuzz::equal(view(before), view(frame->payload));
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // What the library allocates for its own life is no input's.
  static const Mac first = hmac_sha256("", {});
  static_cast<void>(first);
  if (size < kHead) return 0;
  const Bytes head(data, kHead);
  const Bytes payload(data + kHead, size - kHead);
  const wire::Identity trainer{7, 0, 1, wire::Role::kTrainer, 3};
  wire::ConnectingHandshake connecting(key_of(trainer), kAddress);
  wire::ListeningHandshake listening(key_of({7, 0, 0, wire::Role::kServer, 1}), kAddress);
  wire::Frame challenge = connecting.challenge();
  bool same = true;
  const auto step = [&](size_t number, wire::Frame* frame) {
    if (head[0] % 3 != number) return;
    const wire::FrameHeader before = frame->header;
    const bool same_payload = change(frame, head, payload);
    same = same_payload && wire::identity_of(before) == wire::identity_of(frame->header) &&
           before.kind == frame->header.kind;
  };
  wire::Frame answer;
  wire::Frame proof;
  step(0, &challenge);
  bool goes_on = taken(size, [&] { answer = listening.answer(challenge); });
  if (goes_on) {
    step(1, &answer);
    goes_on = taken(size, [&] { proof = connecting.prove(answer); });
  }
  if (goes_on) {
    step(2, &proof);
    goes_on = taken(size, [&] { listening.accept(proof); });
  }
  require(listening.done() == goes_on, "who was let in is known");
  require(goes_on == same, "what was changed is refused, and nothing else");
  return 0;
}
