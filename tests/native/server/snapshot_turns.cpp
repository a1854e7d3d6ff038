// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Snapshots of several parameter sets on one server: each is of its own moment, and they are
// written one after the other.

#include "support/snapshot_fixture.h"

namespace cpudist::testing {
namespace {

// Two sets of one server, as of two models that train each other, whose rows are all changed by
// push().
struct Two {
  std::shared_ptr<MemoryFiles> files = std::make_shared<MemoryFiles>();
  server::SnapshotOptions options = writer_options(files);
  Rig first{snapshot_layout(2, 400, 8, 0.5)};
  Rig second{snapshot_layout(2, 300, 8, 0.5)};

  Two() {
    std::mt19937 random(3);
    for (Rig* const rig : {&first, &second}) {
      rig->store_values();
      rig->push_some(random, 10);
    }
  }
  static void push(Rig& rig) { rig.push({rig.own_keys(0), rig.own_keys(1)}); }
  void check(const Rig& rig, const Rig::Cut& cut, const wire::CutStatus& status,
             const std::string& name) const {
    CHECK_EQ(status.reason, "");
    CHECK_EQ(status.state, wire::CutState::kDone);
    check_snapshot(rig, cut, status, files->contents(), "/snaps/" + name);
  }
};

template <typename Begin>
std::string refusal_of(const Begin& begin) {
  try {
    begin();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST(snapshot_of_a_set_waits_while_another_set_is_written) {
  Two sets;
  server::SnapshotWriter writer(sets.options);
  Gate gate(*sets.files);
  const Rig::Cut first = sets.first.begin(writer, 5, "snap-5");
  gate.wait_reached();
  Two::push(sets.second);  // before its cut
  const Rig::Cut second = sets.second.begin(writer, 5, "snap-5-s1", 1);
  CHECK_EQ(writer.status(0, 5, "").state, wire::CutState::kWriting);
  CHECK_EQ(writer.status(1, 5, "").state, wire::CutState::kWriting);
  // A set has one at a time, also where that waits.
  CHECK_EQ(refusal_of([&] { sets.first.begin(writer, 6, "snap-6"); }),
           "snapshot snap-5 is still being written");
  CHECK_EQ(refusal_of([&] { sets.second.begin(writer, 6, "snap-6-s1", 1); }),
           "snapshot snap-5-s1 is still being written");
  for (int i = 0; i < 2; ++i) {
    Two::push(sets.first);
    Two::push(sets.second);
  }
  gate.open();
  sets.check(sets.first, first, status_at_end(writer, 5), "snap-5");
  sets.check(sets.second, second, status_at_end(writer, 5, 1), "snap-5-s1");
  CHECK_EQ(writer.image_bytes(), 0u);
  sets.files->watch(nullptr);
  const Rig::Cut third = sets.second.begin(writer, 6, "snap-6-s1", 1);
  sets.check(sets.second, third, status_at_end(writer, 6, 1), "snap-6-s1");
}

TEST(snapshot_that_waits_is_given_up_at_once_and_may_be_begun_anew) {
  Two sets;
  sets.options.cap = std::make_shared<MemoryCap>(uint64_t{64} << 20);
  server::SnapshotWriter writer(sets.options);
  Gate gate(*sets.files);
  const Rig::Cut first = sets.first.begin(writer, 1, "snap-1");
  gate.wait_reached();
  Two::push(sets.first);
  const uint64_t images = writer.image_bytes();
  const uint64_t lent = sets.options.cap->lent_bytes();
  sets.second.begin(writer, 1, "snap-1-s1", 1);
  Two::push(sets.second);
  CHECK(writer.image_bytes() > images);
  writer.abandon(1, 1);
  CHECK_EQ(writer.status(1, 1, "").state, wire::CutState::kUnknown);
  CHECK_EQ(writer.image_bytes(), images);
  CHECK_EQ(sets.options.cap->lent_bytes(), lent);
  const Rig::Cut second = sets.second.begin(writer, 2, "snap-2-s1", 1);
  gate.open();
  sets.check(sets.first, first, status_at_end(writer, 1), "snap-1");
  sets.check(sets.second, second, status_at_end(writer, 2, 1), "snap-2-s1");
  CHECK(!sets.files->has_directory("/snaps/snap-1-s1"));
  CHECK_EQ(sets.options.cap->lent_bytes(), 0u);
}

// What writes them is there once; what each keeps is there for each.
TEST(snapshot_that_waits_takes_its_images_and_no_buffers) {
  Two sets;
  sets.options.cap = std::make_shared<MemoryCap>(uint64_t{64} << 20);
  server::SnapshotWriter writer(sets.options);
  Gate gate(*sets.files);
  sets.first.begin(writer, 1, "snap-1");
  gate.wait_reached();
  const uint64_t lent = sets.options.cap->lent_bytes();
  CHECK(lent > 400 * (16 + 3 * 8 * 4));
  sets.second.begin(writer, 1, "snap-1-s1", 1);
  CHECK(sets.options.cap->lent_bytes() > lent);
  CHECK(sets.options.cap->lent_bytes() < lent + 300 * (16 + 3 * 8 * 4));
  Two::push(sets.second);
  CHECK(sets.options.cap->lent_bytes() > lent + 300 * (16 + 3 * 8 * 4));
  writer.give_up_for_memory();
  gate.open();
  for (const uint32_t set : {0u, 1u}) {
    CHECK(contains(status_at_end(writer, 1, set).reason, "memory_cap_bytes = 67108864"));
  }
  CHECK_EQ(sets.options.cap->lent_bytes(), 0u);
}

TEST(snapshot_that_waits_fails_alone) {
  Two sets;
  server::SnapshotWriter writer(sets.options);
  Gate gate(*sets.files);
  const Rig::Cut first = sets.first.begin(writer, 1, "snap-1");
  gate.wait_reached();
  sets.second.begin(writer, 1, "snap-1-s1", 1);
  {
    const std::unique_lock lock(sets.second.mutex);
    sets.second.store.tables[0]->clear();
  }
  Two::push(sets.first);
  gate.open();
  sets.check(sets.first, first, status_at_end(writer, 1), "snap-1");
  CHECK(contains(status_at_end(writer, 1, 1).reason, "rows were dropped"));
  CHECK(!sets.files->has_directory("/snaps/snap-1-s1"));
}

TEST(snapshot_that_waits_ends_with_its_set_and_with_the_server) {
  Two sets;
  Gate gate(*sets.files);
  Rig third(snapshot_layout(1, 20, 2));
  third.store_values();
  {
    server::SnapshotWriter writer(sets.options);
    const Rig::Cut first = sets.first.begin(writer, 1, "snap-1");
    gate.wait_reached();
    {
      Rig gone(snapshot_layout(1, 20, 2));
      gone.store_values();
      gone.begin(writer, 1, "snap-1-s1", 1);
      writer.forget(1);
    }
    gate.open();
    CHECK(contains(status_at_end(writer, 1, 1).reason, "closed before its rows were written"));
    sets.check(sets.first, first, status_at_end(writer, 1), "snap-1");
    for (uint32_t set = 0; set < 3; ++set) {
      Rig& rig = set == 0 ? sets.first : set == 1 ? sets.second : third;
      rig.begin(writer, 2, "snap-2-s" + std::to_string(set), set);
    }
  }
  Two::push(sets.second);  // nothing is kept any more
}

}  // namespace cpudist::testing
