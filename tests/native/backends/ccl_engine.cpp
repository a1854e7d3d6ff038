// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The engine of the oneCCL backend over an imitation of oneCCL: order, deadlines, lost peers, ends.
#include "backends/ccl/engine.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <map>
#include <stdexcept>
#include <string>

#include "support/check.h"

namespace {

using cpudist::Clock;
using namespace cpudist::backends::ccl;
using cpudist::Error;
using cpudist::ErrorCode;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kLong{30};

// The error of an operation; nothing if it went well.
using End = std::optional<Error>;

// What an operation of the imitation is: somebody says when it is done.
struct Event {
  std::atomic<int> state{0};
  std::atomic<bool> forgotten{false};
};

struct Counts {
  std::atomic<int> made{0};
  std::atomic<int> freed{0};
  // Operations that had ended when the last communicator was made.
  std::atomic<int> ended{0};
  std::atomic<int> ended_at_make{-1};
};

Counts& counts() {
  static Counts all;
  return all;
}

const cpudist_ccl_shim& imitation() {
  static const cpudist_ccl_shim calls = [] {
    cpudist_ccl_shim made{};
    made.version = CPUDIST_CCL_SHIM_VERSION;
    made.error = [] { return "imitated trouble"; };
    made.make = [](int size, int, int, const cpudist_ccl_store* store) -> void* {
      counts().ended_at_make = counts().ended.load();
      // As oneCCL does, ask for what the others have written.
      while (size > 1) {
        bool found = false;
        auto emit = [](void* sink, const char*, size_t) { *static_cast<bool*>(sink) = true; };
        if (store->get(store->context, "other", &found, emit) != 0) return nullptr;
        if (found) break;
      }
      ++counts().made;
      return &counts();
    };
    made.free = [](void*) { ++counts().freed; };
    made.test = [](void* event) { return static_cast<Event*>(event)->state.load(); };
    made.forget = [](void* event) { static_cast<Event*>(event)->forgotten = true; };
    return made;
  }();
  return calls;
}

class Keys final : public MemberStore {
 public:
  std::optional<std::string> get(const std::string& key) override {
    const auto found = values.find(key);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  }
  void set(const std::string& key, const std::string& value) override { values[key] = value; }

