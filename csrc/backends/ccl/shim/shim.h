// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// oneCCL's C++ interface as plain C functions. _c10d knows this file and not oneCCL's headers; the
// functions are in a library of their own (shim.cpp), which is compiled against the oneCCL that is
// installed. All functions of one process are called from one thread.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Of this file; a library that was compiled from another one is refused.
#define CPUDIST_CCL_SHIM_VERSION 1

enum cpudist_ccl_dtype {
  CPUDIST_CCL_INT8,
  CPUDIST_CCL_UINT8,
  CPUDIST_CCL_INT16,
  CPUDIST_CCL_INT32,
  CPUDIST_CCL_INT64,
  CPUDIST_CCL_FLOAT16,
  CPUDIST_CCL_FLOAT32,
  CPUDIST_CCL_FLOAT64,
  CPUDIST_CCL_BFLOAT16,
};

enum cpudist_ccl_reduction {
  CPUDIST_CCL_SUM,
  CPUDIST_CCL_PROD,
  CPUDIST_CCL_MIN,
  CPUDIST_CCL_MAX,
};

// Where the members of a communicator find each other. Functions return 0, or anything else when
// they failed, which ends the making of a communicator and is ignored when it is freed.
struct cpudist_ccl_store {
  void* context;
  // Calls emit once if there is such a key, else not at all.
  int (*get)(void* context, const char* key, void* sink,
             void (*emit)(void* sink, const char* data, size_t size));
  int (*set)(void* context, const char* key, const char* data, size_t size);
};

struct cpudist_ccl_shim {
  uint32_t version;
  // What the last call of this thread that failed says.
  const char* (*error)(void);
  // oneCCL's release, such as "2021.16".
  const char* (*release)(void);
  // Returns null if it failed. `id` is equal in all members, and in no other communicator.
  void* (*make)(int size, int rank, int id, const struct cpudist_ccl_store* store);
  void (*free)(void* communicator);
  // Collectives return an event at once, null if they failed. Counts are of elements; the arrays of
  // counts have one of each rank and may go when the call returns, buffers stay until the event is
  // complete.
  void* (*allreduce)(void* communicator, const void* in, void* out, size_t count, int dtype,
                     int reduction);
  void* (*reduce)(void* communicator, const void* in, void* out, size_t count, int dtype,
                  int reduction, int root);
  void* (*reduce_scatter)(void* communicator, const void* in, void* out, size_t out_count,
                          int dtype, int reduction);
  void* (*broadcast)(void* communicator, void* buffer, size_t size_bytes, int root);
  void* (*allgather)(void* communicator, const void* in, size_t size_bytes, void* out);
  void* (*alltoall)(void* communicator, const void* in, const size_t* in_bytes, void* out,
                    const size_t* out_bytes);
  void* (*send)(void* communicator, void* buffer, size_t size_bytes, int peer);
  void* (*receive)(void* communicator, void* buffer, size_t size_bytes, int peer);
  void* (*barrier)(void* communicator);
  // 1 when the event is complete, 0 when it is not, -1 when it failed.
  int (*test)(void* event);
  void (*forget)(void* event);
};

// The one symbol of the library; null with an error in `error` if oneCCL does not start.
typedef const struct cpudist_ccl_shim* (*cpudist_ccl_open_t)(char* error, size_t error_size);
#define CPUDIST_CCL_OPEN "cpudist_ccl_open"

#ifdef __cplusplus
}
#endif
