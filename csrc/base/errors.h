// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Typed errors of the core. One code per cause; csrc/bind maps each code to the Python class of the
// same name, and an ERROR reply carries the code over the wire.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace cpudist {

enum class ErrorCode : uint32_t {
  kInternal = 1,          // a bug: InternalError
  kInvalidArgument = 2,   // InvalidArgumentError
  kPeerLost = 3,          // PeerLostError: a process died or froze
  kTimeout = 4,           // OperationTimeoutError: a live peer did not get there in time
  kProtocol = 5,          // ProtocolError: malformed or foreign bytes, sequence gap
  kConfigMismatch = 6,    // ConfigMismatchError: trainers disagree
  kUnpulledRow = 7,       // UnpulledRowError: a gradient for a row that was not pulled
  kFenced = 8,            // FencedError: a newer incarnation of this trainer took over
  kOverloaded = 9,        // OverloadedError: no memory now; the request may be sent again
  kClosed = 10,           // ClosedError: used after shutdown
  kInterrupted = 11,      // the wait was interrupted by a signal (KeyboardInterrupt in Python)
  kRowOutOfRange = 12,    // RowOutOfRangeError: an id outside the table
  kAddress = 13,          // AddressError: cannot bind, resolve or connect
  kBadRecord = 14,        // BadRecordError: a line or file of data is not what the schema says
  kDataFile = 15,         // DataFileError: a file of data cannot be opened or read to its end
  kOutOfMemory = 16,      // OutOfMemoryError: a process has no memory left
  kSnapshot = 17,         // SnapshotError: a snapshot cannot be saved or loaded
  kSnapshotCorrupt = 18,  // SnapshotCorruptError: a file of one is not what was written
  kFull = 19,       // OverloadedError: what is kept fills a memory cap; sending again is no use
  kNonFinite = 20,  // NonFiniteGradientError: a gradient that is infinite or NaN
  kTableFull = 21,  // TableFullError: a table has as many rows as it may have
  kAuthentication = 22,  // AuthenticationError: an end of a link has not proven the run's key
  kCountedLost = 23,     // PeerLostError: of who asks; as a newer incarnation it may come back
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace cpudist
