// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The head of a file of tensors in the safetensors format: its length as u64, then JSON that says
// where behind it each tensor lies.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace cpudist::server {

struct TensorEntry {
  std::string name;
  const char* dtype = "";  // F32, F64, I32, I64, U32
  std::vector<uint64_t> shape{};
  uint64_t begin = 0;  // byte behind the head
  uint64_t end = 0;
};

uint64_t size_of_dtype(const char* dtype);
// Puts `entry`, which has no place yet, behind what `end` bytes hold, and moves `end`.
void place_tensor(TensorEntry* entry, uint64_t* end);
// A multiple of 8 bytes. `format`: what the file is, in its metadata.
std::string tensors_head(const std::string& format, const std::vector<TensorEntry>& entries);
// Of a text, which has to stay.
inline std::span<const uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace cpudist::server
