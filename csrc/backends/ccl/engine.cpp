// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The engine's thread: begins, asks, gives up.
#include "backends/ccl/engine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "backends/ccl/group.h"
#include "base/threads.h"

namespace cpudist::backends::ccl {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// For so long without an end of anything the thread asks without pause, giving its core to who
// wants it; afterwards it sleeps between its questions, because somebody is waited for.
constexpr milliseconds kEager{100};
constexpr microseconds kNap{100};
// How often deadlines and the processes of peers are looked at.
constexpr milliseconds kLook{100};
// A peer may end while what it sent is still to be read.
constexpr milliseconds kPatience{500};
constexpr milliseconds kPatienceOfPair{300};
// Longer than any step of oneCCL that does not ask the store.
constexpr milliseconds kStuck{10000};

std::string seconds_text(milliseconds time) {
  std::string text = std::to_string(static_cast<double>(time.count()) / 1000.0);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

Error ended_of(const Peer& peer) {
  return {ErrorCode::kPeerLost, "the process of rank " + std::to_string(peer.rank) + ", pid " +
                                    std::to_string(peer.pid) + ", has ended"};
}

Error closed() { return {ErrorCode::kClosed, "the group was closed: the process is ending"}; }

// As callers are told.
Error told(const Error& error) { return {error.code(), std::string("ccl: ") + error.what()}; }

}  // namespace

Engine::Engine(const cpudist_ccl_shim& calls)
    : calls_(calls), pid_(getpid()), progress_(Clock::now()), next_look_(progress_) {
  thread_ = start_io_thread("the thread of a group of backend ccl", [this] { run(); });
}

Engine::~Engine() { stop(); }

bool Engine::is_here() const { return getpid() == pid_; }

void Engine::push(Entry entry) {
  if (!is_here()) {
    throw Error(
        ErrorCode::kClosed,
        "ccl: this process was forked from the one that made the group; use the group there");
  }
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) throw told(closed());
    queue_.push_back(std::move(entry));
  }
  wake_.notify_one();
}

std::shared_ptr<Group> Engine::make(GroupOptions options) {
  const auto timeout = options.timeout;
  const auto deadline = Clock::now() + timeout;
  // The group, or why there is none: in words of its own, as copies of an Error share theirs.
  struct Made {
    bool done = false;
    std::shared_ptr<Group> group;
    ErrorCode code = ErrorCode::kInternal;
    std::string why;
  };
  auto made = std::make_shared<Made>();  // mutex_ guards it
  auto given = std::make_shared<GroupOptions>(std::move(options));
  const auto work = [this, made, given, deadline] {
    Made found{true, nullptr, ErrorCode::kInternal, {}};
    try {
      found.group = std::make_shared<Group>(calls(), std::move(*given), deadline);
    } catch (const Error& error) {
      found.code = error.code();
      found.why = error.what();
    } catch (const std::exception& error) {
      found.why = error.what();
    }
    const std::lock_guard lock(mutex_);
    *made = std::move(found);
    made_.notify_all();
  };
  push(Entry{std::nullopt, Job{work, true}});
  std::unique_lock lock(mutex_);
  if (!made_.wait_until(lock, deadline + kStuck, [&] { return made->done || ended_; })) {
    throw Error(ErrorCode::kTimeout,
                "ccl: making a group timed out after " + seconds_text(timeout) +
                    ": a member does not take part, or a collective before has not ended");
  }
  if (!made->done) throw told(closed());
  if (made->group == nullptr) throw Error(made->code, made->why);
  return made->group;
}

void Engine::submit(Operation operation) { push(Entry{std::move(operation), Job{}}); }

void Engine::later(std::function<void()> run) {
  if (!is_here()) return;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    queue_.push_back(Entry{std::nullopt, Job{std::move(run), false}});
  }
  wake_.notify_one();
}

void Engine::close(std::shared_ptr<Group> group) {
  later([this, group] { close_now(group); });
}

void Engine::fail_pairwise(std::shared_ptr<Group> group) {
  later([group] { group->fail_pairwise(); });
}

void Engine::give_up(std::shared_ptr<Group> group, int peer) {
  later([this, group, peer] {
    fail_pair(*group, peer,
              Error(ErrorCode::kPeerLost,
                    "the messages with rank " + std::to_string(peer) + " were given up"));
  });
}

void Engine::stop() {
  if (!is_here()) {
    // The thread is the parent's; what is left of it here cannot be joined.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) join_thread(thread_);
}

void Engine::run() {
  std::deque<Entry> taken;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (queue_.empty() && taken.empty() && flying_.empty()) {
      wake_.wait(lock);
      progress_ = Clock::now();
      continue;
    }
    std::move(queue_.begin(), queue_.end(), std::back_inserter(taken));
    queue_.clear();
    lock.unlock();
    const bool began = begin(taken);
    const bool ended = poll();
    if (began || ended) progress_ = Clock::now();
    if (!flying_.empty()) look_after_the_late();
    lock.lock();
    if (!ended && !flying_.empty()) pause(lock);
  }
  std::move(queue_.begin(), queue_.end(), std::back_inserter(taken));
  queue_.clear();
  ended_ = true;
  made_.notify_all();
  lock.unlock();
  while (!flying_.empty()) fail(*flying_.front().operation.group, closed());
  for (Entry& entry : taken) {
    if (entry.operation) entry.operation->finish(told(closed()));
  }
}

void Engine::pause(std::unique_lock<std::mutex>& lock) {
  if (Clock::now() - progress_ > kEager) {
    if (queue_.empty() && !stopping_) wake_.wait_for(lock, kNap);
    return;
  }
  lock.unlock();
  sched_yield();
  lock.lock();
}

