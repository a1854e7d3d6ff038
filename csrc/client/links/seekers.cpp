// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "client/links/seekers.h"

#include <exception>
#include <utility>

#include "base/threads.h"

namespace cpudist::client {

bool Seekers::is_silent(Link& link, TimePoint now) const {
  if (link.state != LinkState::kOpen || owner_.over()) return false;
  if (transport::has_moved(*link.connection, link.bytes_seen)) link.heard = now;
  return link.spare.wanted(link.address, now, link.heard, owner_.liveness_ms);
}

void Seekers::seek_if_silent(Link& link, TimePoint now) {
  if (link.spare.sought || now < link.spare.next || !is_silent(link, now)) return;
  std::thread& seeker = threads_[link.server];
  if (seeker.joinable()) join_thread(seeker);  // it has ended, as nothing is sought
  try {
    seeker = start_io_thread("the thread that looks for a silent server", [&] { seek(link); });
    link.spare.sought = true;
  } catch (const std::exception&) {  // no thread is left, or no memory
    link.spare.next = now + transport::beat_interval(owner_.liveness_ms);
  }
}

void Seekers::join() {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) join_thread(thread);
  }
}

// Of a server that is there another connection is open soon, whatever the old one waits for.
void Seekers::seek(Link& link) {
  std::unique_lock lock(owner_.mutex);
  try {
    while (is_silent(link, Clock::now())) {
      const TimePoint until = try_spare(link, lock);
      owner_.changed.wait_until(lock, until, [&] { return !is_silent(link, Clock::now()); });
      drop_spare(link, lock);
    }
  } catch (const std::exception&) {  // there is no memory; another look follows
    if (!lock.owns_lock()) lock.lock();
    drop_spare(link, lock);
  }
  link.spare.next = Clock::now() + owner_.pause_of(link);
  link.spare.sought = false;
}

// It takes the place of the old one once the server has answered over it. Returns when to try
// again.
TimePoint Seekers::try_spare(Link& link, std::unique_lock<std::mutex>& lock) {
  const TimePoint deadline = link.spare.deadline(link.heard, owner_.liveness_ms);
  const std::string address = link.address;
  wire::Frame hello = owner_.make_hello(link);
  std::string trouble = "it does not answer a hello";
  std::shared_ptr<transport::Connection> connection;
  link.spare.tried = Clock::now();
  lock.unlock();
  try {
    connection = owner_.connect(address, deadline);
  } catch (const Error& error) {
    trouble = error.what();
  }
  lock.lock();
  link.trouble.swap(trouble);
  if (!connection) return Clock::now() + owner_.pause_of(link);
  link.spare.connection = connection;
  if (!is_silent(link, Clock::now())) return Clock::now();  // the old one is back, or all has ended
  lock.unlock();
  try {
    connection->send(std::move(hello));
  } catch (...) {
    lock.lock();
    throw;
  }
  lock.lock();
  // on_close may have come before the link knew the connection.
  if (connection->closed() && link.spare.connection == connection) {
    link.spare.connection.reset();
    return Clock::now() + owner_.pause_of(link);
  }
  return Clock::now() + transport::beat_interval(owner_.liveness_ms);
}

void Seekers::drop_spare(Link& link, std::unique_lock<std::mutex>& lock) {
  const auto unanswered = std::move(link.spare.connection);
  link.spare.connection.reset();
  if (!unanswered) return;
  lock.unlock();
  unanswered->close("not needed");  // short: there may be no memory for more
  lock.lock();
}

}  // namespace cpudist::client
