// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// long: one class
// A connection's life, its sending half and its receiving half: bytes to frames. Small frames come
// out of a scratch buffer many at a time; a large payload is read straight into its own buffer.
#include "transport/tcp/connection.h"

#include <sys/ioctl.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/crc32c.h"
#include "base/errors.h"
#include "transport/tcp/linger.h"

namespace cpudist::transport::tcp {
namespace {

constexpr size_t kFramesAtOnce = 16;
// Then other connections have their turn.
constexpr size_t kWriteBytesAtOnce = 8u << 20;
constexpr size_t kReadBytesAtOnce = 8u << 20;
// Of a frame that waits until others are complete.
constexpr auto kWaitPause = std::chrono::milliseconds(10);
// How often to look whether a frame gets on.
constexpr int kLooksWhileStalled = 4;

}  // namespace

TcpConnection::TcpConnection(Descriptor fd, std::shared_ptr<Reactor> reactor,
                             ConnectionOptions options)
    : reactor_(std::move(reactor)),
      options_(std::move(options)),
      fd_(std::move(fd)),
      peer_(options_.peer) {
  if (options_.budget) unsent_.emplace(options_.incoming->limits(), options_.budget);
  if (options_.credentials) handshake_.emplace(options_.credentials, options_.own_address);
}

void TcpConnection::take_place(std::unique_ptr<Door::Guest> place) {
  place_ = std::move(place);
  place_->when_asked([weak = weak_from_this()] {
    const auto connection = weak.lock();
    if (!connection) return;
    connection->reactor_->post([connection] { connection->give_up_place(); });
  });
}

void TcpConnection::give_up_place() {
  if (finished_ || accepted_) return;
  // On a busy machine what it has said may not have been read yet.
  if (token_ != 0) on_ready(EPOLLIN);
  if (finished_ || accepted_ || !place_) return;
  if (bytes_received() > 0 && !place_->has_to_go()) return;
  turned_away_ = true;
  fail("others need its place: it has not said who it is");
}

void TcpConnection::open() {
  opened_ = true;
  if (options_.listener_side) options_.handler->on_open(shared_from_this());
}

void TcpConnection::start() {
  if (finished_) return;  // turned away before it began
  const auto keep = shared_from_this();
  try {
    // Of who has to prove something first, the handler hears when that is done.
    if (!handshake_) open();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      armed_ = !queue_.empty();
      token_ = reactor_->watch(fd_.get(), keep, interest());
    }
    if (closed()) return finish();
    if (!options_.listener_side) return;
    const auto limit = std::chrono::milliseconds(options_.limits.handshake_deadline_ms);
    reactor_->schedule(Clock::now() + limit, [weak = weak_from_this()] {
      const auto connection = weak.lock();
      if (!connection || connection->accepted_) return;
      connection->fail("no complete first frame within " +
                       std::to_string(connection->options_.limits.handshake_deadline_ms) + " ms");
    });
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

bool TcpConnection::send(wire::Frame frame) {
  guard_.check("connection");
  if (closed()) return false;
  frame.header.length = frame.payload.size();
  frame.header.payload_crc =
      options_.unix_socket ? 0 : crc32c(frame.payload.data(), frame.payload.size());
  Outbound item{wire::encode_header(frame.header), std::move(frame.payload)};
  const size_t size_bytes = item.size();

  std::unique_lock<std::mutex> lock(mutex_);
  if (!make_room(lock, size_bytes)) return false;
  const bool idle = queue_.empty();
  queue_.push_back(std::move(item));
  queued_bytes_ += size_bytes;
  bytes_sent_.fetch_add(size_bytes, std::memory_order_relaxed);
  // Else the reactor is at it.
  const Written written = idle ? write_queue() : Written::kAll;
  note_unsent();
  if (written == Written::kSome) arm(true);
  if (written != Written::kBroken) return true;
  const std::string reason = "cannot send: " + describe_errno(errno);
  lock.unlock();
  reactor_->post([self = shared_from_this(), reason] { self->hear_out(reason); });
  return false;
}

Descriptor TcpConnection::peer_process() {
  if (!options_.unix_socket) return Descriptor();
  const std::lock_guard<std::mutex> lock(mutex_);
  return fd_.get() < 0 ? Descriptor() : tcp::peer_process(fd_.get());
}

bool TcpConnection::has_room(size_t size_bytes) const {
  const uint64_t cap = options_.limits.outbound_cap_bytes;
  return queued_bytes_ == 0 || (size_bytes <= cap && queued_bytes_ <= cap - size_bytes);
}

bool TcpConnection::make_room(std::unique_lock<std::mutex>& lock, size_t size_bytes) {
  const auto patience = std::chrono::milliseconds(options_.limits.outbound_deadline_ms);
  bool frozen = false;
  if (!closed() && !has_room(size_bytes)) {
    if (Reactor::on_reactor_thread()) {
      // This thread empties queues: it may not wait. Up to twice the cap it goes on queuing.
      if (!full_since_) full_since_ = Clock::now();
      frozen = Clock::now() - *full_since_ > patience ||
               queued_bytes_ / 2 > options_.limits.outbound_cap_bytes;
    } else {
      frozen = !room_.wait_for(lock, patience, [&] { return closed() || has_room(size_bytes); });
    }
  }
  if (closed()) return false;
  if (!frozen) return true;
  const std::string reason = "frozen: " + std::to_string(queued_bytes_) +
                             " bytes wait to be sent and the peer has not read enough of them in " +
                             std::to_string(patience.count()) + " ms";
  lock.unlock();
  close(reason);
  return false;
}

TcpConnection::Written TcpConnection::write_queue() {
  size_t budget = kWriteBytesAtOnce;
  while (!queue_.empty() && budget > 0) {
    std::array<iovec, 2 * kFramesAtOnce> pieces;
    size_t count = 0;
    size_t size_bytes = 0;
    for (size_t i = 0; i < queue_.size() && i < kFramesAtOnce; ++i) {
      Outbound& item = queue_[i];
      const size_t skip = std::min(item.written, wire::kHeaderBytes);
      if (skip < wire::kHeaderBytes)
        pieces[count++] = {item.header.data() + skip, wire::kHeaderBytes - skip};
      const size_t payload_skip = item.written - skip;
      const size_t left = item.payload.size() - payload_skip;
      if (left > 0) pieces[count++] = {item.payload.data() + payload_skip, left};
      size_bytes += item.size() - item.written;
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? Written::kSome : Written::kBroken;
    }
    drop_written(static_cast<size_t>(sent));
    budget -= std::min(budget, static_cast<size_t>(sent));
    if (static_cast<size_t>(sent) < size_bytes) return Written::kSome;
  }
  return queue_.empty() ? Written::kAll : Written::kSome;
}

void TcpConnection::note_unsent() {
  if (!unsent_ || (queued_bytes_ == 0 && unsent_->bytes() == 0)) return;
  unsent_->note(queued_bytes_, taken_bytes_, Clock::now());
  if (queued_bytes_ == 0 || unsent_watched_) return;
  unsent_watched_ = reactor_->post([weak = weak_from_this()] {
    if (const auto connection = weak.lock()) connection->watch_unsent();
  });
}

void TcpConnection::drop_written(size_t size_bytes) {
  queued_bytes_ -= size_bytes;
  taken_bytes_ += size_bytes;
  while (size_bytes > 0) {
    Outbound& item = queue_.front();
    const size_t step = std::min(size_bytes, item.size() - item.written);
    item.written += step;
    size_bytes -= step;
    if (item.written == item.size()) queue_.pop_front();
  }
  if (queued_bytes_ <= options_.limits.outbound_cap_bytes) full_since_.reset();
  room_.notify_all();
}

uint32_t TcpConnection::interest() const {
  return (reading_ ? EPOLLIN : 0u) | (armed_ ? EPOLLOUT : 0u);
}

void TcpConnection::arm(bool writable) {
  if (armed_ == writable) return;
  armed_ = writable;
  if (token_ == 0) return;  // start() looks at the queue
  reactor_->change(fd_.get(), token_, interest());
}

void TcpConnection::flush() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed()) return;
  const size_t queued = queued_bytes_;
  const Written written = write_queue();
  bytes_drained_.fetch_add(queued - queued_bytes_, std::memory_order_relaxed);
  note_unsent();
  if (written == Written::kAll) arm(false);
  if (written != Written::kBroken) return;
  const std::string reason = "cannot send: " + describe_errno(errno);
  lock.unlock();
  hear_out(reason);
}

