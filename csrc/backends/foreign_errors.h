// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the errors of other libraries mean. They tell causes apart by words only, which nothing else
// reads: our own backends raise Error, whose code says it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/errors.h"

namespace cpudist::backends {

namespace gloo {

// "[…/pair.cc:81] Connection closed by peer. This is typically …" without the place in its source
// and its general advice.
inline std::string plain_text(std::string text) {
  const size_t place = text.starts_with('[') ? text.find("] ") : std::string::npos;
  if (place != std::string::npos && text.find(".cc:") < place) text.erase(0, place + 2);
  return text.substr(0, text.find(" This is typically"));
}

inline std::optional<ErrorCode> cause_of(std::string_view text) {
  const auto says = [text](const char* words) { return text.find(words) != text.npos; };
  if (says("imed out waiting") || says("timeout caused pair closure")) return ErrorCode::kTimeout;
  // A rank sends more than the other has room for.
  if (says("op.preamble.length")) return ErrorCode::kConfigMismatch;
  return std::nullopt;
}

}  // namespace gloo

namespace nccl {

inline std::optional<ErrorCode> cause_of(std::string_view text) {
  const bool late = text.find("timed out in blocking wait") != text.npos;
  return late ? std::optional(ErrorCode::kTimeout) : std::nullopt;
}

}  // namespace nccl

// torch.distributed's own: its store, and what compares calls under TORCH_DISTRIBUTED_DEBUG.
namespace c10d_words {

inline std::optional<ErrorCode> cause_of(std::string_view text) {
  if (text.find("imed out") != text.npos) return ErrorCode::kTimeout;
  if (text.find("mismatch") != text.npos) return ErrorCode::kConfigMismatch;
  return std::nullopt;
}

}  // namespace c10d_words

// The first line of what a library says, as an Error of ours; of a lost peer where no word is
// known, since that is what ends calls without a word about it.
inline Error foreign_error(const std::string& said) {
  std::string text = gloo::plain_text(said.substr(0, said.find('\n')));
  if (text.empty()) text = "the backend failed";
  for (const auto cause_of : {&gloo::cause_of, &nccl::cause_of, &c10d_words::cause_of}) {
    if (const std::optional<ErrorCode> code = cause_of(text)) return {*code, text};
  }
  return {ErrorCode::kPeerLost, text};
}

// Of what was caught: an Error of ours is what it says.
inline Error foreign_error(const std::exception& caught) {
  if (const auto* own = dynamic_cast<const Error*>(&caught)) return *own;
  return foreign_error(std::string(caught.what()));
}

}  // namespace cpudist::backends
