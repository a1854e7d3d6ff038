// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Moving the bytes of messages into rings and out of them.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "backends/shm/messages.h"

namespace cpudist::shm {

// Writes what there is room for; returns how much.
size_t Messages::write(int to, const void* data, size_t size_bytes) {
  Ring& ring = channel_.segment().ring(channel_.rank(), to);
  std::byte* bytes = channel_.segment().ring_data(channel_.rank(), to);
  const size_t room = channel_.segment().layout().ring_bytes;
  const uint64_t head = ring.head.load(std::memory_order_relaxed);
  const uint64_t used = head - ring.tail.load(std::memory_order_acquire);
  const size_t length = std::min(size_bytes, room - static_cast<size_t>(used));
  const size_t place = static_cast<size_t>(head % room);
  const size_t first = std::min(length, room - place);
  if (first != 0) std::memcpy(bytes + place, data, first);
  if (length > first) {
    std::memcpy(bytes, static_cast<const std::byte*>(data) + first, length - first);
  }
  ring.head.store(head + length, std::memory_order_release);
  return length;
}

size_t Messages::readable(int from) const {
  const Ring& ring = channel_.segment().ring(from, channel_.rank());
  return static_cast<size_t>(ring.head.load(std::memory_order_acquire) -
                             ring.tail.load(std::memory_order_relaxed));
}

// Reads what is there; returns how much.
size_t Messages::read(int from, void* data, size_t size_bytes) {
  Ring& ring = channel_.segment().ring(from, channel_.rank());
  const std::byte* bytes = channel_.segment().ring_data(from, channel_.rank());
  const size_t room = channel_.segment().layout().ring_bytes;
  const size_t length = std::min(size_bytes, readable(from));
  const uint64_t tail = ring.tail.load(std::memory_order_relaxed);
  const size_t place = static_cast<size_t>(tail % room);
  const size_t first = std::min(length, room - place);
  if (first != 0) std::memcpy(data, bytes + place, first);
  if (length > first) {
    std::memcpy(static_cast<std::byte*>(data) + first, bytes, length - first);
  }
  ring.tail.store(tail + length, std::memory_order_release);
  return length;
}

bool Messages::move() {
  bool moved = take_kept();
  // All that has come is taken before a send finds that a rank has left, which ends the group.
  for (const auto step : {&Messages::move_receives, &Messages::move_sends}) {
    for (int peer = 0; peer < channel_.size(); ++peer) {
      if (lost_[static_cast<size_t>(peer)] || !(this->*step)(peer)) continue;
      channel_.ring(peer);
      moved = true;
    }
  }
  return moved;
}

bool Messages::move_sends(int peer) {
  auto& queue = sends_[static_cast<size_t>(peer)];
  bool moved = false;
  while (!queue.empty()) {
    const std::shared_ptr<Message> message = queue.front();
    if (!message->begun) {
      // A ring takes what nobody will read. Pairs end alone, when check_pending() finds them lost.
      if (!pairwise_) channel_.check_there(peer);
      const Head head{message->tag, message->size_bytes, message->dtype};
      const Ring& ring = channel_.segment().ring(channel_.rank(), peer);
      const uint64_t used =
          ring.head.load(std::memory_order_relaxed) - ring.tail.load(std::memory_order_acquire);
      if (channel_.segment().layout().ring_bytes - used < sizeof(head)) return moved;
      write(peer, &head, sizeof(head));
      message->begun = true;
      moved = true;
    }
    const size_t left = message->size_bytes - message->moved;
    const size_t written = write(peer, message->data + message->moved, left);
    message->moved += written;
    moved = moved || written != 0;
    if (message->moved < message->size_bytes) return moved;
    queue.pop_front();
    finish(message, nullptr);
    moved = true;
  }
  return moved;
}

bool Messages::wants_from(int peer) const {
  return std::any_of(receives_.begin(), receives_.end(), [&](const auto& one) {
    return !one->begun && (one->peer == peer || one->peer == kAnySource);
  });
}

std::shared_ptr<Message> Messages::wanted(int peer, int64_t tag) const {
  for (const auto& one : receives_) {
    if (!one->begun && one->tag == tag && (one->peer == peer || one->peer == kAnySource)) {
      return one;
    }
  }
  return nullptr;
}

void Messages::check_alike(const Message& message, int peer, const Head& head) const {
  if (message.size_bytes == head.size_bytes && message.dtype == head.dtype) return;
  const auto describe = [](size_t size_bytes, DType dtype) {
    const std::string bytes = std::to_string(size_bytes) + " bytes";
    return dtype == DType::kBytes ? bytes : bytes + " of " + name_of(dtype);
  };
  throw Error(ErrorCode::kConfigMismatch, "backend shm: " + channel_.name(peer) + " sends " +
                                              describe(head.size_bytes, head.dtype) + " with tag " +
                                              std::to_string(message.tag) + ", " +
                                              channel_.name(channel_.rank()) + " expects " +
                                              describe(message.size_bytes, message.dtype) +
                                              ". Make the tensors equal in size and dtype.");
}

// Gives receives what came before they were asked for.
bool Messages::take_kept() {
  bool taken = false;
  for (auto one = receives_.begin(); one != receives_.end();) {
    const std::shared_ptr<Message> message = *one;
    bool found = false;
    for (int peer = 0; !message->begun && !found && peer < channel_.size(); ++peer) {
      if (message->peer != peer && message->peer != kAnySource) continue;
      auto& kept = inboxes_[static_cast<size_t>(peer)].kept;
      const auto match = std::find_if(kept.begin(), kept.end(), [&](const Kept& candidate) {
        return candidate.head.tag == message->tag;
      });
      if (match == kept.end()) continue;
      check_alike(*message, peer, match->head);
      if (!match->data.empty()) {
        std::memcpy(message->data, match->data.data(), match->data.size());
      }
      kept.erase(match);
      message->peer = peer;
      found = true;
    }
    one = found ? receives_.erase(one) : std::next(one);
    if (found) finish(message, nullptr);
    taken = taken || found;
  }
  return taken;
}

// Reads the head of the message in front of the ring, and decides where it goes to.
bool Messages::begin_receive(Inbox& inbox, int peer) {
  // A message that nobody asks for stays in the ring, unless something behind it may be wanted.
  if (!wants_from(peer) || readable(peer) < sizeof(Head)) return false;
  Head head{};
  read(peer, &head, sizeof(head));
  inbox.head = head;
  inbox.read = 0;
  inbox.into = wanted(peer, head.tag);
  if (inbox.into == nullptr) {
    inbox.keeping.resize(head.size_bytes);
    return true;
  }
  check_alike(*inbox.into, peer, head);
  inbox.into->begun = true;
  inbox.into->peer = peer;
  return true;
}

bool Messages::move_receives(int peer) {
  Inbox& inbox = inboxes_[static_cast<size_t>(peer)];
  bool moved = false;
  while (true) {
    if (!inbox.head) {
      if (!begin_receive(inbox, peer)) return moved;
      moved = true;
    }
    const size_t size = inbox.head->size_bytes;
    std::byte* target = inbox.into ? inbox.into->data : inbox.keeping.data();
    const size_t taken = read(peer, target + inbox.read, size - inbox.read);
    inbox.read += taken;
    moved = moved || taken != 0;
    if (inbox.read < size) return moved;
    if (inbox.into) {
      receives_.remove(inbox.into);
      finish(std::exchange(inbox.into, nullptr), nullptr);
    } else {
      inbox.kept.push_back({*inbox.head, std::exchange(inbox.keeping, {})});
      take_kept();  // before what is behind it, which may have the same tag
    }
    inbox.head.reset();
  }
}

}  // namespace cpudist::shm
