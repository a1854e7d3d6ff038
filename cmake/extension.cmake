# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# The Python modules. _core uses torch's stable ABI only, so that one build serves several torch
# versions. _c10d uses torch's own C++ classes, which change with every minor release; that is why
# it is a module of its own, without which all else works.

# The lowest version whose stable ABI has all that csrc/ops uses.
set(CPUDIST_STABLE_ABI 0x020a000000000000ULL)
set(package ${CMAKE_BINARY_DIR}/package)

# cpudist_module(NAME "OBJECTS..." LIBRARY...): a module of objects and of the core.
function(cpudist_module name objects)
  foreach(part IN LISTS objects)
    target_include_directories(${part} SYSTEM PRIVATE ${CPUDIST_TORCH}/include
                                                      ${CPUDIST_PYTHON_INCLUDE})
    # Python's loader makes the calls; nothing in here is a loop that -O3 would gain by.
    target_compile_options(${part} PRIVATE -O2 -DNDEBUG)
  endforeach()
  add_library(${name} MODULE)
  target_link_libraries(${name} PRIVATE ${objects} core codec ${ARGN})
  set_target_properties(${name} PROPERTIES PREFIX "" SUFFIX ${CPUDIST_SUFFIX})
  set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${package} LINKER_LANGUAGE CXX)
  # The interpreter loads torch's libraries before a module, so the loader finds them by name; the
  # run path serves tools that load the module by itself.
  target_link_directories(${name} PRIVATE ${CPUDIST_TORCH}/lib)
  target_link_options(${name} PRIVATE LINKER:--as-needed)
  set_target_properties(${name} PROPERTIES BUILD_WITH_INSTALL_RPATH ON
                                           INSTALL_RPATH "$ORIGIN/../torch/lib")
endfunction()

# Headers of pybind11 and torch cost far more than what is compiled after them: each folder is one.
# torch bundles pybind11 among headers that some of its versions refuse beside the stable ABI.
cpudist_sources(bind_sources csrc/bind)
cpudist_sources(ops_sources csrc/ops)
cpudist_objects(bind_module ${bind_sources})
cpudist_objects(ops_module csrc/library.cpp ${ops_sources})
set_source_files_properties(${bind_sources} PROPERTIES UNITY_GROUP bind)
set_source_files_properties(csrc/library.cpp ${ops_sources} PROPERTIES UNITY_GROUP ops)
target_compile_definitions(ops_module PRIVATE TORCH_TARGET_VERSION=${CPUDIST_STABLE_ABI})
cpudist_module(_core "bind_module;ops_module" torch_cpu c10)

# The shim is compiled where it is used, against the oneCCL that is installed there.
cpudist_sources(c10d_sources csrc/backends/c10d csrc/backends/ccl)
list(FILTER c10d_sources EXCLUDE REGEX /shim/)
list(REMOVE_ITEM c10d_sources ${core_sources})
cpudist_objects(c10d_module ${c10d_sources})
set_source_files_properties(${c10d_sources} PROPERTIES UNITY_GROUP c10d)
target_include_directories(c10d_module SYSTEM
                           PRIVATE ${CPUDIST_TORCH}/include/torch/csrc/api/include)
cpudist_module(_c10d c10d_module torch_python torch torch_cpu c10)

# What lies beside the modules: which torch they were built against, and the shim's source.
file(GLOB shim CONFIGURE_DEPENDS csrc/backends/ccl/shim/*)
foreach(source IN LISTS shim)
  get_filename_component(name ${source} NAME)
  configure_file(${source} ${package}/backends/ccl_shim/${name} COPYONLY)
endforeach()
configure_file(cmake/_build_info.py.in ${package}/_build_info.py @ONLY)
add_custom_target(package DEPENDS _core _c10d)

# Each file is written beside the old one and moved, so that a process that has mapped the old one
# keeps it, and only where it changed.
add_custom_target(
  extension
  COMMAND ${CPUDIST_PYTHON} ${CMAKE_SOURCE_DIR}/scripts/cmake_build.py --put ${package}
          ${CMAKE_SOURCE_DIR}/torch_cpudist
  DEPENDS _core _c10d
  VERBATIM)