void TcpConnection::hear_out(const std::string& reason) {
  try {
    while (!closed() && receive()) {
    }
  } catch (const std::exception& error) {
    return fail(error.what());
  }
  fail(reason);
}

bool TcpConnection::mark_closing(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed()) return false;
  reason_ = reason;
  closing_.store(true, std::memory_order_release);
  room_.notify_all();
  return true;
}

void TcpConnection::close(const std::string& reason) {
  if (guard_.forked()) return;
  if (!mark_closing(reason)) return;
  // on_close belongs to the reactor's thread, behind a callback that may be running.
  reactor_->post([self = shared_from_this()] { self->finish(); });
}

void TcpConnection::fail(const std::string& reason) {
  mark_closing(reason);
  finish();
}

bool TcpConnection::on_stop() {
  stopping_ = true;
  fail("the channel stopped");
  return false;
}

void TcpConnection::finish() {
  if (finished_) return;
  finished_ = true;
  const auto keep = shared_from_this();
  std::deque<Outbound> unsent;
  Descriptor socket;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // A last reply, such as the reason for the close, goes out if the socket takes it.
    if (!queue_.empty()) write_queue();
    unsent.swap(queue_);
    queued_bytes_ = 0;
    note_unsent();
    if (token_ != 0) reactor_->forget(fd_.get(), token_);
    if (peer_ended_) fd_.reset();
    socket = std::move(fd_);
  }
  if (turned_away_) socket.reset();
  if (socket.get() >= 0) linger(*reactor_, std::move(socket), std::move(place_));
  place_.reset();
  payload_ = Buffer();
  payload_size_ = payload_have_ = 0;
  coming_.reset();
  kept_ = {};
  try {
    if (opened_) {
      options_.handler->on_close(keep, reason_);
    } else if (!stopping_ && !turned_away_ && !went_) {
      options_.door->refuse(options_.peer_address, reason_);
    }
  } catch (const std::exception&) {
    // Nobody is left to tell: the connection is gone.
  }
}

