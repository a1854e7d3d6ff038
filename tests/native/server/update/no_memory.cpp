// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// An update that is prepared wants no more memory, whoever pushes what: it is made as a whole.

#include <cmath>

#include "support/failing_new.h"
#include "support/snapshot_fixture.h"

namespace cpudist::testing {
namespace {

// Rows of both tables, new ones of the remote one too, some of them of several pushes.
server::Pushes pushes_of(const Rig& rig, uint32_t trainers, std::mt19937& random, double clip) {
  server::Pushes pushes;
  for (uint32_t rank = 0; rank < trainers; ++rank) {
    PushSpec spec;
    spec.configs = rig.layout.configs;
    spec.weight = rank + 1;
    spec.clip_norm = clip;
    for (const auto& block : rig.store.blocks) {
      spec.blocks[block->id()].resize(block->spec().elements, 0.5);
    }
    pushes.emplace(rank, drawn_push(rig, std::move(spec), random, 60));
  }
  return pushes;
}

void update_without_memory(uint32_t trainers, double clip) {
  wire::ParamSetLayout layout = snapshot_layout(2, 200, 5, 0.5);
  layout.tables[1].admission = {wire::AdmissionKind::kCount, 2, 1.0, 1024};
  Rig rig(layout);
  rig.store_values();
  std::mt19937 random(trainers);
  for (int turn = 0; turn < 4; ++turn) {
    server::Pushes pushes = pushes_of(rig, trainers, random, clip);
    rig.update.prepare(pushes);
    std::vector<double> norms(1);
    bool happened = false;
    {
      const FailingNew failing(0, int64_t{1} << 40);
      if (clip > 0) {
        rig.update.merge(pushes, norms);
        norms[0] = std::sqrt(norms[0]);
        rig.update.apply_merged(pushes, norms, rig.version.round);
      } else {
        rig.update.apply(pushes, rig.version.round);
      }
      happened = failing.happened();
    }
    CHECK(!happened);
    ++rig.version.round;
  }
  CHECK(rig.store.tables[1]->made_count() > 50);
}

}  // namespace

TEST(update_that_is_prepared_wants_no_memory) {
  for (const uint32_t trainers : {1u, 2u, 4u}) {
    for (const double clip : {0.0, 0.25}) update_without_memory(trainers, clip);
  }
}

}  // namespace cpudist::testing
