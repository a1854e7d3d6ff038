// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "transport/door.h"

#include <sys/resource.h>

#include <algorithm>
#include <utility>

namespace cpudist::transport {
namespace {

constexpr size_t kAskedAtOnce = 16;
constexpr uint64_t kDescriptorsMax = 4096;

}  // namespace

Door::Limits Door::affordable() {
  rlimit files{};
  const bool known = getrlimit(RLIMIT_NOFILE, &files) == 0;
  return affordable(known ? files.rlim_cur : kDescriptorsMax);
}

Door::Limits Door::affordable(uint64_t descriptors) {
  const uint64_t most = std::min(descriptors, kDescriptorsMax);
  Limits limits;
  limits.total = std::max<size_t>(static_cast<size_t>(most) / 4, 16);
  limits.per_address = std::max<size_t>(static_cast<size_t>(most) / 16, 8);
  return limits;
}

bool Door::full() {
  std::vector<std::function<void()>> asks;
  {
    const std::lock_guard lock(mutex_);
    if (total_ < limits_.total) return false;
    asks = ask_in_crowd(kAskedAtOnce);
  }
  for (const auto& ask : asks) ask();
  return true;
}

std::unique_ptr<Door::Guest> Door::arrive(const std::string& address) {
  const uint64_t number = next_.fetch_add(1);
  auto guest = std::make_unique<Guest>(shared_from_this(), address, number);
  std::vector<std::function<void()>> asks;
  bool room = false;
  {
    const std::lock_guard lock(mutex_);
    const auto from = waiting_.find(address);
    const bool crowd = from != waiting_.end() && from->second.size() >= limits_.per_address;
    room = !crowd && total_ < limits_.total;
    if (room) {
      waiting_[address][number].since = Clock::now();
      ++total_;
    } else {
      ++turned_away_;
      if (!crowd) {
        asks = ask_in_crowd(1);
      } else if (auto ask = ask_one(from->second)) {
        asks.push_back(std::move(ask));
      }
    }
  }
  if (room) return guest;
  for (const auto& ask : asks) ask();
  return nullptr;
}

// Those that are only on their way out, then whoever has said nothing for longest. Nobody else: who
// has begun to speak has a deadline of its own.
std::function<void()> Door::ask_one(Places& places) const {
  const TimePoint now = Clock::now();
  Place* chosen = nullptr;
  for (auto& [number, place] : places) {
    if (place.asked || !place.ask) continue;
    const bool silent = !place.spoke && now - place.since >= limits_.silence;
    if (!place.ending && !silent) continue;
    if (chosen == nullptr || place.ending) chosen = &place;
    if (place.ending) break;
  }
  if (chosen == nullptr) return nullptr;
  auto ask = chosen->ask;
  chosen->asked = true;
  return ask;
}

// As many, of the address with most first.
std::vector<std::function<void()>> Door::ask_in_crowd(size_t count) {
  std::vector<Places*> crowds;
  for (auto& [address, places] : waiting_) crowds.push_back(&places);
  std::sort(crowds.begin(), crowds.end(),
            [](const Places* a, const Places* b) { return a->size() > b->size(); });
  std::vector<std::function<void()>> asks;
  for (Places* places : crowds) {
    while (asks.size() < count) {
      auto ask = ask_one(*places);
      if (!ask) break;
      asks.push_back(std::move(ask));
    }
  }
  return asks;
}

Door::Place* Door::find(const std::string& address, uint64_t number) {
  const auto from = waiting_.find(address);
  if (from == waiting_.end()) return nullptr;
  const auto place = from->second.find(number);
  return place == from->second.end() ? nullptr : &place->second;
}

void Door::leave(const std::string& address, uint64_t number) {
  const std::lock_guard lock(mutex_);
  const Place* place = find(address, number);
  if (place == nullptr) return;  // there was no room for it
  if (place->asked && !place->ending) ++turned_away_;
  const auto from = waiting_.find(address);
  from->second.erase(number);
  if (from->second.empty()) waiting_.erase(from);
  --total_;
}

void Door::set(const std::string& address, uint64_t number, std::function<void()> call,
               bool ending) {
  const std::lock_guard lock(mutex_);
  Place* place = find(address, number);
  if (place == nullptr) return;
  place->ask.swap(call);
  place->ending = ending;
  place->asked = false;
}

void Door::note_speech(const std::string& address, uint64_t number) {
  const std::lock_guard lock(mutex_);
  Place* place = find(address, number);
  if (place == nullptr) return;
  place->spoke = true;
  place->asked = false;
}

void Door::refuse(const std::string& address, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  ++refused_;
  changed_.notify_all();
  Refusal refusal{address, reason};  // last: there may be no memory for it
  if (refusals_.size() == kKept) refusals_.pop_front();
  refusals_.push_back(std::move(refusal));
}

Door::Counts Door::counts() const {
  const std::lock_guard lock(mutex_);
  return {total_, turned_away_, refused_};
}

Door::Refusals Door::take_refusals(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [this] { return closed_ || !refusals_.empty(); });
  Refusals taken;
  taken.newest.assign(refusals_.begin(), refusals_.end());
  taken.count = refused_ - std::exchange(told_, refused_);
  refusals_.clear();
  return taken;
}

void Door::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace cpudist::transport
