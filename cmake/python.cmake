# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Asks the interpreter where torch and Python's headers are, which says in one sentence what is
# missing.

if(NOT CPUDIST_EXTENSION)
  return()
endif()
if(NOT CPUDIST_PYTHON)
  find_program(CPUDIST_PYTHON NAMES python3 python REQUIRED)
endif()
execute_process(
  COMMAND ${CPUDIST_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/../scripts/cmake_build.py --describe
  OUTPUT_VARIABLE CPUDIST_FOUND ERROR_VARIABLE CPUDIST_MISSING RESULT_VARIABLE CPUDIST_STATUS
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
if(NOT CPUDIST_STATUS EQUAL 0)
  message(FATAL_ERROR "${CPUDIST_MISSING}")
endif()
list(GET CPUDIST_FOUND 0 CPUDIST_TORCH)
list(GET CPUDIST_FOUND 1 CPUDIST_TORCH_VERSION)
list(GET CPUDIST_FOUND 2 CPUDIST_PYTHON_INCLUDE)
list(GET CPUDIST_FOUND 3 CPUDIST_SUFFIX)
# A torch or an interpreter that was replaced is asked again.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
             ${CPUDIST_TORCH}/version.py scripts/cmake_build.py)