void TcpConnection::on_ready(uint32_t events) {
  try {
    if ((events & (EPOLLHUP | EPOLLERR)) != 0) hung_up_ = true;
    if ((events & EPOLLOUT) != 0) flush();
    if ((events & ~static_cast<uint32_t>(EPOLLOUT)) != 0 && !closed()) receive();
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

bool TcpConnection::receive() {
  const bool more = read_some();
  note_unfinished();
  return more;
}

void TcpConnection::note_unfinished() {
  // The first frame is small, and has a deadline of its own.
  if (!options_.incoming || !accepted_ || closed() || header_have_ == 0) return;
  const TimePoint now = Clock::now();
  if (!coming_) coming_ = options_.incoming->begin(now);
  coming_->came(header_have_ + payload_have_, dropping() ? 0 : payload_have_, now);
  if (!watched_) watch_unfinished();
}

bool TcpConnection::has_unread() const {
  int bytes = 0;
  return ioctl(fd_.get(), FIONREAD, &bytes) == 0 && bytes > 0;
}

void TcpConnection::watch_unfinished() {
  const auto look = options_.incoming->limits().stalled / kLooksWhileStalled;
  reactor_->schedule(Clock::now() + look, [weak = weak_from_this()] {
    const auto connection = weak.lock();
    if (!connection || connection->finished_) return;
    connection->watched_ = false;
    if (!connection->coming_) return;
    try {
      const auto why = connection->coming_->overdue(Clock::now());
      // What has come and was not read yet is this thread's delay, not the sender's.
      if (why && !connection->has_unread()) {
        connection->fail(*why);
      } else {
        connection->watch_unfinished();
      }
    } catch (const std::exception& error) {
      connection->fail(error.what());
    }
  });
  watched_ = true;
}

void TcpConnection::watch_unsent() {
  if (finished_) return;
  const auto look = options_.incoming->limits().stalled / kLooksWhileStalled;
  reactor_->schedule(Clock::now() + look, [weak = weak_from_this()] {
    const auto connection = weak.lock();
    if (!connection || connection->finished_) return;
    connection->flush();  // what it can take by now is not its delay
    std::optional<std::string> why;
    {
      const std::lock_guard<std::mutex> lock(connection->mutex_);
      connection->unsent_watched_ = connection->queued_bytes_ > 0;
      if (!connection->unsent_watched_) return;
      why = connection->unsent_->overdue(Clock::now());
    }
    if (!why) return connection->watch_unsent();
    connection->fail("frozen: " + *why);
  });
}

bool TcpConnection::read_some() {
  std::vector<uint8_t>& scratch = reactor_->scratch();
  size_t budget = kReadBytesAtOnce;
  while (budget > 0 && !closed()) {
    if (must_wait()) return false;
    if (!kept_.empty()) {
      const std::vector<uint8_t> kept = std::exchange(kept_, {});
      parse(kept.data(), kept.size());
      continue;
    }
    std::array<iovec, 2> pieces;
    size_t count = 0;
    const size_t missing = dropping() ? 0 : payload_missing();
    if (missing > 0) pieces[count++] = {payload_.data() + payload_have_, missing};
    pieces[count++] = {scratch.data(), scratch.size()};
    // Only this thread closes the socket, so it is open here.
    const ssize_t result = readv(fd_.get(), pieces.data(), static_cast<int>(count));
    if (result < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
      peer_ended_ = true;
      went_ = speaks();
      fail("cannot receive: " + describe_errno(errno));
      return false;
    }
    if (result == 0) {
      end_of_stream();
      return false;
    }
    const auto size_bytes = static_cast<size_t>(result);
    const bool first = bytes_received_.fetch_add(size_bytes, std::memory_order_relaxed) == 0;
    if (first && place_) place_->spoke();
    const size_t direct = std::min(size_bytes, missing);
    if (direct > 0) take_payload(payload_.data() + payload_have_, direct);
    parse(scratch.data(), size_bytes - direct);
    // Drained; epoll tells when there is more.
    if (size_bytes < missing + scratch.size()) return false;
    budget -= std::min(budget, size_bytes);
  }
  return true;
}

void TcpConnection::parse(const uint8_t* data, size_t size_bytes) {
  while (size_bytes > 0 && !closed()) {
    if (must_wait_for_takers()) {
      kept_.assign(data, data + size_bytes);
      return;
    }
    size_t used = 0;
    if (header_have_ < wire::kHeaderBytes) {
      used = std::min(size_bytes, wire::kHeaderBytes - header_have_);
      std::memcpy(header_bytes_.data() + header_have_, data, used);
      header_have_ += used;
      if (header_have_ == wire::kHeaderBytes) begin_frame();
    } else {
      used = std::min(size_bytes, payload_missing());
      if (!dropping()) std::memcpy(payload_.data() + payload_have_, data, used);
      take_payload(data, used);
    }
    data += used;
    size_bytes -= used;
  }
}

void TcpConnection::begin_frame() {
  const ChannelLimits& limits = options_.limits;
  header_ = wire::decode_header(
      header_bytes_.data(), accepted_ ? limits.payload_limit_bytes : limits.pre_hello_limit_bytes);
  if (!accepted_) check_first(header_);
  if (peer_) check_sender(header_);
  payload_ = handshake_ ? Buffer(static_cast<size_t>(header_.length))
                        : options_.handler->payload_memory(header_, options_.pool);
  payload_size_ = static_cast<size_t>(header_.length);
  payload_have_ = 0;
  payload_crc_ = 0;
  if (payload_size_ == 0) finish_frame();
}

// What has not been read stays in the socket, and holds the sender up, until others are complete.
bool TcpConnection::must_wait() {
  if (!coming_) return must_wait_for_takers();
  if (hung_up_ || coming_->may_grow(Clock::now())) return false;
  pause_reading();
  return true;
}

// Between two frames: what is asked for next would have to be kept, too.
bool TcpConnection::must_wait_for_takers() {
  if (!options_.budget || header_have_ > 0 || !accepted_ || hung_up_) return false;
  if (!options_.budget->exceeded()) return false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!unsent_->holds_back(Clock::now())) return false;
  }
  pause_reading();
  return true;
}

