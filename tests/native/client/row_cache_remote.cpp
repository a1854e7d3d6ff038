// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The cache of a remote table answers as that of a static one does, whatever happens to both, and
// its memory is that of a step.

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "base/errors.h"
#include "client/row_cache.h"
#include "kernels/hash.h"
#include "support/check.h"
#include "support/failing_new.h"

namespace remote_cache_test {

using namespace cpudist;  // NOLINT: a test of this namespace
using client::TableCache;

constexpr uint32_t kDim = 3;
constexpr uint64_t kFew = 40;

const std::vector<uint16_t>& owners() {
  static const std::vector<uint16_t> all(cpudist::kernels::kBucketCount, 0);
  return all;
}

wire::TableSpec spec_of(bool remote, uint64_t rows) {
  wire::TableSpec spec{"words", rows, kDim, 0};
  spec.remote = remote;
  return spec;
}

std::vector<int64_t> missing(TableCache& cache, std::span<const int64_t> ids) {
  const auto found = cache.take_missing(ids);
  return {found.begin(), found.end()};
}

// What a server would send: another value at each call.
std::vector<float> rows_of(std::span<const int64_t> keys, float time) {
  std::vector<float> rows;
  for (const int64_t key : keys) {
    for (uint32_t d = 0; d < kDim; ++d) {
      rows.push_back(time + static_cast<float>(key) + 0.25f * static_cast<float>(d));
    }
  }
  return rows;
}

// Looks up as a pull does; the rows in the order of the ids.
std::vector<float> look_up(TableCache& cache, std::span<const int64_t> ids, float time,
                           std::vector<int64_t>* asked) {
  *asked = missing(cache, ids);
  std::vector<uint32_t> backwards(asked->size());
  std::vector<int64_t> keys;
  for (uint32_t i = 0; i < backwards.size(); ++i) {
    backwards[i] = static_cast<uint32_t>(backwards.size()) - 1 - i;
    keys.push_back((*asked)[backwards[i]]);
  }
  cache.take_in(0, keys, backwards, rows_of(keys, time).data());
  std::vector<float> out(ids.size() * kDim);
  cache.gather(ids, out.data());
  return out;
}

struct Taken {
  ErrorCode code = ErrorCode::kInternal;
  std::vector<int64_t> unique;
  std::vector<uint32_t> inverse;
  bool operator==(const Taken&) const = default;
};

Taken take(TableCache& cache, std::span<const int64_t> keys) {
  Taken taken;
  taken.unique.resize(keys.size());
  taken.inverse.resize(keys.size());
  try {
    taken.unique.resize(cache.take_pulled(keys, taken.unique.data(), taken.inverse.data()));
  } catch (const Error& error) {
    return {error.code(), {}, {}};
  }
  return taken;
}

// A static cache and a remote one that are told the same.
class Twins {
 public:
  explicit Twins(uint32_t generation)
      : plain_(spec_of(false, kFew), 7, owners(), 1, nullptr, generation),
        remote_(spec_of(true, kFew), 7, owners(), 1, nullptr, generation),
        weight_(kFew * kDim) {
    plain_.bind(weight_.data());  // which makes all rows stale
    remote_.invalidate();
  }

  // Calls both and returns what both answer.
  template <typename Call>
  auto ask(const Call& call) {
    const auto first = call(plain_);
    CHECK(call(remote_) == first);
    return first;
  }
  template <typename Call>
  void tell(const Call& call) {
    call(plain_);
    call(remote_);
  }

