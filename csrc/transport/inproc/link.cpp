// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Handing frames over in-process, and closing without a callback too many.

#include "transport/inproc/link.h"

#include <utility>

#include "transport/inproc/faults.h"

namespace cpudist::transport::inproc {

bool Home::add(const std::shared_ptr<Link>& link) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!stopped_) links_.push_back(link);
  return !stopped_;
}

void Home::remove(const std::shared_ptr<Link>& link) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase(links_, link);
}

std::vector<std::shared_ptr<Link>> Home::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  return std::exchange(links_, {});
}

std::shared_ptr<Link> Link::create(const std::string& address, const Side& client,
                                   const Side& server, std::shared_ptr<FaultSchedule> faults) {
  auto link = std::make_shared<Link>();
  link->faults_ = std::move(faults);
  const Side* sides[] = {&client, &server};
  for (size_t i = 0; i < 2; ++i) {
    End& end = link->ends_[i];
    end.link_ = link.get();
    end.handler_ = sides[i]->handler;
    end.home_ = sides[i]->home;
    end.peer_address_ = address;
  }
  return link;
}

std::shared_ptr<Connection> Link::share(const End& end) {
  return {shared_from_this(), &ends_[&end == &ends_[0] ? 0 : 1]};
}

std::shared_ptr<Connection> End::self() const { return link_->share(*this); }

End& End::peer() const { return this == &link_->ends_[0] ? link_->ends_[1] : link_->ends_[0]; }

bool End::reliable() const {
  // Drops and cuts take frames that senders must still have; a hello may come twice.
  return !link_->faults_;
}

bool End::send(wire::Frame frame) {
  guard_.check("connection");
  if (closed()) return false;
  frame.header.length = frame.payload.size();
  frame.header.payload_crc = 0;
  bytes_sent_.fetch_add(wire::kHeaderBytes + frame.payload.size(), std::memory_order_relaxed);
  if (link_->faults_) {
    return link_->faults_->send(link_->shared_from_this(), peer(), std::move(frame));
  }
  return peer().deliver(std::move(frame)) && !closed();
}

void End::close(const std::string& reason) {
  if (guard_.forked()) return;
  const auto keep = link_->shared_from_this();
  // With faults the other end learns it behind the frames that are still under way.
  if (link_->faults_) link_->faults_->close(keep, peer(), "closed by the peer: " + reason);
  close_here(reason);
  if (!link_->faults_) peer().close_here("closed by the peer: " + reason);
}

bool End::enter() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed()) return false;
  ++running_;
  return true;
}

void End::leave() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --running_;
  }
  finish_close();
}

void End::open() {
  if (!enter()) return;
  try {
    handler_->on_open(self());
  } catch (const std::exception& error) {
    close(error.what());
  }
  leave();
}

bool End::deliver(wire::Frame frame) {
  if (!enter()) return false;
  bytes_received_.fetch_add(wire::kHeaderBytes + frame.payload.size(), std::memory_order_relaxed);
  try {
    handler_->on_frame(self(), std::move(frame));
  } catch (const std::exception& error) {
    close(error.what());
  }
  leave();
  return true;
}

void End::close_here(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed()) return;
    reason_ = reason;
    closed_.store(true, std::memory_order_release);
  }
  finish_close();
}

void End::finish_close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!closed() || running_ > 0 || close_started_) return;
    close_started_ = true;
  }
  const auto link = link_->shared_from_this();
  try {
    handler_->on_close(self(), reason_);
  } catch (const std::exception&) {
    // Nobody is left to tell: the connection is gone.
  }
  if (const auto home = home_.lock()) home->remove(link);
  const std::lock_guard<std::mutex> lock(mutex_);
  close_done_ = true;
  changed_.notify_all();
}

void End::wait_closed() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return close_done_; });
}

}  // namespace cpudist::transport::inproc
