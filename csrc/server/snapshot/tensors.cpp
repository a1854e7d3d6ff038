// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/snapshot/tensors.h"

#include <cstdio>
#include <cstring>

namespace cpudist::server {
namespace {

// Names are UTF-8, which JSON takes as it is but for quotes, backslashes and control characters.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char letter : text) {
    const auto code = static_cast<unsigned char>(letter);
    if (code == '"' || code == '\\') {
      result += '\\';
      result += letter;
    } else if (code < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", code);
      result += escaped;
    } else {
      result += letter;
    }
  }
  return result + "\"";
}

std::string listed(const std::vector<uint64_t>& numbers) {
  std::string result = "[";
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i > 0) result += ",";
    result += std::to_string(numbers[i]);
  }
  return result + "]";
}

}  // namespace

uint64_t size_of_dtype(const char* dtype) {
  return std::strcmp(dtype, "F64") == 0 || std::strcmp(dtype, "I64") == 0 ? 8 : 4;
}

void place_tensor(TensorEntry* entry, uint64_t* end) {
  entry->begin = *end;
  uint64_t elements = 1;
  for (const uint64_t extent : entry->shape) elements *= extent;
  *end += elements * size_of_dtype(entry->dtype);
  entry->end = *end;
}

std::string tensors_head(const std::string& format, const std::vector<TensorEntry>& entries) {
  std::string json = "{\"__metadata__\":{\"format\":";
  json += quoted(format);
  json += ",\"version\":\"1\"}";
  for (const TensorEntry& entry : entries) {
    json += ",";
    json += quoted(entry.name);
    json += ":{\"dtype\":\"";
    json += entry.dtype;
    json += "\",\"shape\":";
    json += listed(entry.shape);
    json += ",\"data_offsets\":";
    json += listed({entry.begin, entry.end});
    json += "}";
  }
  json += "}";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  const uint64_t length = json.size();
  std::string head(sizeof length, '\0');
  std::memcpy(head.data(), &length, sizeof length);  // little-endian, as this code runs on
  return head + json;
}

}  // namespace cpudist::server
