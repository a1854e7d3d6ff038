// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Tells a payload that is not what its kind says from a request that cannot be done.
#pragma once

#include <utility>

#include "base/errors.h"

namespace cpudist::wire {

// Its sender's connection is closed, and nothing of it is recorded.
class MalformedFrame : public Error {
 public:
  explicit MalformedFrame(const Error& error) : Error(error.code(), error.what()) {}
};

// Runs a decoder of a payload, whose errors then are those of the frame.
template <typename Decode>
auto decode_frame(Decode&& decode) {
  try {
    return std::forward<Decode>(decode)();
  } catch (const Error& error) {
    throw MalformedFrame(error);
  }
}

}  // namespace cpudist::wire
