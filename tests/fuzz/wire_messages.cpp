// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Frame headers and plain payloads of any bytes: refused as malformed, or taken apart within their
// bounds; those that are small come back coded as they were. The first byte chooses the kind.

#include "core/wire.h"
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
  const core::Buffer first = core::encode(message);
  const auto again = decode(view(first));
  require(fuzz::equal(view(first), view(core::encode(again))), "messages come as they were");
}

void check_header(Bytes bytes) {
  if (bytes.size() < core::kHeaderBytes) return;
  core::FrameHeader header;
  if (!fuzz::accepts(bytes.size(), [&] {
        header = core::decode_header(bytes.data(), core::kPayloadLimitBytes);
      })) {
    return;
  }
  require(header.length <= core::kPayloadLimitBytes, "the length is bounded");
  const auto again = core::encode_header(header);
  require(fuzz::equal(again, bytes.first(core::kHeaderBytes)), "headers come as they were");
}

void check_view(uint32_t kind, Bytes bytes) {
  const core::ParamSetLayout& layout = fuzz::wire_layout();
  fuzz::accepts(bytes.size(), [&] {
    switch (kind) {
      case 0:
        core::decode_push(bytes, layout);
        break;
      case 1:
        core::decode_dense(bytes, layout);
        break;
      case 2:
        core::decode_changes(bytes, layout);
        break;
      case 3:
        core::decode_pull(bytes, layout);
        break;
      case 4:
        core::decode_store(bytes, layout);
        break;
      default: {
        core::Version version;
        core::decode_rows(bytes, fuzz::asked_rows(3, 2), &version);
      }
    }
  });
}

constexpr uint32_t kSmallKinds = 11;
constexpr uint32_t kViewKinds = 6;

void check_message(uint32_t kind, Bytes bytes) {
  switch (kind) {
    case 0:
      return check_header(bytes);
    case 1:
      return check_small(bytes, core::decode_hello);
    case 2:
      return check_small(bytes, core::decode_error);
    case 3:
      return check_small(bytes, core::decode_probe_reply);
    case 4:
      return check_small(bytes, core::decode_layout);
    case 5:
      return check_small(bytes, core::decode_push_norm);
    case 6:
      return check_small(bytes, core::decode_commit);
    case 7:
      return check_small(bytes, core::decode_join);
    case 8:
      return check_small(bytes, core::decode_round_reply);
    case 9:
      return check_small(bytes, core::decode_barrier_reply);
    case 10:
      return check_small(bytes, core::decode_fetch);
    default:
      check_view(kind - kSmallKinds, bytes);
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const core::Buffer payload = fuzz::copied({data + 1, size - 1});
  check_message(data[0] % (kSmallKinds + kViewKinds), view(payload));
  return 0;
}
