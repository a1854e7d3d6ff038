// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Frame headers and plain payloads of any bytes: refused as malformed, or taken apart within their
// bounds; those that are small come back coded as they were. The first byte chooses the kind.

#include <algorithm>

#include "wire/control.h"
#include "wire/cut.h"
#include "wire/frame.h"
#include "wire/handshake/handshake.h"
#include "wire/runs.h"
#include "wire/snapshot/load.h"
#include "wire_checks.h"

using namespace cpudist;  // NOLINT
using fuzz::Bytes;
using fuzz::require;
using fuzz::view;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

// Decoded, encoded and decoded again it is encoded the same.
template <typename Decode>
void check_small(Bytes bytes, const Decode& decode) {
  decltype(decode(bytes)) message;
  if (!fuzz::accepts(bytes.size(), [&] { message = decode(bytes); })) return;
  const Buffer first = wire::encode(message);
  const auto again = decode(view(first));
  require(fuzz::equal(view(first), view(wire::encode(again))), "messages come as they were");
}

// One, or as many as there is room for: a receiver knows how many it waits for.
uint64_t norms_in(Bytes bytes) { return std::max<uint64_t>(bytes.size() / 8, 2) - 1; }

void check_header(Bytes bytes) {
  if (bytes.size() < wire::kHeaderBytes) return;
  wire::FrameHeader header;
  if (!fuzz::accepts(bytes.size(), [&] {
        header = wire::decode_header(bytes.data(), wire::kPayloadLimitBytes);
      })) {
    return;
  }
  require(header.length <= wire::kPayloadLimitBytes, "the length is bounded");
  const auto again = wire::encode_header(header);
  require(fuzz::equal(again, bytes.first(wire::kHeaderBytes)), "headers come as they were");
}

void check_view(uint32_t kind, Bytes bytes) {
  const wire::ParamSetLayout& layout = fuzz::wire_layout();
  fuzz::accepts(bytes.size(), [&] {
    switch (kind) {
      case 0:
        wire::decode_push(bytes, layout);
        break;
      case 1:
        wire::decode_dense(bytes, layout);
        break;
      case 2:
        wire::decode_changes(bytes, layout);
        break;
      case 3:
        wire::decode_pull(bytes, layout);
        break;
      case 4:
        wire::decode_store(bytes, layout);
        break;
      case 5: {
        wire::Version version;
        wire::decode_rows(bytes, fuzz::asked_rows(3, 2), &version);
        break;
      }
      case 6:
        wire::decode_run(bytes, layout);
        break;
      default:
        wire::decode_fetch_run(bytes, layout);
    }
  });
}

constexpr uint32_t kSmallKinds = 11;
constexpr uint32_t kViewKinds = 8;
constexpr uint32_t kSnapshotKinds = 5;
constexpr uint32_t kAuth = kSmallKinds + kViewKinds + kSnapshotKinds;
constexpr uint32_t kPart = kAuth + 1;

void check_snapshot(uint32_t kind, Bytes bytes) {
  switch (kind) {
    case 0:
      return check_small(bytes, wire::decode_cut);
    case 1:
      return check_small(bytes, wire::decode_cut_reply);
    case 2:
      return check_small(bytes, wire::decode_cut_query);
    case 3:
      return check_small(bytes, wire::decode_cut_status);
    default:
      check_small(bytes, [](Bytes b) { return wire::decode_load(b, fuzz::wire_layout()); });
  }
}

void check_message(uint32_t kind, Bytes bytes) {
  switch (kind) {
    case 0:
      return check_header(bytes);
    case 1:
      return check_small(bytes, wire::decode_hello);
    case 2:
      return check_small(bytes, wire::decode_error);
    case 3:
      return check_small(bytes, wire::decode_probe_reply);
    case 4:
      return check_small(bytes, wire::decode_layout);
    case 5:
      return check_small(bytes, [](Bytes b) { return wire::decode_push_norm(b, norms_in(b)); });
    case 6:
      return check_small(bytes, [](Bytes b) { return wire::decode_commit(b, norms_in(b)); });
    case 7:
      return check_small(bytes, wire::decode_join);
    case 8:
      return check_small(bytes, wire::decode_round_reply);
    case 9:
      return check_small(bytes, wire::decode_barrier_reply);
    case 10:
      return check_small(bytes, wire::decode_fetch);
    case kAuth:
      return check_small(bytes, wire::decode_auth);
    case kPart:
      fuzz::accepts(bytes.size(), [&] { wire::decode_part(bytes, fuzz::wire_layout()); });
      return;
    default:
      if (kind >= kSmallKinds + kViewKinds)
        return check_snapshot(kind - kSmallKinds - kViewKinds, bytes);
      check_view(kind - kSmallKinds, bytes);
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const Buffer payload = fuzz::copied({data + 1, size - 1});
  check_message(data[0] % (kPart + 1), view(payload));
  return 0;
}