  void act(std::mt19937& engine, float time) {
    std::vector<int64_t> ids(engine() % 12);
    for (int64_t& id : ids) id = static_cast<int64_t>(engine() % kFew);
    const std::span<const int64_t> some(ids);
    std::vector<int64_t> distinct(ids);
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    switch (engine() % 14) {
      case 0:
      case 1:
        return look_both_up(some, time);
      case 2:
        static_cast<void>(ask([&](TableCache& cache) { return take(cache, some); }));
        return;
      case 3:
        return prefetch(some, engine() % 2 == 0);
      case 4:
        static_cast<void>(ask([&](TableCache& cache) { return cache.want(some); }));
        static_cast<void>(ask([&](TableCache& cache) { return cache.wants_any(distinct); }));
        return;
      case 5:
        return tell([&](TableCache& cache) { cache.give_up_wanted(some); });
      case 6:
        return tell(
            [&](TableCache& cache) { cache.place(distinct, rows_of(distinct, time).data()); });
      case 7:
        return tell([&](TableCache& cache) { cache.drop(distinct); });
      case 8:
        return tell([&](TableCache& cache) { cache.forget(distinct); });
      case 9:
        return tell([](TableCache& cache) { cache.refresh(); });
      case 10:
        return tell([&](TableCache& cache) {
          cache.invalidate();
          cache.await(distinct);
        });
      case 11:
        return finish_round(distinct, time);
      case 12:
        static_cast<void>(ask([&](TableCache& cache) { return cache.all_current(distinct); }));
        static_cast<void>(ask([&](TableCache& cache) { return cache.stale(some, false); }));
        return;
      default:
        static_cast<void>(ask([&](TableCache& cache) {
          std::vector<int64_t> keys;
          cache.unite(distinct, &keys);
          std::sort(keys.begin(), keys.end());
          return keys;
        }));
    }
  }

  void compare() {
    for (int64_t key = 0; key < static_cast<int64_t>(kFew); ++key) {
      const float* const first = plain_.find_row(key);
      const float* const second = remote_.find_row(key);
      CHECK_EQ(first == nullptr, second == nullptr);
      if (first != nullptr) CHECK(std::equal(first, first + kDim, second));
    }
  }

 private:
  void look_both_up(std::span<const int64_t> ids, float time) {
    std::vector<int64_t> asked;
    static_cast<void>(ask([&](TableCache& cache) { return look_up(cache, ids, time, &asked); }));
    static_cast<void>(ask([](TableCache& cache) { return cache.take_hits(); }));
  }
  void prefetch(std::span<const int64_t> ids, bool anew) {
    static_cast<void>(ask([&](TableCache& cache) {
      std::vector<int64_t> keys;
      std::vector<int64_t> pulled;
      cache.take_coming(ids, anew, &keys, &pulled);
      keys.push_back(-1);
      keys.insert(keys.end(), pulled.begin(), pulled.end());
      return keys;
    }));
  }
  void finish_round(std::span<const int64_t> keys, float time) {
    tell([&](TableCache& cache) { cache.keep(keys); });
    tell([](TableCache& cache) { cache.invalidate(); });
    tell([&](TableCache& cache) {
      cache.overwrite(keys, rows_of(keys, time).data());
      cache.hold(keys);
    });
  }

