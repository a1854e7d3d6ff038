# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Flags. They are said here and nowhere else: no build type.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# All vector levels give the same bits, hence no contraction.
add_compile_options(-fPIC -ffp-contract=off -fvisibility=hidden -pthread
                    -Wall -Wextra -Wshadow)
add_link_options(-pthread)

set(CPUDIST_RELEASE_FLAGS -O3 -DNDEBUG)
if(CPUDIST_SANITIZE STREQUAL "")
  set(CPUDIST_CORE_FLAGS ${CPUDIST_RELEASE_FLAGS})
else()
  # Instrumented code trips gcc's flow analysis and its own note on atomic fences.
  add_compile_options(-g1 -fno-omit-frame-pointer -Wno-array-bounds -Wno-maybe-uninitialized
                      -Wno-stringop-overflow)
  if(CPUDIST_SANITIZE STREQUAL "thread")
    add_compile_options(-Wno-tsan)
  endif()
  set(CPUDIST_CORE_FLAGS -O1 -fsanitize=${CPUDIST_SANITIZE} -fno-sanitize-recover=all)
  if(CPUDIST_SANITIZE MATCHES undefined)
    # A trap, of which ASan prints the stack: calls that describe each place in words would be a
    # quarter of what compiling costs.
    list(APPEND CPUDIST_CORE_FLAGS -fsanitize-undefined-trap-on-error)
  endif()
  add_link_options(-fsanitize=${CPUDIST_SANITIZE} -fno-sanitize-recover=all)
endif()
