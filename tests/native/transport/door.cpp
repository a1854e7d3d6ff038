// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Places at a door: how many there are, and who gives one up for whom.

#include "transport/door.h"

#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "support/check.h"

using namespace cpudist;  // NOLINT
using transport::Door;

namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

struct Crowd {
  explicit Crowd(Door::Limits limits) : door(std::make_shared<Door>(limits)) {}
  // Whether it has a place. Who is asked for its own gives it back.
  bool come(const std::string& address, bool spoken = false) {
    const size_t number = guests.size();
    auto guest = door->arrive(address, spoken);
    if (!guest) return false;
    guests.push_back(std::move(guest));
    guests.back()->when_asked([this, number] {
      asked.push_back(number);
      guests[number].reset();
    });
    return true;
  }

  std::shared_ptr<Door> door;
  std::vector<size_t> asked;
  std::vector<std::unique_ptr<Door::Guest>> guests;
};

}  // namespace

TEST(door_asks_the_oldest_of_one_address_who_have_said_nothing) {
  Crowd crowd({100, 3, milliseconds(0)});
  for (int i = 0; i < 3; ++i) CHECK(crowd.come("tcp:10.0.0.1"));
  CHECK(!crowd.come("tcp:10.0.0.1"));
  CHECK(crowd.come("tcp:10.0.0.1"));  // again
  CHECK(!crowd.come("tcp:10.0.0.1"));
  CHECK(crowd.come("tcp:10.0.0.2"));
  CHECK(crowd.asked == (std::vector<size_t>{0, 1}));
  CHECK_EQ(crowd.door->counts().waiting, 3u);
  CHECK_EQ(crowd.door->counts().turned_away, 4u);
}

TEST(door_asks_whose_address_has_most) {
  Crowd crowd({4, 4, milliseconds(0)});
  CHECK(crowd.come("tcp:10.0.0.1"));
  for (int i = 0; i < 3; ++i) CHECK(crowd.come("tcp:10.0.0.2"));
  CHECK(!crowd.come("tcp:10.0.0.3"));
  CHECK(crowd.asked == (std::vector<size_t>{1}));
  CHECK(crowd.come("tcp:10.0.0.3"));
  CHECK_EQ(crowd.door->counts().waiting, 4u);
  // Before somebody is accepted.
  CHECK(crowd.door->full());
  CHECK_EQ(crowd.asked.size(), 5u);
  CHECK_EQ(crowd.asked[1], 2u);
  CHECK_EQ(crowd.asked[2], 3u);
  CHECK(!crowd.door->full());
}

TEST(door_asks_nobody_who_is_new_or_has_begun_to_speak) {
  Crowd young({2, 2, hours(1)});
  for (int i = 0; i < 2; ++i) CHECK(young.come("tcp:10.0.0.1"));
  CHECK(!young.come("tcp:10.0.0.1"));
  CHECK(!young.come("tcp:10.0.0.2"));
  CHECK(young.door->full());
  CHECK(young.asked.empty());
  CHECK_EQ(young.door->counts().waiting, 2u);
  Crowd speaking({3, 3, milliseconds(0)});
  for (int i = 0; i < 3; ++i) CHECK(speaking.come("tcp:10.0.0.1"));
  speaking.guests[0]->spoke();
  speaking.guests[1]->spoke();
  CHECK(!speaking.come("tcp:10.0.0.1"));
  CHECK(speaking.asked == (std::vector<size_t>{2}));
  CHECK(speaking.come("tcp:10.0.0.2"));
  speaking.guests[3]->spoke();
  CHECK(speaking.door->full());
  CHECK(speaking.asked == (std::vector<size_t>{2}));
  // Those on their way out keep nobody from coming.
  bool asked = false;
  speaking.guests[1]->when_asked_at_the_end([&] { asked = true; });
  CHECK(speaking.door->full());
  CHECK(asked);
}

TEST(door_asks_each_once_and_who_speaks_then_stays) {
  const auto door = std::make_shared<Door>(Door::Limits{1, 1, milliseconds(0)});
  const auto guest = door->arrive("tcp:10.0.0.1");
  int asked = 0;
  guest->when_asked([&] { ++asked; });
  CHECK(door->full() && door->full());
  CHECK_EQ(asked, 1);
  guest->spoke();
  CHECK(door->full());
  CHECK_EQ(asked, 1);
  CHECK_EQ(door->counts().turned_away, 0u);
}

