// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Names and sizes, for messages.
#include "backends/shm/types.h"

namespace cpudist::shm {

size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kI8:
    case DType::kU8:
    case DType::kBytes:
      return 1;
    case DType::kBf16:
    case DType::kF16:
    case DType::kI16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF64:
    case DType::kI64:
      return 8;
  }
  return 1;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kF64:
      return "float64";
    case DType::kBf16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kI8:
      return "int8";
    case DType::kU8:
      return "uint8";
    case DType::kI16:
      return "int16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kBytes:
      return "bytes";
  }
  return "unknown";
}

const char* name_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kNone:
      return "";
    case Reduction::kSum:
      return "sum";
    case Reduction::kProduct:
      return "product";
    case Reduction::kMin:
      return "min";
    case Reduction::kMax:
      return "max";
    case Reduction::kAnd:
      return "and";
    case Reduction::kOr:
      return "or";
    case Reduction::kXor:
      return "xor";
  }
  return "unknown";
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kBarrier:
      return "barrier";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kReduce:
      return "reduce";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kGather:
      return "gather";
    case Kind::kScatter:
      return "scatter";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllToAll:
      return "all_to_all";
  }
  return "unknown";
}

std::string Header::describe() const {
  std::string text = name_of(kind);
  if (kind == Kind::kBarrier || kind == Kind::kAllToAll) return text;
  if (reduction != Reduction::kNone) {
    text += std::string(" (") + (average ? "average" : name_of(reduction)) + ")";
  }
  text += " of " + std::to_string(count) + " " + name_of(dtype);
  const bool rooted = kind == Kind::kReduce || kind == Kind::kBroadcast || kind == Kind::kGather ||
                      kind == Kind::kScatter;
  return rooted ? text + ", root " + std::to_string(root) : text;
}

}  // namespace cpudist::shm
