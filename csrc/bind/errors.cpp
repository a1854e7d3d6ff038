// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Error becomes the class of the same cause in torch_cpudist.errors.
#include "base/errors.h"

#include <exception>
#include <string>

#include "backends/foreign_errors.h"
#include "bind/bind.h"

namespace cpudist::bind {

namespace {

const char* class_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInternal:
      return "InternalError";
    case ErrorCode::kInvalidArgument:
      return "InvalidArgumentError";
    case ErrorCode::kPeerLost:
    case ErrorCode::kCountedLost:
      return "PeerLostError";
    case ErrorCode::kTimeout:
      return "OperationTimeoutError";
    case ErrorCode::kProtocol:
      return "ProtocolError";
    case ErrorCode::kConfigMismatch:
      return "ConfigMismatchError";
    case ErrorCode::kUnpulledRow:
      return "UnpulledRowError";
    case ErrorCode::kFenced:
      return "FencedError";
    case ErrorCode::kOverloaded:
    case ErrorCode::kFull:
      return "OverloadedError";
    case ErrorCode::kClosed:
      return "ClosedError";
    case ErrorCode::kInterrupted:
      return "InternalError";  // translated before
    case ErrorCode::kRowOutOfRange:
      return "RowOutOfRangeError";
    case ErrorCode::kAddress:
      return "AddressError";
    case ErrorCode::kBadRecord:
      return "BadRecordError";
    case ErrorCode::kDataFile:
      return "DataFileError";
    case ErrorCode::kOutOfMemory:
      return "OutOfMemoryError";
    case ErrorCode::kSnapshot:
      return "SnapshotError";
    case ErrorCode::kSnapshotCorrupt:
      return "SnapshotCorruptError";
    case ErrorCode::kNonFinite:
      return "NonFiniteGradientError";
    case ErrorCode::kTableFull:
      return "TableFullError";
    case ErrorCode::kAuthentication:
      return "AuthenticationError";
  }
  return "InternalError";
}

void raise(const char* name, const char* message) {
  try {
    const py::object cls = py::module_::import("torch_cpudist.errors").attr(name);
    PyErr_SetString(cls.ptr(), message);
  } catch (py::error_already_set& error) {
    error.restore();
  }
}

}  // namespace

void bind_errors(py::module_& module) {
  // An instance of the class of its cause.
  module.def(
      "foreign_error",
      [](const std::string& text) {
        const Error error = backends::foreign_error(text);
        const py::module_ classes = py::module_::import("torch_cpudist.errors");
        return py::object(classes.attr(class_of(error.code()))(error.what()));
      },
      py::arg("text"));
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kInterrupted) {
        // The signal handler has set its own exception; usually KeyboardInterrupt.
        if (!PyErr_Occurred()) PyErr_SetNone(PyExc_KeyboardInterrupt);
      } else {
        raise(class_of(error.code()), error.what());
      }
    } catch (const ForkedError& error) {
      raise("ForkedProcessError", error.what());
    }
  });
}

}  // namespace cpudist::bind
