// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// How a thread waits for replies: it serves its own requests meanwhile (probes, repeats, deadlines,
// progress messages) and looks for an interrupt every 50 ms.
#include <algorithm>
#include <set>
#include <utility>

#include "client/session.h"

namespace cpudist::client {

namespace {

using std::chrono::milliseconds;

constexpr auto kPollInterval = milliseconds(50);

double seconds_between(TimePoint from, TimePoint to) {
  return std::chrono::duration<double>(to - from).count();
}

std::string in_seconds(uint64_t ms) {
  return ms % 1000 == 0 ? std::to_string(ms / 1000) + " s" : std::to_string(ms) + " ms";
}

std::string list_trainers(const std::set<uint32_t>& ranks) {
  if (ranks.empty()) return "other trainers";
  std::string text = ranks.size() == 1 ? "trainer" : "trainers";
  const char* separator = " ";
  for (const uint32_t rank : ranks) {
    text += separator + std::to_string(rank);
    separator = ", ";
  }
  return text;
}

}  // namespace

void Session::wait(std::span<const RequestPtr> requests, Caller caller) {
  const TimePoint started = Clock::now();
  try {
    wait_settled(requests, TimePoint::max(), caller);
  } catch (const Error&) {
    const std::lock_guard lock(mutex_);
    for (const RequestPtr& request : requests) {
      // Nothing of an idempotent request is worth waiting for later; sequenced ones stay.
      if (request->header.sequence == 0) requests_.erase(request->header.request_id);
    }
    throw;
  }
  const std::lock_guard lock(mutex_);
  const double waited_s = caller == Caller::kUser ? seconds_between(started, Clock::now()) : 0.0;
  stats_.wait_s += waited_s;
  const bool round = std::any_of(requests.begin(), requests.end(), [](const RequestPtr& request) {
    return waits_for_trainers(request->header.kind);
  });
  if (round) stats_.round_wait_s += waited_s;
  for (const RequestPtr& request : requests) {
    if (request->error) throw Error(*request->error);
  }
}

void Session::drain(uint64_t limit_ms, Caller caller) {
  const TimePoint limit = Clock::now() + milliseconds(limit_ms);
  while (true) {
    std::vector<RequestPtr> pending;
    {
      const std::lock_guard lock(mutex_);
      for (const Link& link : links_) {
        if (link.in_flight) pending.push_back(link.in_flight);
      }
    }
    if (pending.empty()) return;
    wait_settled(std::span(pending).first(1), limit, caller);
  }
}

void Session::wait_settled(std::span<const RequestPtr> requests, TimePoint limit, Caller caller) {
  std::unique_lock lock(mutex_);
  Waiter waiter;
  waiter.caller = caller;
  while (!settled(requests)) {
    throw_failure();
    const TimePoint now = Clock::now();
    if (waiter.started == TimePoint()) {
      waiter.started = now;
      waiter.poll_next = now + kPollInterval;
      waiter.log_next = now + milliseconds(options_.straggler_log_ms);
    }
    if (now > limit) {
      throw Error(ErrorCode::kTimeout, straggler_text(requests, waiter, now));
    }
    check_deadlines(requests, waiter, now);
    serve_wait(requests, waiter, lock);
  }
}

bool Session::answered(std::span<const RequestPtr> requests) const {
  const std::lock_guard lock(mutex_);
  return std::all_of(requests.begin(), requests.end(),
                     [](const RequestPtr& request) { return request->done && !request->error; });
}

void Session::give_up(std::span<const RequestPtr> requests) {
  const std::lock_guard lock(mutex_);
  for (const RequestPtr& request : requests) requests_.erase(request->header.request_id);
}

bool Session::refused(std::span<const RequestPtr> requests) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(requests.begin(), requests.end(),
                     [](const RequestPtr& request) { return request->error.has_value(); });
}

bool Session::settled(std::span<const RequestPtr> requests) const {
  bool all = true;
  for (const RequestPtr& request : requests) {
    if (request->error) return true;
    all = all && request->done;
  }
  return all;
}

