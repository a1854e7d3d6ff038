// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Collectives through shared memory among ranks that are threads: values, order, asynchronous
// calls, calls that do not match.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "backends/shm/reduce/reduce.h"
#include "backends/shm/reduce/table.h"
#include "base/errors.h"
#include "support/check.h"
#include "support/shm_fixture.h"

namespace cpudist::shm {
namespace {

// Sizes that go in one piece, in several, and through shares of four ranks.
constexpr size_t kCounts[] = {0, 1, 1000, 40'001, 700'003};

float value_of(int rank, size_t i) { return static_cast<float>((i * 7 + rank * 13) % 101) - 50; }

std::vector<float> values_of(int rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = value_of(rank, i);
  return values;
}

std::vector<float> expected_sum(int size, size_t count) {
  std::vector<float> sums(count);
  for (int rank = 0; rank < size; ++rank) {
    for (size_t i = 0; i < count; ++i) sums[i] += value_of(rank, i);
  }
  return sums;
}

}  // namespace

TEST(shm_all_reduce_sums_all_sizes) {
  for (const int size : {1, 2, 3, 5}) {
    run_ranks(size, [size](Group& group, int rank) {
      for (const size_t count : kCounts) {
        std::vector<float> values = values_of(rank, count);
        group.engine.submit({sum_of(values), kLimit});
        CHECK(values == expected_sum(size, count));
      }
    });
  }
}

TEST(shm_shared_buffers_are_summed_in_place) {
  for (const int size : {2, 3}) {
    run_ranks(size, [size](Group& group, int rank) {
      const size_t count = 300'007;
      const auto buffer = group.engine.allocate(count * sizeof(float), kLimit);
      auto* values = reinterpret_cast<float*>(buffer->own());
      for (const size_t begin : {size_t{0}, size_t{64}}) {
        for (int mixed = 0; mixed < 2; ++mixed) {
          std::vector<float> other = values_of(rank, count - begin);
          const bool shared = mixed == 0 || rank == 0;
          float* data = shared ? values + begin : other.data();
          std::copy(other.begin(), other.end(), data);
          Call call = call_of(Kind::kAllReduce, DType::kF32, count - begin);
          call.reduction = Reduction::kSum;
          call.in = call.out = data;
          group.engine.submit({call, kLimit});
          const auto expected = expected_sum(size, count - begin);
          CHECK(std::equal(expected.begin(), expected.end(), data));
        }
      }
    });
  }
}

TEST(shm_asynchronous_calls_end_in_order) {
  run_ranks(3, [](Group& group, int rank) {
    constexpr int kCalls = 50;
    std::vector<std::vector<float>> values;
    for (int i = 0; i < kCalls; ++i) values.push_back(values_of(rank, i % 7 == 0 ? 50'000 : 10));
    std::atomic<int> ended{0};
    std::vector<std::shared_ptr<Operation>> operations;
    for (auto& one : values) {
      Submission submission{sum_of(one), kLimit, false};
      submission.notify = [&](std::exception_ptr error) { ended += error ? 0 : 1; };
      operations.push_back(group.engine.submit(std::move(submission)));
    }
    for (auto& one : operations) CHECK(group.engine.wait(*one, kLimit));
    for (auto& one : values) CHECK(one == expected_sum(3, one.size()));
    group.engine.submit({call_of(Kind::kBarrier, DType::kBytes, 0), kLimit});
    while (ended.load() != kCalls) std::this_thread::yield();
  });
}

TEST(shm_calls_that_differ_are_told_to_all) {
  for (const int what : {0, 1, 2}) {
    std::atomic<int> told{0};
    run_ranks(3, [&](Group& group, int rank) {
      std::vector<float> values = values_of(rank, rank == 2 && what == 0 ? 11 : 10);
      Call call = sum_of(values);
      if (rank == 2 && what == 1) call.reduction = Reduction::kMax;
      if (rank == 2 && what == 2) call = call_of(Kind::kBarrier, DType::kBytes, 0);
      try {
        group.engine.submit({call, kLimit});
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kConfigMismatch);
        CHECK(std::string(error.what()).find("rank 2 calls") != std::string::npos);
        ++told;
      }
      // Broken it stays.
      CHECK_THROWS(group.engine.submit({call, kLimit}), Error);
    });
    CHECK_EQ(told.load(), 3);
  }
}

TEST(shm_split_sizes_that_differ_are_told_to_all) {
  std::atomic<int> told{0};
  run_ranks(2, [&](Group& group, int rank) {
    std::vector<std::byte> in(64), out(64);
    Call call = call_of(Kind::kAllToAll, DType::kBytes, 0);
    call.ins = {in.data(), in.data() + 32};
    call.outs = {out.data(), out.data() + 32};
    call.in_bytes = {32, 32};
    call.out_bytes = {32, rank == 0 ? size_t{16} : size_t{32}};
    try {
      group.engine.submit({call, kLimit});
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find("rank 1 sends 32 bytes to rank 0, which expects 16") !=
            std::string::npos);
      ++told;
    }
  });
  CHECK_EQ(told.load(), 2);
}

TEST(shm_a_rank_that_does_not_come_is_named) {
  run_ranks(2, [](Group& group, int rank) {
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      return;
    }
    try {
      group.engine.submit(
          {call_of(Kind::kBarrier, DType::kBytes, 0), std::chrono::milliseconds(100)});
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kTimeout);
      CHECK(std::string(error.what()).find("rank 1 (process") != std::string::npos);
    }
  });
}