bool Engine::begin(std::deque<Entry>& taken) {
  bool began = false;
  while (!taken.empty()) {
    Entry& next = taken.front();
    if (!next.operation && next.job.alone && !flying_.empty()) break;
    Entry entry = std::move(next);
    taken.pop_front();
    began = true;
    if (entry.operation) {
      start(std::move(*entry.operation));
    } else {
      entry.job.run();
    }
  }
  return began;
}

void Engine::start(Operation operation) {
  Group& group = *operation.group;
  if (const auto failure = group.failure_of(operation.peer)) {
    operation.finish(told(*failure));
    return;
  }
  void* event = operation.start(group.communicator());
  if (event == nullptr) {
    const Error failure = failed(operation);
    fail_of(group, operation.peer, failure);
    operation.finish(told(failure));
    return;
  }
  flying_.push_back(Flight{std::move(operation), event});
}

Error Engine::failed(const Operation& operation) const {
  return {ErrorCode::kPeerLost, operation.name + " failed: " + calls().error()};
}

bool Engine::poll() {
  std::vector<Flight> ended;
  Group* broken = nullptr;
  int peer = kNoPeer;
  std::optional<Error> failure;
  for (size_t i = 0; i < flying_.size() && broken == nullptr;) {
    const int done = calls().test(flying_[i].event);
    if (done == 0) {
      ++i;
    } else if (done > 0) {
      ended.push_back(std::move(flying_[i]));
      flying_.erase(flying_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      broken = flying_[i].operation.group.get();
      peer = flying_[i].operation.peer;
      failure = failed(flying_[i].operation);
    }
  }
  for (Flight& flight : ended) {
    calls().forget(flight.event);
    flight.operation.group->ended_since().erase(flight.operation.peer);
    flight.operation.finish(std::nullopt);
  }
  if (broken != nullptr) fail_of(*broken, peer, *failure);
  return !ended.empty() || broken != nullptr;
}

void Engine::look_after_the_late() {
  const auto now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + kLook;
  if (fail_late(now)) return;
  fail_pairs_without_process(now);
  if (now - progress_ < kPatience) return;
  for (const Flight& flight : flying_) {
    Group& group = *flight.operation.group;
    if (group.pairwise()) continue;
    const auto& peers = group.peers();
    const auto gone = std::find_if(peers.begin(), peers.end(), has_ended);
    if (gone == peers.end()) continue;
    fail(group, ended_of(*gone));
    return;
  }
}

bool Engine::fail_late(Clock::time_point now) {
  const auto late = std::find_if(flying_.begin(), flying_.end(), [now](const Flight& flight) {
    return now >= flight.operation.deadline;
  });
  if (late == flying_.end()) return false;
  const Operation& operation = late->operation;
  fail_of(*operation.group, operation.peer,
          Error(ErrorCode::kTimeout,
                operation.name + " timed out: a member of the group does not take part"));
  return true;
}

void Engine::fail_pairs_without_process(Clock::time_point now) {
  std::set<std::pair<std::shared_ptr<Group>, int>> pairs;
  for (const Flight& flight : flying_) {
    const auto& group = flight.operation.group;
    if (group->pairwise()) pairs.emplace(group, flight.operation.peer);
  }
  for (const auto& [group, rank] : pairs) {
    const auto& peers = group->peers();
    const auto peer = std::find_if(peers.begin(), peers.end(),
                                   [rank = rank](const Peer& one) { return one.rank == rank; });
    if (peer == peers.end() || !has_ended(*peer)) continue;
    const auto since = group->ended_since().emplace(rank, now).first->second;
    if (now - since >= kPatienceOfPair) fail_pair(*group, rank, ended_of(*peer));
  }
}

void Engine::fail_of(Group& group, int peer, const Error& failure) {
  if (!group.pairwise() || peer == kNoPeer) {
    fail(group, failure);
    return;
  }
  // oneCCL does not say whom an error is about: first those of whom more is known.
  for (const Peer& one : group.peers()) {
    if (has_ended(one)) fail_pair(group, one.rank, ended_of(one));
  }
  fail_pair(group, peer, failure);
}

void Engine::abandon(Flight flight, const Error& failure) {
  if (unusable_.empty() || unusable_.back() != flight.operation.group) {
    unusable_.push_back(flight.operation.group);
  }
  flight.operation.finish(told(failure));
  abandoned_.push_back(std::move(flight));
}

void Engine::fail(Group& group, const Error& failure) {
  std::vector<Flight> failed;
  std::vector<Flight> others;
  for (Flight& flight : flying_) {
    (flight.operation.group.get() == &group ? failed : others).push_back(std::move(flight));
  }
  flying_ = std::move(others);
  group.fail(failure);
  for (Flight& flight : failed) abandon(std::move(flight), failure);
}

void Engine::fail_pair(Group& group, int peer, const Error& failure) {
  std::vector<Flight> failed;
  std::vector<Flight> others;
  for (Flight& flight : flying_) {
    const Operation& one = flight.operation;
    const bool hit = one.group.get() == &group && one.peer == peer;
    (hit ? failed : others).push_back(std::move(flight));
  }
  flying_ = std::move(others);
  group.fail_pair(peer, failure);
  for (Flight& flight : failed) abandon(std::move(flight), failure);
}

void Engine::close_now(const std::shared_ptr<Group>& group) {
  const bool busy = std::any_of(flying_.begin(), flying_.end(), [&](const Flight& flight) {
    return flight.operation.group == group;
  });
  if (busy) fail(*group, Error(ErrorCode::kClosed, "the group was closed"));
  group->release(calls());
  // oneCCL may have kept the store of a communicator that is not destroyed.
  if (group->abandoned()) unusable_.push_back(group);
}

}  // namespace cpudist::backends::ccl
