// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/snapshot/markers.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "kernels/hash.h"

namespace cpudist::server {
namespace {

constexpr uint64_t kWaitMsMax = 24ull * 3600 * 1000;
constexpr uint64_t kMarkedBit = 1ull << 63;

}  // namespace

// ---- who takes part ----

// What pushed() wants is made here: an update that is applied finds its memory.
void Markers::add(uint32_t rank) {
  pushes_.try_emplace(rank);
  members_.insert(rank);
}

void Markers::join(uint32_t rank) { pushes_.try_emplace(rank); }

void Markers::pushed(uint32_t rank, uint32_t incarnation) {
  members_.insert(rank);
  Pushes& pushes = pushes_[rank];
  if (pushes.incarnation != incarnation) pushes = {incarnation, 0, false};
  ++pushes.count;
  pushes.since = true;
}

void Markers::take_out(uint32_t rank) {
  members_.erase(rank);
  tickets_.erase(rank);
  if (open() && opener_ == rank) deserted_ = true;
}

void Markers::drop(uint32_t rank) {
  take_out(rank);
  pushes_.erase(rank);
}

// ---- the cut ----

std::optional<std::string> Markers::refusal(const wire::Cut& cut) const {
  if (open() && cut.number != number_) {
    std::string open_cut = name_;
    if (open_cut.empty()) open_cut.append("number ").append(std::to_string(number_));
    return "the cut of " + open_cut + " is still open";
  }
  if (!open() && cut.number <= ended_) {
    return "cut " + std::to_string(cut.number) + " is over on this server";
  }
  if (base_ != 0 && cut.base != 0 && cut.base != base_) {
    return "cut " + std::to_string(cut.number) + " is to be of changes since cut " +
           std::to_string(base_) + " and since cut " + std::to_string(cut.base);
  }
  return std::nullopt;
}

void Markers::begin(uint32_t rank, const wire::Cut& cut, std::string name, TimePoint now) noexcept {
  if (!open()) {
    number_ = cut.number;
    deadline_ = now + std::chrono::milliseconds(std::min(cut.wait_ms, kWaitMsMax));
  }
  if (opener_ || name.empty()) return;
  opener_ = rank;
  name_ = std::move(name);
}

void Markers::announce(uint32_t rank, const wire::Cut& cut, TimePoint now) {
  begin(rank, cut, cut.name, now);
}

void Markers::mark(const Ticket& ticket, const wire::Cut& cut, TimePoint now) {
  std::string name = cut.name;
  tickets_.emplace(ticket.rank, ticket);
  begin(ticket.rank, cut, std::move(name), now);
  if (opener_ == ticket.rank) opener_marked_ = true;
  if (cut.base != 0) base_ = cut.base;
}

std::optional<Ticket> Markers::take_back(uint32_t rank, uint64_t number) {
  const auto found = tickets_.find(rank);
  if (found == tickets_.end() || number_ != number) return std::nullopt;
  Ticket ticket = found->second;
  tickets_.erase(found);
  if (opener_ == rank) opener_marked_ = false;
  taken_back_ = true;
  for (auto& [other, pushes] : pushes_) pushes.since = false;
  return ticket;
}

uint64_t Markers::wanted() const {
  if (!taken_back_) return number_;
  for (const uint32_t rank : members_) {
    if (!tickets_.contains(rank) && !pushes_.at(rank).since) return 0;
  }
  return number_;
}

std::vector<uint32_t> Markers::members() const { return {members_.begin(), members_.end()}; }

std::vector<uint32_t> Markers::marked() const {
  std::vector<uint32_t> ranks;
  for (const auto& [rank, ticket] : tickets_) ranks.push_back(rank);
  return ranks;
}

std::vector<uint32_t> Markers::missing() const {
  std::vector<uint32_t> ranks;
  for (const uint32_t rank : members_) {
    if (!tickets_.contains(rank)) ranks.push_back(rank);
  }
  return ranks;
}

bool Markers::complete() const {
  return open() && opener_marked_ && !deserted_ &&
         std::all_of(members_.begin(), members_.end(),
                     [this](uint32_t rank) { return tickets_.contains(rank); });
}

uint64_t Markers::digest() const {
  uint64_t sum = 0;
  for (const auto& [rank, pushes] : pushes_) {
    if (pushes.count == 0) continue;
    const uint64_t who = rank + (uint64_t{pushes.incarnation} << 32);
    sum += kernels::mix64(kernels::mix64(who) + pushes.count);
  }
  for (const auto& [rank, ticket] : tickets_) sum += kernels::mix64(rank + kMarkedBit);
  return sum;
}

Markers::Tickets Markers::end() {
  ended_ = std::max(ended_, number_);
  number_ = 0;
  name_.clear();
  base_ = 0;
  opener_.reset();
  opener_marked_ = false;
  taken_back_ = false;
  deserted_ = false;
  return std::exchange(tickets_, {});
}

}  // namespace cpudist::server
