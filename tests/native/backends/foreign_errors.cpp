// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the words of gloo, NCCL and torch.distributed are taken for.
// threads: none
#include "backends/foreign_errors.h"

#include <stdexcept>
#include <string>

#include "support/check.h"

namespace {

using cpudist::Error;
using cpudist::ErrorCode;
using cpudist::backends::foreign_error;

TEST(foreign_errors_have_the_code_of_their_cause) {
  const std::pair<const char*, ErrorCode> cases[] = {
      {"Timed out waiting 1000ms for recv operation to complete", ErrorCode::kTimeout},
      {"Application timeout caused pair closure", ErrorCode::kTimeout},
      {"op.preamble.length <= op.nbytes. 8 vs 4", ErrorCode::kConfigMismatch},
      {"Connection closed by peer [127.0.0.1]:9", ErrorCode::kPeerLost},
      {"Work WorkNCCL(...) timed out in blocking wait.", ErrorCode::kTimeout},
      {"NCCL error: remote process exited or there was a network error", ErrorCode::kPeerLost},
      {"Detected mismatch between collectives on ranks.", ErrorCode::kConfigMismatch},
      {"The client socket has timed out after 60000ms", ErrorCode::kTimeout},
      {"failed to recv, got 0 bytes", ErrorCode::kPeerLost},
  };
  for (const auto& [text, code] : cases) {
    CHECK_EQ(foreign_error(std::string(text)).code(), code);
    CHECK_EQ(std::string(foreign_error(std::string(text)).what()), std::string(text));
  }
}

TEST(foreign_errors_lose_the_place_in_the_source_and_general_advice) {
  const std::string said =
      "[/src/gloo/transport/tcp/pair.cc:81] Connection closed by peer. This is typically caused "
      "by a failed rank.\nframe #0: main";
  CHECK_EQ(std::string(foreign_error(said).what()), std::string("Connection closed by peer."));
  CHECK_EQ(std::string(foreign_error(std::string("[Rank 3] lost")).what()),
           std::string("[Rank 3] lost"));
  CHECK_EQ(std::string(foreign_error(std::string()).what()), std::string("the backend failed"));
}

TEST(errors_of_our_own_keep_their_code_whatever_they_say) {
  for (auto code = uint32_t{1}; code <= static_cast<uint32_t>(ErrorCode::kDataFile); ++code) {
    const Error own(static_cast<ErrorCode>(code), "[a.cc:1] Timed out waiting. mismatch");
    const Error found = foreign_error(static_cast<const std::exception&>(own));
    CHECK_EQ(found.code(), own.code());
    CHECK_EQ(std::string(found.what()), std::string(own.what()));
  }
  const std::runtime_error other("Timed out waiting 1 ms");
  CHECK_EQ(foreign_error(other).code(), ErrorCode::kTimeout);
}

}  // namespace
