// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/outbox.h"

#include <algorithm>
#include <exception>
#include <iterator>

#include "transport/channel.h"
#include "wire/messages.h"

namespace cpudist::server {

void Outbox::add(Link connection, const wire::FrameHeader& header, Buffer payload) {
  items_.push_back({std::move(connection), header, std::move(payload), nullptr});
}

void Outbox::add(Link connection, const wire::FrameHeader& header, SharedPayload payload) {
  items_.push_back({std::move(connection), header, Buffer(), std::move(payload)});
}

void Outbox::answer(Link connection, const wire::FrameHeader& request, wire::FrameKind kind,
                    Buffer payload, bool coded) {
  wire::FrameHeader header = reply_header(request, kind);
  header.coded = coded;
  add(std::move(connection), header, std::move(payload));
}

void Outbox::answer(Link connection, const wire::FrameHeader& request, const Error& error) {
  answer(std::move(connection), request, wire::FrameKind::kError,
         encode(wire::ErrorReply{error.code(), error.what()}));
}

void Outbox::close(Link connection, std::string reason) {
  closing_.emplace_back(std::move(connection), std::move(reason));
}

void Outbox::append(Outbox&& later) {
  items_.reserve(items_.size() + later.items_.size());
  closing_.reserve(closing_.size() + later.closing_.size());
  std::move(later.items_.begin(), later.items_.end(), std::back_inserter(items_));
  std::move(later.closing_.begin(), later.closing_.end(), std::back_inserter(closing_));
}

SharedPayload payload_of(const Error& error) {
  return std::make_shared<const Buffer>(encode(wire::ErrorReply{error.code(), error.what()}));
}

void Outbox::flush() {
  // A send may call back into the server in this thread; a later flush must not repeat it.
  auto items = std::move(items_);
  auto closing = std::move(closing_);
  items_.clear();
  closing_.clear();
  std::exception_ptr failure;
  for (Item& item : items) {
    if (item.shared) item.payload = item.shared->share();
    try {
      // A dead link is no error here: the reply is recorded, or the request is repeated.
      static_cast<void>(item.connection->send(wire::Frame{item.header, std::move(item.payload)}));
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  for (auto& [connection, reason] : closing) connection->close(reason);
  if (failure) std::rethrow_exception(failure);
}

wire::FrameHeader Outbox::reply_header(const wire::FrameHeader& request,
                                       wire::FrameKind kind) const {
  wire::FrameHeader header;
  header.kind = kind;
  header.run_id = run_id_;
  header.epoch = request.epoch;
  header.incarnation = request.incarnation;
  header.role = wire::Role::kServer;
  header.rank = static_cast<uint16_t>(shard_id_);
  header.param_set = request.param_set;
  header.request_id = request.request_id;
  header.sequence = request.sequence;
  return header;
}

}  // namespace cpudist::server