TEST(shm_a_rank_that_leaves_is_named) {
  run_ranks(2, [](Group& group, int rank) {
    if (rank == 1) return;
    try {
      group.engine.submit({call_of(Kind::kBarrier, DType::kBytes, 0), kLimit});
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kPeerLost);
      CHECK(std::string(error.what()).find("has left the group") != std::string::npos);
    }
  });
}

TEST(shm_a_rank_that_leaves_is_noticed_behind_a_late_one) {
  std::atomic<bool> told{false};
  run_ranks(3, [&](Group& group, int rank) {
    if (rank == 2) return;
    if (rank == 0) {
      while (!told.load()) std::this_thread::yield();
      return;
    }
    const Clock::time_point began = Clock::now();
    try {
      group.engine.submit({call_of(Kind::kBarrier, DType::kBytes, 0), kLimit});
      CHECK(false);
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find("rank 2 (process") != std::string::npos);
    }
    CHECK(Clock::now() - began < kLimit / 2);
    told = true;
  });
}

TEST(shm_a_group_that_is_closed_ends_the_waits_of_others) {
  std::atomic<bool> done{false};
  run_ranks(2, [&](Group& group, int rank) {
    if (rank == 1) {
      while (!done.load()) std::this_thread::yield();
      return;
    }
    const Clock::time_point began = Clock::now();
    const auto waits = [&](const std::function<void()>& wait) {
      return std::thread([wait] {
        try {
          wait();
          CHECK(false);
        } catch (const Error& error) {
          CHECK(error.code() == ErrorCode::kClosed);
        }
      });
    };
    std::vector<float> values = values_of(rank, 10);
    auto message = std::make_shared<Message>();
    std::vector<std::byte> bytes(8);
    message->peer = 1;
    message->data = bytes.data();
    message->size_bytes = bytes.size();
    message->timeout = kLimit;
    group.messages.submit(message);
    std::thread collective = waits([&] { group.engine.submit({sum_of(values), kLimit}); });
    std::thread receive = waits([&] { group.messages.wait(*message, std::nullopt); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // likely both wait by now
    group.engine.close();
    group.messages.close();
    collective.join();
    receive.join();
    CHECK(Clock::now() - began < kLimit / 2);
    done = true;
  });
}

TEST(shm_a_wait_with_a_limit_leaves_the_call_under_way) {
  std::atomic<bool> go{false};
  run_ranks(2, [&](Group& group, int rank) {
    std::vector<float> values = values_of(rank, 10);
    if (rank == 1) {
      while (!go.load()) std::this_thread::yield();
      group.engine.submit({sum_of(values), kLimit});
      return;
    }
    const auto operation = group.engine.submit({sum_of(values), kLimit, false});
    CHECK(!group.engine.wait(*operation, std::chrono::milliseconds(20)));
    go = true;
    CHECK(group.engine.wait(*operation, std::nullopt));
    CHECK(values == expected_sum(2, 10));
  });
}

}  // namespace cpudist::shm
