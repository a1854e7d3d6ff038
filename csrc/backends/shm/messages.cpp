// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// long: one class
// Who moves messages when, and what becomes of those that cannot be.
#include "backends/shm/messages.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "backends/shm/turns.h"
#include "base/threads.h"

namespace cpudist::shm {

namespace {

// Whoever makes a call usually waits for it at once: so long the thread leaves it to him.
constexpr std::chrono::milliseconds kCourtesy{1};
// How often pairs look who is there while messages of others move.
constexpr std::chrono::milliseconds kLook{100};

}  // namespace

Messages::Messages(Channel& channel)
    : channel_(channel),
      sends_(static_cast<size_t>(channel.size())),
      inboxes_(static_cast<size_t>(channel.size())),
      lost_(static_cast<size_t>(channel.size())) {}

Messages::~Messages() { close(); }

void Messages::submit(const std::shared_ptr<Message>& message) {
  guard_.check("a group of backend shm");
  message->deadline = Clock::now() + message->timeout;
  Lock lock(mutex_);
  if (broken_) std::rethrow_exception(broken_);  // also when it was closed
  channel_.throw_if_broken();
  if (message->peer != kAnySource) {
    const auto& lost = lost_[static_cast<size_t>(message->peer)];
    if (lost) std::rethrow_exception(lost);
  }
  if (message->sends) {
    sends_[static_cast<size_t>(message->peer)].push_back(message);
  } else {
    receives_.push_back(message);
  }
  if (driven_) {
    channel_.ring(channel_.rank());  // who moves messages looks again
    return;
  }
  step(lock, Patience{}, Clock::time_point{});
  if (message->done) return;
  if (!thread_.joinable()) {
    thread_ = start_thread("the thread for messages of backend shm", [this] { serve(); });
  }
  work_.notify_one();
}

bool Messages::wait(Message& message, std::optional<std::chrono::milliseconds> limit) {
  Lock lock(mutex_);
  const bool done = drive_until(
      lock, ended_, limit, [&] { return message.done.load(); },
      [this] { return driven_ || closed_; },  // close() ends what is left
      [&](Clock::time_point until) { step(lock, channel_.caller_patience(), until); });
  lock.unlock();
  if (!done) return false;
  if (message.error) std::rethrow_exception(message.error);
  return true;
}

// Moves what can be moved, and then waits for more until something has moved or `until`.
void Messages::step(Lock& lock, const Patience& patience, Clock::time_point until) {
  driven_ = true;
  const uint32_t seen = channel_.bell();
  std::exception_ptr error;
  try {
    bool idle = !move() && until != Clock::time_point{};
    if (idle) {
      const Clock::time_point end = std::min(until, soonest_deadline());
      lock.unlock();
      channel_.wait_bell(seen, patience, end);
      lock.lock();
      idle = !move();
    }
    if (idle || (pairwise_ && Clock::now() >= next_look_)) check_pending();
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    channel_.break_group(error);
    fail_all(error);
  }
  driven_ = false;
  notify_ended(lock);
}

void Messages::notify_ended(Lock& lock) {
  ended_.notify_all();
  if (ended_messages_.empty()) return;
  auto messages = std::exchange(ended_messages_, {});
  lock.unlock();
  // Tensors are let go here, too, which may wait for Python's lock.
  for (const auto& message : messages) {
    message->finish = nullptr;
    if (message->notify) std::exchange(message->notify, nullptr)(message->error);
  }
  messages.clear();
  lock.lock();
}

// Calls `visit` for every receive, and for the send of each peer that is in front.
template <typename Visit>
void Messages::visit_pending(const Visit& visit) const {
  for (const auto& one : receives_) visit(*one);
  for (const auto& queue : sends_) {
    if (!queue.empty()) visit(*queue.front());
  }
}

Clock::time_point Messages::soonest_deadline() const {
  Clock::time_point soonest = Clock::time_point::max();
  visit_pending([&](const Message& one) { soonest = std::min(soonest, one.deadline); });
  return soonest;
}

// Throws if a message is late, or the rank it is from or for is not there any more; pairs end
// alone.
void Messages::check_pending() {
  channel_.throw_if_broken();
  next_look_ = Clock::now() + kLook;
  std::vector<std::pair<int, std::exception_ptr>> lost;
  visit_pending([&](const Message& message) {
    try {
      check(message);
    } catch (const Error&) {
      if (!pairwise_ || message.peer == kAnySource) throw;
      lost.emplace_back(message.peer, std::current_exception());
    }
  });
  for (const auto& [peer, error] : lost) lose(peer, error);
  // The others look, too, before this rank's end can pass for the cause.
  if (!lost.empty()) channel_.wake_all();
}

void Messages::check(const Message& message) const {
  const bool late = Clock::now() >= message.deadline;
  if (message.peer == kAnySource) {
    if (!late) return check_any_source();
    throw Error(ErrorCode::kTimeout, "backend shm: no rank sent what " +
                                         channel_.name(channel_.rank()) + " waits for within " +
                                         std::to_string(message.timeout.count()) + " ms.");
  }
  const std::string what = message.sends ? "recv" : "send";
  if (late) throw channel_.late_rank(message.peer, what, message.timeout);
  try {
    check_there(message.peer);
  } catch (const Error&) {
    // What it sent just before its end is taken first.
    if ((message.sends && !pairwise_) || readable(message.peer) == 0) throw;
  }
}

// Throws if no other rank is there any more, nor anything that one has sent.
void Messages::check_any_source() const {
  std::exception_ptr lost;
  for (int peer = 0; peer < channel_.size(); ++peer) {
    if (peer == channel_.rank()) continue;
    try {
      check_there(peer);
      return;
    } catch (const Error&) {
      if (readable(peer)) return;
      lost = std::current_exception();
    }
  }
  if (lost) std::rethrow_exception(lost);
}

void Messages::check_there(int peer) const {
  channel_.check_there(peer);
  if (channel_.segment().ring(peer, channel_.rank()).given_up.load() == 0) return;
  throw Error(ErrorCode::kPeerLost, "backend shm: " + channel_.name(peer) +
                                        " has given up its messages with " +
                                        channel_.name(channel_.rank()));
}

void Messages::fail_pairwise() {
  const Lock lock(mutex_);
  pairwise_ = true;
}

void Messages::give_up(int peer) {
  guard_.check("a group of backend shm");
  Lock lock(mutex_);
  if (closed_ || broken_) return;
  lose(peer, std::make_exception_ptr(Error(
                 ErrorCode::kClosed,
                 "backend shm: the messages with " + channel_.name(peer) + " were given up")));
  channel_.ring(channel_.rank());  // who waits here may wait for these
  notify_ended(lock);
}

// Ends the messages with one rank and tells it, if it is there. Those who wait are not told yet.
void Messages::lose(int peer, const std::exception_ptr& error) {
  const auto at = static_cast<size_t>(peer);
  if (lost_[at]) return;
  lost_[at] = error;
  channel_.segment().ring(channel_.rank(), peer).given_up.store(1);
  channel_.ring(peer);
  for (const auto& message : std::exchange(sends_[at], {})) finish(message, error);
  for (auto one = receives_.begin(); one != receives_.end();) {
    const std::shared_ptr<Message> message = *one;
    one = message->peer == peer ? receives_.erase(one) : std::next(one);
    if (message->peer == peer) finish(message, error);
  }
  inboxes_[at] = Inbox{};
}

void Messages::finish(const std::shared_ptr<Message>& message, std::exception_ptr error) {
  if (!error && message->finish) {
    try {
      message->finish();
    } catch (...) {
      error = std::current_exception();
    }
  }
  message->error = error;
  message->done.store(true, std::memory_order_release);
  ended_messages_.push_back(message);
}

void Messages::fail_all(const std::exception_ptr& error) {
  broken_ = error;
  for (auto& queue : sends_) {
    for (const auto& message : queue) finish(message, error);
    queue.clear();
  }
  for (const auto& message : receives_) finish(message, error);
  receives_.clear();
}

void Messages::serve() {
  Lock lock(mutex_);
  while (!closed_) {
    bool pending = !receives_.empty();
    for (const auto& queue : sends_) pending = pending || !queue.empty();
    if (!pending) {
      work_.wait(lock);
      continue;
    }
    work_.wait_for(lock, kCourtesy);
    if (!closed_ && !driven_) step(lock, channel_.engine_patience(), Clock::now() + kTurn);
  }
}

void Messages::close() {
  if (guard_.forked()) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  Lock lock(mutex_);
  if (closed_) return;
  closed_ = true;
  while (driven_) {
    channel_.ring(channel_.rank());
    ended_.wait_for(lock, std::chrono::milliseconds(20));
  }
  fail_all(std::make_exception_ptr(Error(
      ErrorCode::kClosed, "backend shm: its group was destroyed before this call had ended")));
  notify_ended(lock);
  work_.notify_all();
  lock.unlock();
  if (thread_.joinable()) join_thread(thread_);
}

// -- moving bytes into rings and out of them

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
