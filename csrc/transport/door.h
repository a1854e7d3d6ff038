// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Who has connected and not said who they are: no more than so many, in total and from one
// address, and what is told of those that were refused. One door may have several listeners.
//
// Who holds places by saying nothing, or half of a word, keeps nobody out who says the first word
// at once, as all of ours do: for these there are places beside, half as many, of which the newest
// have theirs for sure.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/wait.h"

namespace cpudist::transport {

// Thread safety: all members.
class Door : public std::enable_shared_from_this<Door> {
 public:
  struct Limits {
    size_t total = 256;
    size_t per_address = 64;
    // How long those who say nothing have their place for sure.
    std::chrono::milliseconds silence{250};

    size_t spoken_total() const { return (total + 1) / 2; }
    size_t spoken_per_address() const { return (per_address + 1) / 2; }
  };
  struct Counts {
    uint64_t waiting = 0;      // connected, not let in yet
    uint64_t turned_away = 0;  // closed so that others have a place, or as there was none
    uint64_t refused = 0;      // came without the key, or with another
  };
  struct Refusal {
    std::string address;
    std::string reason;
  };
  struct Refusals {
    std::vector<Refusal> newest;
    uint64_t count = 0;  // with those that were not kept
  };

  // A place at the door, until it is given back by destroying this.
  class Guest {
   public:
    Guest(std::shared_ptr<Door> door, std::string address, uint64_t number)
        : door_(std::move(door)), address_(std::move(address)), number_(number) {}
    ~Guest() { door_->leave(address_, number_); }
    Guest(const Guest&) = delete;
    Guest& operator=(const Guest&) = delete;
    // What is called, from any thread, when somebody else needs the place: whoever has it gives it
    // back, or says that it has spoken.
    void when_asked(std::function<void()> call) {
      door_->set(address_, number_, std::move(call), false);
    }
    // From now on the place is kept for nothing that matters: it is asked for before others.
    void when_asked_at_the_end(std::function<void()> call) {
      door_->set(address_, number_, std::move(call), true);
    }
    // It keeps its place, until its deadline; but one of those for who came with a whole word.
    void spoke() { door_->note_speech(address_, number_); }
    // Whether it is asked whatever it has said.
    bool has_to_go() const { return door_->is_spoken(address_, number_); }

   private:
    const std::shared_ptr<Door> door_;
    const std::string address_;
    const uint64_t number_;
  };

  Door() : Door(affordable()) {}
  explicit Door(Limits limits) : limits_(limits) {}
  // As many as leave most of the file descriptors of this process to others.
  static Limits affordable();
  static Limits affordable(uint64_t descriptors);

  // Whether there is no place in total: then some are asked for theirs, and whoever listens accepts
  // nobody for a moment.
  bool full();
  // `address` without a port. Null where there are too many of it, or in total: somebody is asked
  // for a place, and the newcomer has to come again. `spoken`: its first frame is there, whole;
  // then it finds a place all the same, unless those that are asked for theirs do not leave.
  std::unique_ptr<Guest> arrive(const std::string& address, bool spoken = false);
  // Counted, and the newest ones kept to be told.
  void refuse(const std::string& address, const std::string& reason);
  Counts counts() const;
  // What was refused since the last call; waits for one until `deadline`, or until close().
  Refusals take_refusals(TimePoint deadline);
  void close();

  static constexpr size_t kKept = 64;

 private:
  struct Place {
    TimePoint since;
    std::function<void()> ask;
    bool spoke = false;
    bool ending = false;
    bool asked = false;
  };
  using Places = std::map<uint64_t, Place>;  // oldest first
  using Asks = std::vector<std::function<void()>>;
  struct Room {
    std::unordered_map<std::string, Places> places;  // by address
    size_t total = 0;

    size_t of(const std::string& address) const;
    void add(const std::string& address, uint64_t number);
  };

  void leave(const std::string& address, uint64_t number);
  void set(const std::string& address, uint64_t number, std::function<void()> call, bool ending);
  void note_speech(const std::string& address, uint64_t number);
  bool is_spoken(const std::string& address, uint64_t number) const;
  // With the lock:
  static Place* find(Room& room, const std::string& address, uint64_t number);
  Place* find(const std::string& address, uint64_t number);
  bool leave_room(Room& room, const std::string& address, uint64_t number);
  bool enter(const std::string& address, uint64_t number, Asks& asks);
  bool enter_spoken(const std::string& address, uint64_t number, Asks& asks);
  // `all`: whatever they have said.
  std::function<void()> ask_one(Places& places, bool all) const;
  Asks ask_in_crowd(Room& room, size_t count, bool all) const;

  const Limits limits_;
  std::atomic<uint64_t> next_{1};
  mutable std::mutex mutex_;
  ConditionVariable changed_;
  Room waiting_;
  Room spoken_;  // who came with a whole word, and found no place among the others
  uint64_t turned_away_ = 0;
  uint64_t refused_ = 0;
  uint64_t told_ = 0;  // of those refused
  std::deque<Refusal> refusals_;
  bool closed_ = false;
};

}  // namespace cpudist::transport
