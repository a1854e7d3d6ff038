// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a request is known by, what it is answered with, and the frames that are sent once every
// lock is released. Knows of connections only that they are there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/errors.h"
#include "wire/frame.h"

namespace cpudist::transport {
class Connection;
}

namespace cpudist::server {

// Names one admitted request. It stops being current when a newer incarnation takes over.
struct Ticket {
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t sequence = 0;
};

using SharedPayload = std::shared_ptr<const Buffer>;

// A payload, and whether it is coded.
struct Answer {
  Answer() = default;
  Answer(SharedPayload bytes, bool is_coded = false) : payload(std::move(bytes)), coded(is_coded) {}
  SharedPayload payload;
  bool coded = false;
};

SharedPayload payload_of(const Error& error);  // of an error reply

// The frames that one server sends in the end. Not shared between threads.
class Outbox {
 public:
  using Link = std::shared_ptr<transport::Connection>;

  Outbox(uint64_t run_id, uint32_t shard_id) : run_id_(run_id), shard_id_(shard_id) {}

  void add(Link connection, const wire::FrameHeader& header, Buffer payload);
  void add(Link connection, const wire::FrameHeader& header, SharedPayload payload);
  // Answers a request without recording what it was told.
  void answer(Link connection, const wire::FrameHeader& request, wire::FrameKind kind,
              Buffer payload, bool coded = false);
  void answer(Link connection, const wire::FrameHeader& request, const Error& error);
  void close(Link connection, std::string reason);
  void append(Outbox&& later);  // all of it, or nothing and throws
  // Sends in order, then closes; one that cannot be sent keeps no other from it. Throws what the
  // first of those threw.
  void flush();

  // The header of this server's reply to a request.
  wire::FrameHeader reply_header(const wire::FrameHeader& request, wire::FrameKind kind) const;

 private:
  struct Item {
    Link connection;
    wire::FrameHeader header;
    Buffer payload;
    SharedPayload shared;
  };

  const uint64_t run_id_;
  const uint32_t shard_id_;
  std::vector<Item> items_;
  std::vector<std::pair<Link, std::string>> closing_;
};

}  // namespace cpudist::server
