# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# A warning is an error under the compiler that the tests run with. Later ones, and distributions
# with defaults of their own, warn of more, which is to stop nobody's installation. Included once
# the compiler is known.

set(CPUDIST_TESTED_GCC 12)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION MATCHES
                                            "^${CPUDIST_TESTED_GCC}[.]")
  add_compile_options(-Werror)
endif()