void Session::serve_wait(std::span<const RequestPtr> requests, Waiter& waiter,
                         std::unique_lock<std::mutex>& lock) {
  const uint64_t shortest = std::min(options_.probe_ms, options_.resend_ms);
  const auto slice =
      std::clamp<milliseconds>(milliseconds(shortest), milliseconds(1), kPollInterval);
  // Links that came back while nobody waited have left marks on the requests.
  auto frames = due_frames(requests, Clock::now());
  if (frames.empty() && !settled(requests)) {
    answered_.wait_for(lock, slice);
    if (settled(requests)) return;
    frames = due_frames(requests, Clock::now());
  }
  const TimePoint now = Clock::now();
  const bool poll = now >= waiter.poll_next;
  if (poll) waiter.poll_next = now + kPollInterval;
  std::string text;
  if (now >= waiter.log_next) {
    waiter.log_next = now + milliseconds(options_.straggler_log_ms);
    text = straggler_text(requests, waiter, now);
  }
  if (frames.empty() && !poll && text.empty()) return;
  lock.unlock();
  for (Outgoing& outgoing : frames) outgoing.connection->send(std::move(outgoing.frame));
  if (!text.empty() && options_.log) options_.log(0, text);
  const bool interrupted =
      poll && waiter.caller == Caller::kUser && options_.interrupted && options_.interrupted();
  lock.lock();
  if (interrupted) throw Error(ErrorCode::kInterrupted, "the wait was interrupted by a signal");
}

std::vector<Session::Outgoing> Session::due_frames(std::span<const RequestPtr> requests,
                                                   TimePoint now) {
  std::vector<Outgoing> frames;
  for (const RequestPtr& request : requests) {
    Link& link = links_.at(request->server);
    if (request->done || link.state != LinkState::kOpen) continue;
    const bool sequenced = request->header.sequence != 0;
    const auto since = now - request->sent;
    const bool repeat =
        !sequenced && !link.connection->reliable() && since >= milliseconds(options_.resend_ms);
    if (request->must_send || repeat) {
      if (!request->has_kept) {
        request->error =
            Error(ErrorCode::kPeerLost, describe(link) + " closed the in-process link during a " +
                                            name_of(request->header.kind));
        finish(*request);
        continue;
      }
      if (!may_send_again(*request, link)) return {};
      frames.push_back({link.connection, wire::Frame{request->header, request->kept.share()}});
      ++stats_.resent;
    } else if (sequenced && (request->must_probe || since >= milliseconds(options_.probe_ms))) {
      wire::FrameHeader probe = request->header;
      probe.kind = wire::FrameKind::kProbe;
      probe.coded = false;
      frames.push_back({link.connection, wire::Frame{probe, Buffer()}});
    } else {
      continue;
    }
    request->must_send = request->must_probe = false;
    request->sent = now;
  }
  return frames;
}

bool Session::may_send_again(Request& request, Link& link) {
  const bool retry = request.sent_on != 0 && request.sent_on != link.opened;
  request.sent_on = link.opened;
  if (!retry || ++request.retries <= options_.rpc_retries) return true;
  lose(link, std::string("its connection broke ") + std::to_string(request.retries) +
                 " times before a " + name_of(request.header.kind) +
                 " was answered; CPUDIST_RPC_RETRIES is " + std::to_string(options_.rpc_retries));
  return false;
}

void Session::check_deadlines(std::span<const RequestPtr> requests, const Waiter& waiter,
                              TimePoint now) const {
  for (const RequestPtr& request : requests) {
    if (request->done) continue;
    const Link& link = links_.at(request->server);
    const std::string what = std::string(name_of(request->header.kind)) + " at " + describe(link);
    // A server that answers probes is at work; only silence about the request counts here.
    if (now - std::max(request->heard, waiter.started) > milliseconds(options_.rpc_deadline_ms)) {
      throw Error(ErrorCode::kTimeout, what + ": no answer within " +
                                           in_seconds(options_.rpc_deadline_ms) +
                                           " (CPUDIST_RPC_DEADLINE_MS)");
    }
    if (now - waiter.started > milliseconds(options_.round_deadline_ms)) {
      throw Error(ErrorCode::kTimeout,
                  straggler_text(requests, waiter, now) + "; the deadline is " +
                      in_seconds(options_.round_deadline_ms) + " (CPUDIST_ROUND_DEADLINE_MS)");
    }
  }
}

std::string Session::straggler_text(std::span<const RequestPtr> requests, const Waiter& waiter,
                                    TimePoint now) const {
  std::set<uint32_t> ranks;
  std::string servers;
  std::string what;
  for (const RequestPtr& request : requests) {
    if (request->done) continue;
    what = name_of(request->header.kind);
    servers += (servers.empty() ? "" : ", ") + describe(links_.at(request->server));
    ranks.insert(request->waiting_for.begin(), request->waiting_for.end());
  }
  const auto waited = std::chrono::duration_cast<milliseconds>(now - waiter.started);
  return what + ": waited " + in_seconds(static_cast<uint64_t>(waited.count()) / 1000 * 1000) +
         " for " + list_trainers(ranks) + " at " + servers;
}

}  // namespace cpudist::client
