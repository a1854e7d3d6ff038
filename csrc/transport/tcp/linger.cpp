// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "transport/tcp/linger.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

namespace cpudist::transport::tcp {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(300);

class Lingering final : public Reactor::Source, public std::enable_shared_from_this<Lingering> {
 public:
  Lingering(Reactor& reactor, Descriptor socket, std::unique_ptr<Door::Guest> place)
      : reactor_(reactor), socket_(std::move(socket)), place_(std::move(place)) {}

  void start() {
    if (shutdown(socket_.get(), SHUT_WR) != 0) return;  // broken already
    // The timer first: what is watched must have an end.
    reactor_.schedule(Clock::now() + kPatience, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->end();
    });
    token_ = reactor_.watch(socket_.get(), shared_from_this(), EPOLLIN);
    if (!place_) return;
    place_->when_asked_at_the_end([weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self) self->reactor_.post([self] { self->end(); });
    });
  }

  void on_ready(uint32_t) override {
    std::vector<uint8_t>& scratch = reactor_.scratch();
    // Once per event: other connections have their turn.
    const ssize_t result = recv(socket_.get(), scratch.data(), scratch.size(), MSG_DONTWAIT);
    if (result > 0) return;
    if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    end();
  }

  bool on_stop() override { return socket_.get() >= 0; }

 private:
  void end() {
    if (socket_.get() < 0) return;
    const auto keep = shared_from_this();
    reactor_.forget(socket_.get(), token_);
    socket_.reset();
    place_.reset();
  }

  Reactor& reactor_;
  Descriptor socket_;
  std::unique_ptr<Door::Guest> place_;
  uint64_t token_ = 0;
};

}  // namespace

void linger(Reactor& reactor, Descriptor socket, std::unique_ptr<Door::Guest> place) {
  try {
    std::make_shared<Lingering>(reactor, std::move(socket), std::move(place))->start();
  } catch (const std::exception&) {
    // Without a watch the socket is closed at once.
  }
}

}  // namespace cpudist::transport::tcp
