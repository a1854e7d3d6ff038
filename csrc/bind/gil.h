// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The interpreter's lock, let go and taken by threads that may outlive the interpreter.
//
// A daemon thread that takes the lock while the interpreter ends never gets it: up to Python 3.13
// it is unwound instead, and a destructor that is unwound aborts the process. It is kept where it
// is until the process is gone, as Python 3.14 does itself. For both modules.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <exception>

namespace cpudist::bind {

template <typename Take>
auto take_gil(Take take) {
  try {
    return take();
  } catch (abi::__forced_unwind&) {
    while (true) ::pause();
  }
}

// The calling thread is without the lock while this lives.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    take_gil([this] { PyEval_RestoreThread(state_); });
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// The calling thread has the lock while this lives.
class GilTaken {
 public:
  GilTaken() : state_(take_gil([] { return PyGILState_Ensure(); })) {}
  ~GilTaken() { PyGILState_Release(state_); }
  GilTaken(const GilTaken&) = delete;
  GilTaken& operator=(const GilTaken&) = delete;

 private:
  PyGILState_STATE state_;
};

inline bool python_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}

// For calls of ours that others make without the lock, as torch does those of backends: their
// destructors take it, and there the process is terminated. From now on such a thread is kept, too.
// All else that terminates goes on to the handler before.
inline void keep_unwound_threads() {
  static const std::terminate_handler before = std::get_terminate();
  std::set_terminate([] {
    const bool unwound = std::current_exception() == nullptr && ::gettid() != ::getpid();
    while (unwound && python_ends()) ::pause();
    before();
  });
}

// Calls `call` with the lock. Python lets go of it while it runs, so that the thread may be unwound
// within, too: then it is kept here, where no destructor has begun.
template <typename Call>
void with_gil(Call call) {
  const GilTaken gil;
  take_gil(call);
}

}  // namespace cpudist::bind