  std::map<std::string, std::string> values;
};

class LostStore final : public MemberStore {
 public:
  std::optional<std::string> get(const std::string&) override {
    throw std::runtime_error("the store is gone");
  }
  void set(const std::string&, const std::string&) override {}
};

GroupOptions options(int size = 1, milliseconds timeout = kLong) {
  GroupOptions made;
  made.size = size;
  made.timeout = timeout;
  made.store = std::make_unique<Keys>();
  return made;
}

pid_t ended_process() {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  CHECK_EQ(waitpid(child, nullptr, 0), child);
  return child;
}

// Of a group whose rank 3 is that process.
GroupOptions options_with_peer(pid_t process) {
  GroupOptions made = options();
  made.peers.push_back(Peer{3, process, 1});
  return made;
}

// Submits an operation; the future tells how it ended.
std::future<End> submit(Engine& engine, const std::shared_ptr<Group>& group, Event* event,
                        milliseconds within = kLong, int peer = kNoPeer) {
  auto end = std::make_shared<std::promise<End>>();
  Operation operation;
  operation.group = group;
  operation.name = "all_reduce";
  operation.start = [event](void*) -> void* { return event; };
  operation.finish = [end](std::optional<Error> error) {
    ++counts().ended;
    end->set_value(std::move(error));
  };
  operation.deadline = Clock::now() + within;
  operation.peer = peer;
  engine.submit(std::move(operation));
  return end->get_future();
}

End result(std::future<End>& end) {
  CHECK(end.wait_for(kLong) == std::future_status::ready);
  return end.get();
}

bool has(const End& end, ErrorCode code, const std::string& part) {
  return end && end->code() == code && std::string(end->what()).find(part) != std::string::npos;
}

template <typename Call>
End error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

TEST(ccl_operations_end_when_they_are_done) {
  Engine engine(imitation());
  const auto group = engine.make(options());
  Event events[3];
  std::future<End> ends[3];
  for (int i = 0; i < 3; ++i) ends[i] = submit(engine, group, &events[i]);
  for (const int i : {1, 2, 0}) {
    CHECK(ends[i].wait_for(seconds(0)) != std::future_status::ready);
    events[i].state = 1;
    CHECK(!result(ends[i]));
    CHECK(events[i].forgotten);
  }
  const int freed = counts().freed;
  engine.close(group);
  const auto after = engine.make(options());  // made after the other one was closed
  CHECK_EQ(counts().freed.load(), freed + 1);
}

TEST(ccl_a_late_operation_ends_its_group_alone) {
  Engine engine(imitation());
  const auto late = engine.make(options());
  const auto other = engine.make(options());
  Event never;
  Event waiting;
  Event done;
  auto first = submit(engine, late, &never, milliseconds(30));
  auto second = submit(engine, late, &waiting);
  CHECK(has(result(first), ErrorCode::kTimeout, "all_reduce timed out"));
  CHECK(has(result(second), ErrorCode::kTimeout, "timed out"));
  auto third = submit(engine, late, &done);
  CHECK(has(result(third), ErrorCode::kTimeout,
            "cannot be used any more, because all_reduce timed out"));
  done.state = 1;
  auto fourth = submit(engine, other, &done);
  CHECK(!result(fourth));
  CHECK(!never.forgotten);
  const int freed = counts().freed;
  engine.close(late);
  engine.make(options());
  CHECK_EQ(counts().freed.load(), freed);  // oneCCL would wait for the others
}

TEST(ccl_what_does_not_begin_or_breaks_is_told) {
  Engine engine(imitation());
  const auto group = engine.make(options());
  auto begun = submit(engine, group, nullptr);
  CHECK(has(result(begun), ErrorCode::kPeerLost, "all_reduce failed: imitated trouble"));
  const auto next = engine.make(options());
  Event event;
  event.state = -1;
  auto broken = submit(engine, next, &event);
  CHECK(has(result(broken), ErrorCode::kPeerLost, "all_reduce failed: imitated trouble"));
}

TEST(ccl_the_end_of_a_peer_is_noticed) {
  const pid_t child = ended_process();  // before there are threads
  Engine engine(imitation());
  const auto group = engine.make(options_with_peer(child));
  Event never;
  auto end = submit(engine, group, &never);
  CHECK(has(result(end), ErrorCode::kPeerLost,
            "the process of rank 3, pid " + std::to_string(child) + ", has ended"));
}

TEST(ccl_pairs_fail_alone_where_that_is_asked_for) {
  const pid_t child = ended_process();  // before there are threads
  Engine engine(imitation());
  const auto group = engine.make(options_with_peer(child));
  engine.fail_pairwise(group);
  Event never[3];
  Event other;
  auto lost = submit(engine, group, &never[0], kLong, 3);
  auto given_up = submit(engine, group, &never[1], kLong, 2);
  auto late = submit(engine, group, &never[2], milliseconds(30), 4);
  auto kept = submit(engine, group, &other, kLong, 1);
  CHECK(has(result(late), ErrorCode::kTimeout, "timed out"));
  CHECK(has(result(lost), ErrorCode::kPeerLost,
            "the process of rank 3, pid " + std::to_string(child) + ", has ended"));
  engine.give_up(group, 2);
  CHECK(has(result(given_up), ErrorCode::kPeerLost, "with rank 2 were given up"));
  CHECK(kept.wait_for(seconds(0)) != std::future_status::ready);
  other.state = 1;
  CHECK(!result(kept));
  Event next;
  next.state = 1;
  auto again = submit(engine, group, &next, kLong, 1);
  CHECK(!result(again));
  auto refused = submit(engine, group, &next, kLong, 3);
  CHECK(has(result(refused), ErrorCode::kPeerLost, "the process of rank 3"));
  const int freed = counts().freed;
  engine.close(group);
  engine.make(options());
  CHECK_EQ(counts().freed.load(), freed);  // oneCCL may still wait for those who are lost
}

TEST(ccl_pairs_of_a_process_that_has_ended_fail_after_a_while) {
  const pid_t child = ended_process();  // before there are threads
  Engine engine(imitation());
  const auto group = engine.make(options_with_peer(child));
  engine.fail_pairwise(group);
  Event never;
  Event other;
  const auto begun = Clock::now();
  auto lost = submit(engine, group, &never, kLong, 3);
  auto kept = submit(engine, group, &other, kLong, 1);
  CHECK(has(result(lost), ErrorCode::kPeerLost,
            "the process of rank 3, pid " + std::to_string(child)));
  // What it sent before its end may still arrive meanwhile.
  CHECK(Clock::now() - begun >= milliseconds(300));
  CHECK(kept.wait_for(seconds(0)) != std::future_status::ready);
  other.state = 1;
  CHECK(!result(kept));
}

TEST(ccl_an_error_that_names_nobody_is_laid_on_who_has_ended_first) {
  const pid_t child = ended_process();  // before there are threads
  Engine engine(imitation());
  const auto group = engine.make(options_with_peer(child));
  engine.fail_pairwise(group);
  Event never;
  Event broken;
  auto lost = submit(engine, group, &never, kLong, 3);
  auto failed = submit(engine, group, &broken, kLong, 1);
  broken.state = -1;
  CHECK(has(result(failed), ErrorCode::kPeerLost, "imitated trouble"));
  CHECK(lost.wait_for(seconds(0)) == std::future_status::ready);
  CHECK(has(result(lost), ErrorCode::kPeerLost, "the process of rank 3"));
}

TEST(ccl_a_process_of_another_start_is_another_process) { CHECK(has_ended(Peer{0, getpid(), 1})); }

TEST(ccl_a_group_is_made_after_what_is_in_flight) {
  Engine engine(imitation());
  const auto group = engine.make(options());
  Event event;
  const int before = counts().ended;
  auto end = submit(engine, group, &event);
  auto made = std::async(std::launch::async, [&] { return engine.make(options()); });
  CHECK(made.wait_for(milliseconds(20)) != std::future_status::ready);
  event.state = 1;
  CHECK(made.wait_for(kLong) == std::future_status::ready);
  CHECK(made.get() != nullptr);
  CHECK_EQ(counts().ended_at_make.load(), before + 1);
  CHECK(!result(end));
}

TEST(ccl_members_that_do_not_come_are_waited_for_no_longer_than_asked) {
  Engine engine(imitation());
  CHECK(has(error_of([&] { engine.make(options(2, milliseconds(50))); }), ErrorCode::kTimeout,
            "timed out: not all members came"));
  GroupOptions lost = options(2);
  lost.store = std::make_unique<LostStore>();
  CHECK(has(error_of([&] { engine.make(std::move(lost)); }), ErrorCode::kPeerLost,
            "(the store is gone)"));
  GroupOptions complete = options(2);
  complete.store->set("other", "here");
  CHECK(engine.make(std::move(complete)) != nullptr);
}

TEST(ccl_the_end_fails_what_is_in_flight) {
  Engine engine(imitation());
  const auto group = engine.make(options());
  Event never;
  auto end = submit(engine, group, &never);
  engine.stop();
  CHECK(has(result(end), ErrorCode::kClosed, "the process is ending"));
  CHECK(has(error_of([&] { submit(engine, group, &never); }), ErrorCode::kClosed,
            "the process is ending"));
  CHECK(
      has(error_of([&] { engine.make(options()); }), ErrorCode::kClosed, "the process is ending"));
  engine.close(group);
  engine.stop();
}

TEST(ccl_the_end_fails_a_group_that_was_to_be_made) {
  Engine engine(imitation());
  const auto group = engine.make(options());
  Event never;
  auto end = submit(engine, group, &never);
  auto failed =
      std::async(std::launch::async, [&] { return error_of([&] { engine.make(options()); }); });
  CHECK(failed.wait_for(milliseconds(20)) != std::future_status::ready);
  engine.stop();
  CHECK(failed.wait_for(kLong) == std::future_status::ready);
  CHECK(has(failed.get(), ErrorCode::kClosed, "the process is ending"));
}

TEST(ccl_closing_a_group_fails_what_it_has_in_flight) {
  Engine engine(imitation());
  const auto group = engine.make(options());
  Event never;
  auto end = submit(engine, group, &never);
  engine.close(group);
  CHECK(has(result(end), ErrorCode::kClosed, "the group was closed"));
}

}  // namespace