void TcpConnection::pause_reading() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!reading_ || token_ == 0) return;
  reading_ = false;
  reactor_->change(fd_.get(), token_, interest());
  reactor_->schedule(Clock::now() + kWaitPause, [weak = weak_from_this()] {
    const auto connection = weak.lock();
    if (!connection || connection->finished_) return;
    {
      const std::lock_guard<std::mutex> hold(connection->mutex_);
      connection->reading_ = true;
      connection->reactor_->change(connection->fd_.get(), connection->token_,
                                   connection->interest());
    }
    // Nobody else reads what is there: a sign of life.
    connection->bytes_drained_.fetch_add(1, std::memory_order_relaxed);
    connection->on_ready(EPOLLIN);
  });
}

void TcpConnection::check_first(const wire::FrameHeader& header) {
  using wire::FrameKind;
  const FrameKind kind = header.kind;
  std::optional<Error> refused;
  if (handshake_) {
    // An end that finds a wrong key says so.
    const bool expected = kind == FrameKind::kAuth || kind == FrameKind::kError;
    if (expected) return;
    if (kind == FrameKind::kHello) refused = wire::no_key_here();
  } else {
    // A server refuses a hello with an error; nothing else may come before the handshake.
    if (kind == FrameKind::kHello) return;
    if (kind == FrameKind::kError && !options_.listener_side) return;
    if (kind == FrameKind::kAuth && !peer_) refused = wire::no_key_there();
  }
  if (!refused) {
    throw Error(ErrorCode::kProtocol, std::string("the first frame must be a ") +
                                          (handshake_ ? "handshake" : "hello") + ", found kind " +
                                          name_of(kind));
  }
  const bool lacks = !handshake_;
  const wire::Identity own = handshake_ ? options_.credentials->own : wire::Identity{};
  send(wire::refusal_of(*refused, own));
  if (lacks && options_.door) options_.door->refuse(options_.peer_address, "no key here");
  throw lacks ? wire::no_key_here() : wire::no_key_there();
}