  TableCache plain_;
  TableCache remote_;
  std::vector<float> weight_;
};

TEST(client_remote_rows_are_as_static_ones_whatever_happens) {
  const int actions = cpudist::testing::kInstrumented ? 2000 : 20000;
  // Generations begin anew on the way.
  for (const uint32_t generation : {1u, 0xffffffc0u}) {
    for (uint32_t seed = 0; seed < 6; ++seed) {
      std::mt19937 engine(seed);
      Twins twins(generation);
      for (int i = 0; i < actions; ++i) {
        twins.act(engine, 100.0f * static_cast<float>(i));
        if (i % 7 == 0) twins.compare();
      }
    }
  }
}

TEST(client_remote_rows_may_have_any_number) {
  constexpr uint64_t kHuge = uint64_t{1} << 54;
  const std::vector<int64_t> ends{0, kHuge - 1, 0, 17};
  TableCache cache(spec_of(true, kHuge), 7, owners(), 1);
  CHECK(cache.bound());
  std::vector<int64_t> asked;
  const std::vector<float> rows = look_up(cache, ends, 0.0f, &asked);
  CHECK((asked == std::vector<int64_t>{0, kHuge - 1, 17}));
  CHECK(rows == rows_of(ends, 0.0f));
  CHECK((take(cache, ends).inverse == std::vector<uint32_t>{0, 1, 0, 2}));
  CHECK(take(cache, std::vector<int64_t>{1}).code == ErrorCode::kUnpulledRow);
  for (const int64_t outside : {int64_t{-1}, static_cast<int64_t>(kHuge)}) {
    CHECK(take(cache, std::vector<int64_t>{outside}).code == ErrorCode::kRowOutOfRange);
    CHECK_THROWS(missing(cache, std::vector<int64_t>{18, outside}), Error);
  }
  CHECK((missing(cache, std::vector<int64_t>{18, 0}) == std::vector<int64_t>{18}));
  CHECK(cache.memory_bytes() < 1 << 20);
}

TEST(client_remote_values_beyond_the_budget_go_before_their_marks) {
  client::CacheBudget budget(20 * kDim * sizeof(float));
  TableCache cache(spec_of(true, 1000), 7, owners(), 1, &budget);
  std::vector<int64_t> first(15);
  std::vector<int64_t> second(15);
  for (size_t i = 0; i < 15; ++i) first[i] = static_cast<int64_t>(i);
  for (size_t i = 0; i < 15; ++i) second[i] = static_cast<int64_t>(500 + i);
  std::vector<int64_t> asked;
  // Of a batch to come, and held: it stays.
  const std::vector<int64_t> held{900};
  std::vector<int64_t> keys;
  std::vector<int64_t> pulled;
  cache.take_coming(std::span<const int64_t>(held), false, &keys, &pulled);
  cache.place(held, rows_of(held, 5.0f).data());

  CHECK(look_up(cache, first, 0.0f, &asked) == rows_of(first, 0.0f));
  cache.keep_budget();
  CHECK_EQ(budget.dropped_rows.load(), 0u);
  CHECK(look_up(cache, first, 1.0f, &asked) == rows_of(first, 0.0f));
  CHECK(asked.empty());
  CHECK(look_up(cache, second, 1.0f, &asked) == rows_of(second, 1.0f));
  cache.keep_budget();
  CHECK_EQ(budget.dropped_rows.load(), 30u);
  CHECK_EQ(budget.used_bytes.load(), kDim * sizeof(float));
  CHECK_EQ(*cache.find_row(900), rows_of(held, 5.0f)[0]);
  // A gradient may name all of them, and a lookup asks anew.
  CHECK_EQ(take(cache, first).unique.size(), 15u);
  CHECK(cache.all_current(second));
  CHECK(look_up(cache, first, 2.0f, &asked) == rows_of(first, 2.0f));
  CHECK(asked == first);
  CHECK_EQ(budget.dropped_rows.load(), 30u);
  // What has no values is not kept over a step.
  cache.keep(second);
  cache.invalidate();
  cache.hold(second);
  CHECK(missing(cache, second) == second);
  cache.release();
  CHECK_EQ(budget.used_bytes.load(), 0u);
}

TEST(client_remote_rows_that_memory_was_short_for_are_asked_for_again) {
  for (int64_t nth = 1;; ++nth) {
    TableCache cache(spec_of(true, 100000), 7, owners(), 1);
    std::vector<int64_t> ids(20000);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i) * 3;
    bool failed = false;
    {
      const cpudist::testing::FailingNew failing(nth);
      try {
        cache.take_missing(std::span<const int64_t>(ids));
      } catch (const std::bad_alloc&) {
        failed = true;
      }
    }
    if (!failed) {
      CHECK(nth > 3);
      break;
    }
    CHECK(missing(cache, ids) == ids);
  }
}

TEST(client_remote_cache_that_is_released_holds_no_memory) {
  TableCache cache(spec_of(true, 1000), 7, owners(), 1);
  const std::vector<int64_t> keys{3, 7};
  const std::span<const int64_t> ids(keys);
  missing(cache, keys);
  CHECK(cache.memory_bytes() > 0);
  cache.release();
  CHECK_EQ(cache.memory_bytes(), 0u);
  CHECK_THROWS(missing(cache, keys), Error);
  CHECK(take(cache, keys).code == ErrorCode::kClosed);
  // What was under way in other threads ends.
  std::vector<int64_t> all;
  cache.place(keys, nullptr);
  cache.overwrite(keys, nullptr);
  cache.keep(keys);
  cache.hold(keys);
  cache.await(keys);
  cache.drop(keys);
  cache.forget(keys);
  cache.unite(keys, &all);
  cache.give_up_wanted(ids);
  cache.invalidate();
  cache.keep_budget();
  CHECK_EQ(cache.want(ids), 0u);
  CHECK(!cache.wants_any(keys));
}

}  // namespace remote_cache_test
