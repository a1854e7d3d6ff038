// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A small test registry and assertion set for the native tests: TEST(name) { ... } registers a
// test, CHECK* fail it by throwing, main.cpp runs all of them. Assertions may be used from the
// thread that runs the test only; a helper thread hands its exception over (see
// std::exception_ptr).

#pragma once

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpudist::testing {

// Whether a sanitizer makes all of it ten times slower: what repeats only to find more values of
// the same kind does so less often then.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kInstrumented = true;
#else
inline constexpr bool kInstrumented = false;
#endif
// Whether races are looked for, and every byte of memory takes four more: much data shows no more
// of them than little.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kOfThreads = true;
#else
inline constexpr bool kOfThreads = false;
#endif

struct TestCase {
  std::string name;
  std::function<void()> body;
};

inline std::vector<TestCase>& registry() {
  static std::vector<TestCase> cases;
  return cases;
}

struct Registration {
  Registration(std::string name, std::function<void()> body) {
    registry().push_back({std::move(name), std::move(body)});
  }
};

class CheckFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::ostringstream text;
  text << file << ":" << line << ": " << what;
  throw CheckFailure(text.str());
}

template <typename T>
std::string show(const T& value) {
  std::ostringstream text;
  text.precision(17);
  if constexpr (std::is_enum_v<T>) {
    text << static_cast<long long>(value);
  } else if constexpr (requires { text << value; }) {
    text << value;
  } else {
    text << "<value of " << sizeof(T) << " bytes>";
  }
  return text.str();
}

template <typename A, typename B>
void check_equal(const A& actual, const B& expected, const char* expression, const char* file,
                 int line) {
  bool equal = false;
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, bool> &&
                !std::is_same_v<B, bool> && !std::is_same_v<A, char> && !std::is_same_v<B, char>) {
    equal = std::cmp_equal(actual, expected);
  } else {
    equal = actual == expected;
  }
  if (!equal) {
    fail(file, line,
         std::string(expression) + ": found " + show(actual) + ", expected " + show(expected));
  }
}

}  // namespace cpudist::testing

#define CHECK_CONCAT_(a, b) a##b
#define CHECK_CONCAT(a, b) CHECK_CONCAT_(a, b)

#define TEST(name)                                                                      \
  static void CHECK_CONCAT(test_body_, name)();                                         \
  static const ::cpudist::testing::Registration CHECK_CONCAT(test_registration_, name)( \
      #name, &CHECK_CONCAT(test_body_, name));                                          \
  static void CHECK_CONCAT(test_body_, name)()

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      ::cpudist::testing::fail(__FILE__, __LINE__, "CHECK(" #condition ") failed"); \
    }                                                                               \
  } while (false)

// CHECK_EQ(found, expected)
#define CHECK_EQ(actual, expected) \
  ::cpudist::testing::check_equal((actual), (expected), #actual, __FILE__, __LINE__)

#define CHECK_NEAR(actual, expected, tolerance)                                                  \
  do {                                                                                           \
    const double check_difference = static_cast<double>(actual) - static_cast<double>(expected); \
    if (!(check_difference <= (tolerance) && -check_difference <= (tolerance))) {                \
      ::cpudist::testing::fail(__FILE__, __LINE__,                                               \
                               #actual ": found " + ::cpudist::testing::show(actual) +           \
                                   ", expected " + ::cpudist::testing::show(expected));          \
    }                                                                                            \
  } while (false)

// CHECK_THROWS(expression, ExceptionType)
#define CHECK_THROWS(expression, exception_type)                                                   \
  do {                                                                                             \
    bool check_thrown = false;                                                                     \
    try {                                                                                          \
      static_cast<void>(expression);                                                               \
    } catch (const exception_type&) {                                                              \
      check_thrown = true;                                                                         \
    }                                                                                              \
    if (!check_thrown) {                                                                           \
      ::cpudist::testing::fail(__FILE__, __LINE__, #expression " did not throw " #exception_type); \
    }                                                                                              \
  } while (false)
