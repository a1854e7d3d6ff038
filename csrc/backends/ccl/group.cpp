// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Makes and destroys communicators, and looks at the processes of peers.
#include "backends/ccl/group.h"

#include <exception>
#include <sstream>
#include <utility>

#include "base/files.h"

namespace cpudist::backends::ccl {

namespace {

// The field of /proc/<pid>/stat that says when the process was started, counted after its name.
constexpr int kStartedField = 20;

}  // namespace

bool has_ended(const Peer& peer) {
  const std::string text = files::read_text("/proc/" + std::to_string(peer.pid) + "/stat");
  if (text.empty()) return true;
  // The name of the program is in parentheses and may hold anything.
  const size_t end = text.rfind(')');
  if (end == std::string::npos) return false;
  std::istringstream fields(text.substr(end + 1));
  std::string state;
  fields >> state;
  if (state == "Z" || state == "X") return true;
  std::string field;
  for (int i = 2; i < kStartedField; ++i) fields >> field;
  uint64_t started = 0;
  fields >> started;
  return fields && started != peer.started;
}

int Group::get(void* context, const char* key, void* sink,
               void (*emit)(void* sink, const char* data, size_t size)) {
  auto& group = *static_cast<Group*>(context);
  try {
    const std::optional<std::string> value = group.options_.store->get(key);
    if (value) {
      emit(sink, value->data(), value->size());
    } else if (!group.made_ && Clock::now() > group.deadline_) {
      group.store_error_ = Error(ErrorCode::kTimeout, "timed out: not all members came");
      return 1;
    }
    return 0;
  } catch (const std::exception& error) {
    group.store_error_ = Error(ErrorCode::kPeerLost, error.what());
    return 1;
  }
}

int Group::set(void* context, const char* key, const char* data, size_t size) {
  auto& group = *static_cast<Group*>(context);
  try {
    group.options_.store->set(key, std::string(data, size));
    return 0;
  } catch (const std::exception& error) {
    group.store_error_ = Error(ErrorCode::kPeerLost, error.what());
    return 1;
  }
}

Group::Group(const cpudist_ccl_shim& calls, GroupOptions options, Clock::time_point deadline)
    : options_(std::move(options)), deadline_(deadline) {
  const cpudist_ccl_store store = {this, &Group::get, &Group::set};
  communicator_ = calls.make(options_.size, options_.rank, options_.id, &store);
  if (communicator_ == nullptr) {
    const std::string because = store_error_ ? std::string(" (") + store_error_->what() + ")" : "";
    throw Error(store_error_ ? store_error_->code() : ErrorCode::kPeerLost,
                "ccl: cannot make a communicator of " + std::to_string(options_.size) +
                    " ranks: " + calls.error() + because);
  }
  made_ = true;
}

std::optional<Error> Group::failure_of(int peer) const {
  if (failure_) {
    return Error(failure_->code(),
                 std::string("the group cannot be used any more, because ") + failure_->what());
  }
  const auto found = lost_.find(peer);
  return found == lost_.end() ? std::nullopt : std::optional(found->second);
}

void Group::release(const cpudist_ccl_shim& calls) {
  if (communicator_ != nullptr && !abandoned()) calls.free(communicator_);
  communicator_ = nullptr;
}

}  // namespace cpudist::backends::ccl
