# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# The native tests, and the fuzzers of parsers and decoders. Neither needs torch. Without a
# sanitizer the tests test the objects that the Python modules are made of.

# What tests do is soon done; compiling them is not. No -O for them, and of their own undefined
# behaviour only what breaks memory is looked for.
string(REGEX REPLACE ",.*" "" own_sanitizer "${CPUDIST_SANITIZE}")
set(own_flags -O0)
if(own_sanitizer)
  list(APPEND own_flags -fsanitize=${own_sanitizer})
endif()

# The simulator is for a test and for a program of its own, which runs seeds for as long as one
# likes (scripts/simulate.sh).
file(GLOB simulator_sources RELATIVE ${CMAKE_SOURCE_DIR} CONFIGURE_DEPENDS tests/simulator/*.cpp)
if(simulator_sources)
  cpudist_objects(simulator ${simulator_sources})
  set_source_files_properties(${simulator_sources} PROPERTIES UNITY_GROUP simulator)
  target_include_directories(simulator PRIVATE tests/native tests)
  target_precompile_headers(simulator PRIVATE tests/native/precompiled/tests.h)
  if(CPUDIST_SANITIZE STREQUAL "")
    target_compile_options(simulator PRIVATE -O1)
  else()
    target_compile_options(simulator PRIVATE ${own_flags})
  endif()
  add_executable(simulate EXCLUDE_FROM_ALL tests/simulator/program/main.cpp)
  target_include_directories(simulate PRIVATE csrc tests/native tests)
  target_link_libraries(simulate PRIVATE simulator core codec)
endif()

cpudist_sources(test_sources tests/native)
if(CPUDIST_SANITIZE STREQUAL "thread")
  # `// threads: none` among its first lines says that a test runs pure functions in its own thread
  # only, of which this sanitizer learns nothing.
  foreach(source IN LISTS test_sources)
    file(STRINGS ${source} without LIMIT_INPUT 1000 REGEX "^// threads: none$")
    if(without)
      list(REMOVE_ITEM test_sources ${source})
    endif()
  endforeach()
endif()
if(CPUDIST_SANITIZE STREQUAL "")
  # `// optimized: yes` says that a test computes for longer than it takes to optimize it.
  foreach(source IN LISTS test_sources)
    file(STRINGS ${source} long LIMIT_INPUT 1000 REGEX "^// optimized: yes$")
    if(long)
      set_source_files_properties(
        ${source} PROPERTIES COMPILE_OPTIONS -O1 SKIP_PRECOMPILE_HEADERS ON
                             SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  endforeach()
endif()
if(test_sources)
  cpudist_objects(native_test_sources ${test_sources})
  cpudist_batches(25 ${test_sources})
  target_include_directories(native_test_sources PRIVATE tests/native tests)
  target_compile_options(native_test_sources PRIVATE ${own_flags})
  target_precompile_headers(native_test_sources PRIVATE tests/native/precompiled/tests.h)
  add_executable(native_tests EXCLUDE_FROM_ALL)
  target_link_libraries(native_tests PRIVATE native_test_sources core codec)
  if(simulator_sources)
    target_link_libraries(native_tests PRIVATE simulator)
  endif()
  set_target_properties(native_tests PROPERTIES LINKER_LANGUAGE CXX)
endif()

if(NOT CPUDIST_SANITIZE MATCHES address)
  return()
endif()
# The tests have the fuzzers' objects, too, and no driver that asks which code was reached.
target_sources(native_tests PRIVATE tests/fuzz/support/untraced.cpp)
file(GLOB fuzz_sources CONFIGURE_DEPENDS tests/fuzz/*.cpp)
list(REMOVE_ITEM fuzz_sources ${CMAKE_SOURCE_DIR}/tests/fuzz/driver.cpp)
# They are not instrumented, so that they are fast.
add_library(fuzz_driver OBJECT tests/fuzz/driver.cpp)
target_compile_options(fuzz_driver PRIVATE -O1)
add_custom_target(fuzzers)
foreach(source IN LISTS fuzz_sources)
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} EXCLUDE_FROM_ALL ${source})
  target_include_directories(${name} PRIVATE csrc)
  target_compile_options(${name} PRIVATE -O1)
  target_link_libraries(${name} PRIVATE fuzz_driver codec)
  add_dependencies(fuzzers ${name})
endforeach()