void TcpConnection::check_sender(const wire::FrameHeader& header) const {
  wire::Identity found = wire::identity_of(header);
  if (!options_.listener_side) {
    // A server repeats what its client has said of these.
    found.epoch = peer_->epoch;
    found.incarnation = peer_->incarnation;
  }
  if (found == *peer_) return;
  throw Error(ErrorCode::kProtocol, "a frame of " + wire::describe(found) + ", run " +
                                        std::to_string(found.run_id) + ", on the link of " +
                                        wire::describe(*peer_) + ", run " +
                                        std::to_string(peer_->run_id) + ", which has proven that");
}

void TcpConnection::authenticate(const wire::Frame& frame) {
  try {
    if (!handshake_->answered()) {
      send(handshake_->answer(frame));
      return;
    }
    handshake_->accept(frame);
  } catch (const Error& error) {
    const bool told = frame.header.kind != wire::FrameKind::kError;
    if (told) send(wire::refusal_of(error, options_.credentials->own));
    throw;
  }
  peer_ = handshake_->peer();
  handshake_.reset();
  open();
}

void TcpConnection::take_payload(const uint8_t* data, size_t size_bytes) {
  // While the bytes are still in the cache.
  if (!options_.unix_socket) payload_crc_ = crc32c(data, size_bytes, payload_crc_);
  payload_have_ += size_bytes;
  if (payload_missing() == 0) finish_frame();
}

void TcpConnection::finish_frame() {
  if (!options_.unix_socket && payload_crc_ != header_.payload_crc) {
    throw Error(ErrorCode::kProtocol, "the payload of a frame is damaged: expected checksum " +
                                          std::to_string(header_.payload_crc) + ", found " +
                                          std::to_string(payload_crc_));
  }
  coming_.reset();  // from here on it is its receiver's
  wire::Frame frame{header_, Buffer(), dropping()};
  frame.payload = std::exchange(payload_, Buffer());
  header_have_ = 0;
  payload_have_ = 0;
  payload_size_ = 0;
  if (handshake_) return authenticate(frame);
  options_.handler->on_frame(shared_from_this(), std::move(frame));
  if (closed()) return;
  accepted_ = true;
  place_.reset();
}

// Whether all that has come could be one of ours.
bool TcpConnection::speaks() const {
  const size_t have = std::min(header_have_, sizeof wire::kMagic);
  return std::memcmp(header_bytes_.data(), &wire::kMagic, have) == 0;
}

void TcpConnection::end_of_stream() {
  peer_ended_ = true;
  went_ = speaks();
  if (header_have_ == 0) return fail("the peer closed the connection");
  const size_t have = header_have_ + payload_have_;
  const size_t size = wire::kHeaderBytes + payload_size_;
  fail("the peer closed the connection in the middle of a frame, after " + std::to_string(have) +
       " of " + (header_have_ < wire::kHeaderBytes ? "at least " : "") + std::to_string(size) +
       " bytes");
}

}  // namespace cpudist::transport::tcp