// However long others may keep theirs: the newest of those who come with a whole word have a place.
TEST(door_has_places_for_who_comes_with_a_whole_word) {
  Crowd crowd({100, 4, hours(1)});
  const std::string here = "tcp:10.0.0.1";
  for (int i = 0; i < 4; ++i) {
    CHECK(crowd.come(here));
    crowd.guests.back()->spoke();
  }
  CHECK(!crowd.come(here));
  for (int i = 0; i < 2; ++i) CHECK(crowd.come(here, true));
  CHECK(crowd.asked.empty());
  for (size_t i = 0; i < 20; ++i) {
    CHECK(crowd.come(here, true));
    CHECK(crowd.guests.back()->has_to_go());
    crowd.guests.back()->spoke();
    CHECK_EQ(crowd.asked.size(), i + 1);
    CHECK_EQ(crowd.asked.back(), 4 + i);
    CHECK_EQ(crowd.door->counts().waiting, 6u);
  }
  CHECK(!crowd.guests[0]->has_to_go());
  crowd.guests[0].reset();
  CHECK(crowd.come(here, true));  // like any other, while there is room
  CHECK(!crowd.guests.back()->has_to_go());
}

// Of many addresses, too: then the one with most gives one up.
TEST(door_has_places_in_total_for_who_comes_with_a_whole_word) {
  Crowd crowd({4, 4, hours(1)});
  for (int i = 0; i < 4; ++i) CHECK(crowd.come("tcp:10.0.0.1"));
  CHECK(crowd.come("tcp:10.0.0.2", true));
  CHECK(crowd.come("tcp:10.0.0.2", true));
  CHECK(crowd.door->full());
  CHECK(!crowd.come("tcp:10.0.0.3"));
  CHECK(crowd.come("tcp:10.0.0.3", true));
  CHECK(crowd.asked == (std::vector<size_t>{4}));
  CHECK_EQ(crowd.door->counts().waiting, 6u);
}

TEST(door_has_no_more_places_where_those_asked_do_not_leave) {
  const auto door = std::make_shared<Door>(Door::Limits{4, 4, hours(1)});
  std::vector<std::unique_ptr<Door::Guest>> guests;
  size_t asked = 0;
  for (int i = 0; i < 100; ++i) {
    auto guest = door->arrive("tcp:10.0.0.1", true);
    if (!guest) continue;
    guest->when_asked([&] { ++asked; });
    guests.push_back(std::move(guest));
  }
  CHECK_EQ(guests.size(), 8u);  // 4, and twice 2
  CHECK_EQ(asked, 2u);
  CHECK_EQ(door->counts().turned_away, 92u);
}

TEST(door_places_are_given_back) {
  Crowd crowd({2, 2, milliseconds(0)});
  for (int i = 0; i < 100; ++i) {
    CHECK(crowd.come("tcp:10.0.0.1"));
    crowd.guests.back().reset();
  }
  CHECK(crowd.asked.empty());
  CHECK_EQ(crowd.door->counts().waiting, 0u);
  CHECK_EQ(crowd.door->counts().turned_away, 0u);
}

// Whom nobody can ask has its place all the same.
TEST(door_keeps_whose_call_fails) {
  const auto door = std::make_shared<Door>(Door::Limits{1, 1, milliseconds(0)});
  auto guest = door->arrive("tcp:10.0.0.1");
  guest->when_asked([] { throw std::bad_alloc(); });
  CHECK_THROWS(door->full(), std::bad_alloc);
  CHECK_EQ(door->counts().waiting, 1u);
  guest.reset();
  CHECK_EQ(door->counts().waiting, 0u);
  CHECK(!door->full());
}

TEST(door_keeps_the_newest_refusals_and_counts_all) {
  Door door({1, 1});
  for (size_t i = 0; i < Door::kKept + 10; ++i) door.refuse("tcp:10.0.0.1:5", std::to_string(i));
  const auto found = door.take_refusals(Clock::now());
  CHECK_EQ(found.newest.size(), Door::kKept);
  CHECK_EQ(found.count, Door::kKept + 10);
  CHECK_EQ(found.newest.front().reason, std::string("10"));
  CHECK_EQ(door.counts().refused, Door::kKept + 10);
  CHECK(door.take_refusals(Clock::now()).newest.empty());
  door.close();
  const auto none = door.take_refusals(Clock::now() + hours(1));
  CHECK(none.newest.empty());
  CHECK_EQ(none.count, 0u);
}

TEST(door_leaves_most_descriptors_to_others) {
  const Door::Limits limits = Door::affordable();
  CHECK(limits.per_address >= 8 && limits.per_address <= 256);
  CHECK(limits.total >= limits.per_address && limits.total <= 1024);
}

// Where there are few, one address has half of the places.
TEST(door_has_places_where_descriptors_are_few) {
  const Door::Limits few = Door::affordable(64);
  CHECK_EQ(few.total, 16u);
  CHECK_EQ(few.per_address, 8u);
  const Door::Limits usual = Door::affordable(1024);
  CHECK_EQ(usual.total, 256u);
  CHECK_EQ(usual.per_address, 64u);
  CHECK_EQ(Door::affordable(1u << 20).total, 1024u);
}
