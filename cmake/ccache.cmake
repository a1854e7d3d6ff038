# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# ccache is used where it is installed, unless the compiler that was named is ccache itself.

file(REAL_PATH "${CMAKE_CXX_COMPILER}" compiler)
find_program(CPUDIST_CCACHE ccache)
if(compiler MATCHES "/ccache$")
  add_compile_options(-fpch-preprocess)
elseif(CPUDIST_CCACHE)
  # It guards against times and defines in headers, of which a precompiled one has all.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${CPUDIST_CCACHE})
  add_compile_options(-fpch-preprocess)
endif()
