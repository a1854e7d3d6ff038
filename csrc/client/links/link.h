// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a client remembers of one server and of one request. Plain data: everything is guarded by
// the mutex of the Session that owns it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "base/errors.h"
#include "client/links/spare.h"
#include "transport/channel.h"
#include "wire/frame.h"

namespace cpudist::client {

// One request to one server, from being sent to being answered.
struct Request {
  uint32_t server = 0;
  wire::FrameHeader header;
  Buffer kept;  // for sending it again; empty where the link cannot lose it
  bool has_kept = false;
  bool must_send = false;   // not sent on the present connection, or unknown to the server
  bool must_probe = false;  // the connection is new
  uint64_t sent_on = 0;     // which of the link's connections it went out on last; 0: none yet
  uint32_t retries = 0;     // how often it went out on a further one
  bool done = false;
  wire::Frame reply;           // once done without error
  std::optional<Error> error;  // once done with one
  TimePoint started;
  TimePoint sent;                     // last time it or a probe went out
  TimePoint heard;                    // last sign that the server has it; starts as `started`
  std::vector<uint32_t> waiting_for;  // trainers, as of the last probe reply
  uint64_t stored_bytes = 0;          // by trainer 0, as of then
};
using RequestPtr = std::shared_ptr<Request>;

enum class LinkState {
  kBroken,     // no connection; the monitor makes one
  kHandshake,  // connected, the server has not answered the hello
  kOpen,
  kClosed,  // for good
};

struct Link {
  uint32_t server = 0;
  std::vector<std::string> addresses;
  std::string address;  // in use, or used last
  std::string host;     // what the server calls itself
  std::shared_ptr<transport::Connection> connection;
  Descriptor process;  // the server's, where it is known
  LinkState state = LinkState::kBroken;
  bool ever_open = false;
  bool gone = false;    // its channel says that there is no reaching it any more
  uint64_t opened = 0;  // connections so far
  TimePoint give_up;    // broken or in handshake: lost after this
  TimePoint try_next;   // broken: next attempt
  uint64_t attempts = 0;
  TimePoint hello_sent;
  TimePoint heard;  // last frame, or bytes of one
  Spare spare;      // of one that is open and silent
  uint64_t bytes_seen = 0;
  uint64_t closed_bytes_sent = 0;  // of earlier connections
  uint64_t closed_bytes_received = 0;
  std::string trouble;  // why it broke or the last attempt failed
  uint64_t next_sequence = 1;
  RequestPtr in_flight;  // the sequenced request that the server has, or nothing
};

}  // namespace cpudist::client
