// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Putting memory on huge pages beside who uses it.

#include "client/huge_pages.h"

#include <vector>

#include "support/check.h"

using namespace cpudist;  // NOLINT

TEST(huge_pages_change_no_value_and_let_go) {
  std::vector<uint32_t> small(1000, 7);
  std::vector<uint32_t> large((48u << 20) / sizeof(uint32_t), 7);
  std::vector<uint32_t> larger(large);
  client::HugePages pages;
  pages.prefer(small.data(), small.size() * sizeof(uint32_t));
  pages.prefer(large.data(), large.size() * sizeof(uint32_t));
  pages.prefer(larger.data(), larger.size() * sizeof(uint32_t));
  large[0] = 8;
  pages.forget(larger.data());
  pages.forget(small.data());
  pages.wait();
  CHECK_EQ(large[0], 8u);
  for (size_t i = 1; i < large.size(); ++i) CHECK_EQ(large[i], 7u);
  CHECK(larger == std::vector<uint32_t>(larger.size(), 7));
  // It goes while there is work left.
  pages.prefer(larger.data(), larger.size() * sizeof(uint32_t));
}
