// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "table/admission/rule.h"

#include <algorithm>

namespace cpudist::table {
namespace {

bool is_all(const wire::Admission& rule) {
  switch (rule.kind) {
    case wire::AdmissionKind::kAll:
      return true;
    case wire::AdmissionKind::kCount:
      return rule.count <= 1;
    case wire::AdmissionKind::kProbability:
      return rule.probability >= 1;
  }
  return true;
}

}  // namespace

AdmissionRule::AdmissionRule(const wire::TableSpec& table)
    : rule_(table.admission),
      all_(is_all(rule_)),
      forgets_(table.eviction.on),
      salt_(kernels::table_salt(table.name)),
      seed_(table.seed) {}

void AdmissionRule::begin() {
  if (counts() && !sketch_) sketch_.emplace(rule_.sketch_bytes);
}

uint32_t AdmissionRule::pushes_until(int64_t key) const {
  if (all_) return 1;
  if (rule_.kind == wire::AdmissionKind::kProbability) {
    const uint64_t drawn = kernels::mix64((kernels::hash_of(key, salt_) ^ seed_) + kChance);
    return static_cast<double>(drawn >> 11) * 0x1p-53 < rule_.probability ? 1 : kNever;
  }
  return rule_.count - std::min(sketch_->count(hash_of(key)), rule_.count - 1);
}

void AdmissionRule::note_dropped(int64_t key, uint32_t pushes) noexcept {
  dropped_ += pushes;
  if (sketch_) sketch_->add(hash_of(key), pushes);
}

void AdmissionRule::note_made(int64_t key, uint32_t dropped) noexcept {
  dropped_ += dropped;
  if (sketch_ && forgets_) sketch_->forget(hash_of(key));
}

void AdmissionRule::forget_all() noexcept {
  if (sketch_) sketch_->clear();
}

}  // namespace cpudist::table
