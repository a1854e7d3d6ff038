// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Runs the registered native tests. Arguments select tests whose name contains one of them; no
// match is a failure, so that a misspelt filter cannot pass. Prints "N passed, N failed".

#include <cstdio>
#include <exception>
#include <string>

#include "check.h"

namespace {

bool selected(const std::string& name, int argc, char** argv) {
  if (argc < 2) return true;
  for (int i = 1; i < argc; ++i) {
    if (name.find(argv[i]) != std::string::npos) return true;
  }
  return false;
}

bool run_one(const cpudist::testing::TestCase& test) {
  try {
    test.body();
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED %s\n  %s\n", test.name.c_str(), error.what());
  } catch (...) {
    std::fprintf(stderr, "FAILED %s\n  an exception of unknown type\n", test.name.c_str());
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  int passed = 0;
  int failed = 0;
  for (const auto& test : cpudist::testing::registry()) {
    if (!selected(test.name, argc, argv)) continue;
    if (run_one(test)) {
      ++passed;
    } else {
      ++failed;
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
