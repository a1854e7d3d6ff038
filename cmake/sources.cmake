# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Which sources there are, and which of them are compiled as one.

# cpudist_sources(RESULT FOLDER...): the sources below folders, in a fixed order.
function(cpudist_sources result)
  set(found)
  foreach(folder IN LISTS ARGN)
    file(GLOB_RECURSE some RELATIVE ${CMAKE_SOURCE_DIR} CONFIGURE_DEPENDS
         ${CMAKE_SOURCE_DIR}/${folder}/*.cpp)
    list(SORT some)
    list(APPEND found ${some})
  endforeach()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# cpudist_objects(TARGET SOURCE...): what sources are compiled to.
function(cpudist_objects target)
  add_library(${target} OBJECT ${ARGN})
  target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR}/csrc)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

# cpudist_batches(COUNT SOURCE...): COUNT sources of a part (csrc/client and what lies below it) are
# compiled as one, for the headers and templates that they share; names in unnamed namespaces of a
# part differ, therefore. With CPUDIST_UNITY off each is compiled alone, so that a change costs
# seconds.
function(cpudist_batches count)
  if(NOT CPUDIST_UNITY)
    return()
  endif()
  foreach(source IN LISTS ARGN)
    string(REGEX MATCH "^(csrc|tests/native)/[^/]+" part ${source})
    string(REPLACE "/" "_" part ${part})
    if(NOT DEFINED seen_${part})
      set(seen_${part} 0)
    endif()
    math(EXPR batch "${seen_${part}} / ${count}")
    math(EXPR seen_${part} "${seen_${part}} + 1")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${part}_${batch})
  endforeach()
endfunction()

# Sources that are compiled for an instruction set say so with a pragma after their includes:
# nothing may be read behind it. The flags change no value: they let the compiler use vector square
# roots and selects.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  file(GLOB levels CONFIGURE_DEPENDS
       csrc/kernels/levels/scalar.cpp csrc/kernels/levels/avx*.cpp
       csrc/backends/shm/reduce/avx*.cpp)
  set_source_files_properties(
    ${levels} PROPERTIES COMPILE_OPTIONS "-fno-math-errno;-fno-trapping-math"
                         SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)
endif()
