// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "transport/door.h"

#include <algorithm>
#include <utility>

#include "base/descriptor.h"

namespace cpudist::transport {
namespace {

constexpr size_t kAskedAtOnce = 16;
constexpr uint64_t kDescriptorsMax = 4096;

}  // namespace

Door::Limits Door::affordable() { return affordable(descriptors_max(kDescriptorsMax)); }

Door::Limits Door::affordable(uint64_t descriptors) {
  const uint64_t most = std::min(descriptors, kDescriptorsMax);
  Limits limits;
  limits.total = std::max<size_t>(static_cast<size_t>(most) / 4, 16);
  limits.per_address = std::max<size_t>(static_cast<size_t>(most) / 16, 8);
  return limits;
}

size_t Door::Room::of(const std::string& address) const {
  const auto from = places.find(address);
  return from == places.end() ? 0 : from->second.size();
}

void Door::Room::add(const std::string& address, uint64_t number) {
  places[address][number].since = Clock::now();
  ++total;
}

bool Door::full() {
  Asks asks;
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.total < limits_.total) return false;
    asks = ask_in_crowd(waiting_, kAskedAtOnce, false);
  }
  for (const auto& ask : asks) ask();
  return true;
}

std::unique_ptr<Door::Guest> Door::arrive(const std::string& address, bool spoken) {
  const uint64_t number = next_.fetch_add(1);
  auto guest = std::make_unique<Guest>(shared_from_this(), address, number);
  Asks asks;
  bool room = false;
  {
    const std::lock_guard lock(mutex_);
    room = enter(address, number, asks);
    if (!room && spoken) room = enter_spoken(address, number, asks);
    if (!room) ++turned_away_;
  }
  for (const auto& ask : asks) ask();
  return room ? std::move(guest) : nullptr;
}

bool Door::enter(const std::string& address, uint64_t number, Asks& asks) {
  const bool crowd = waiting_.of(address) >= limits_.per_address;
  if (!crowd && waiting_.total < limits_.total) {
    waiting_.add(address, number);
    return true;
  }
  if (!crowd) {
    asks = ask_in_crowd(waiting_, 1, false);
  } else if (auto ask = ask_one(waiting_.places.at(address), false)) {
    asks.push_back(std::move(ask));
  }
  return false;
}

// Whoever gives a place up for it needs a moment to leave; there are no more than as many again.
bool Door::enter_spoken(const std::string& address, uint64_t number, Asks& asks) {
  const size_t here = spoken_.of(address);
  const size_t most_here = limits_.spoken_per_address();
  const size_t most = limits_.spoken_total();
  if (here >= 2 * most_here || spoken_.total >= 2 * most) return false;
  std::function<void()> ask;
  if (here >= most_here) {
    ask = ask_one(spoken_.places.at(address), true);
  } else if (spoken_.total >= most) {
    Asks of_most = ask_in_crowd(spoken_, 1, true);
    if (!of_most.empty()) ask = std::move(of_most.front());
  }
  if (ask) asks.push_back(std::move(ask));
  spoken_.add(address, number);
  return true;
}

// Those that are only on their way out, then whoever has said nothing for longest. Of the others,
// who have begun to speak and have a deadline of their own, the oldest goes where `all` may.
std::function<void()> Door::ask_one(Places& places, bool all) const {
  const TimePoint now = Clock::now();
  Place* chosen = nullptr;
  for (auto& [number, place] : places) {
    if (place.asked || !place.ask) continue;
    const bool silent = !place.spoke && now - place.since >= limits_.silence;
    if (!place.ending && !silent && !all) continue;
    if (chosen == nullptr || place.ending) chosen = &place;
    if (place.ending) break;
  }
  if (chosen == nullptr) return nullptr;
  auto ask = chosen->ask;
  chosen->asked = true;
  return ask;
}

// As many, of the address with most first.
Door::Asks Door::ask_in_crowd(Room& room, size_t count, bool all) const {
  std::vector<Places*> crowds;
  for (auto& [address, places] : room.places) crowds.push_back(&places);
  std::sort(crowds.begin(), crowds.end(),
            [](const Places* a, const Places* b) { return a->size() > b->size(); });
  Asks asks;
  for (Places* places : crowds) {
    while (asks.size() < count) {
      auto ask = ask_one(*places, all);
      if (!ask) break;
      asks.push_back(std::move(ask));
    }
  }
  return asks;
}

Door::Place* Door::find(Room& room, const std::string& address, uint64_t number) {
  const auto from = room.places.find(address);
  if (from == room.places.end()) return nullptr;
  const auto place = from->second.find(number);
  return place == from->second.end() ? nullptr : &place->second;
}

Door::Place* Door::find(const std::string& address, uint64_t number) {
  Place* const place = find(waiting_, address, number);
  return place == nullptr ? find(spoken_, address, number) : place;
}

bool Door::leave_room(Room& room, const std::string& address, uint64_t number) {
  const Place* const place = find(room, address, number);
  if (place == nullptr) return false;
  if (place->asked && !place->ending) ++turned_away_;
  const auto from = room.places.find(address);
  from->second.erase(number);
  if (from->second.empty()) room.places.erase(from);
  --room.total;
  return true;
}

void Door::leave(const std::string& address, uint64_t number) {
  const std::lock_guard lock(mutex_);
  // In none there was no room for it.
  if (!leave_room(waiting_, address, number)) leave_room(spoken_, address, number);
}

bool Door::is_spoken(const std::string& address, uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto from = spoken_.places.find(address);
  return from != spoken_.places.end() && from->second.contains(number);
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
  Place* place = find(waiting_, address, number);
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
  return {waiting_.total + spoken_.total, turned_away_, refused_};
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
