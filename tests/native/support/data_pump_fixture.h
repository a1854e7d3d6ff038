// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Small files, schemas of one id per line, and what comes out of readers over them.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "data/read/reader.h"
#include "data/store/store.h"
#include "support/check.h"

namespace cpudist::testing {

using data::kNoEnd;
using data::Split;

inline const data::Wait kSoon{20.0, {}};

// A folder that is removed at the end.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "cpudist-data-XXXXXX").string();
    CHECK(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string path(const std::string& name) const { return path_ + "/" + name; }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
    return path(name);
  }

 private:
  std::string path_;
};

inline std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// MultiSlot lines `1 <id>`.
inline data::Schema id_schema() {
  data::Schema schema;
  data::Slot slot;
  slot.name = "id";
  slot.dim = 1;
  schema.slots.push_back(slot);
  return schema;
}

inline std::string id_lines(int64_t begin, int64_t end) {
  std::string text;
  for (int64_t id = begin; id < end; ++id) text += "1 " + std::to_string(id) + "\n";
  return text;
}

using Ids = std::vector<int64_t>;

inline Ids ids_of(const data::Batch& batch) {
  return {batch.ints.data(), batch.ints.data() + batch.ints.size()};
}

inline Ids range(int64_t begin, int64_t end) {
  Ids ids;
  for (int64_t id = begin; id < end; ++id) ids.push_back(id);
  return ids;
}

inline data::ReaderOptions id_options(std::vector<std::string> files,
                                      std::vector<std::vector<Split>> lanes, size_t batch_size) {
  data::ReaderOptions options;
  options.schema = id_schema();
  options.input.files = std::move(files);
  options.lanes = std::move(lanes);
  options.batch_size = batch_size;
  return options;
}

inline std::unique_ptr<data::Reader> make_reader(data::ReaderOptions options) {
  return std::make_unique<data::Reader>(std::move(options), data::BatchPool::create());
}

struct Pass {
  std::vector<Ids> batches;
  std::vector<data::ReaderPosition> positions;  // after each batch
};

inline Pass read_all(data::Reader& reader) {
  Pass pass;
  while (true) {
    const data::Delivered delivered = reader.next(kSoon);
    if (!delivered.batch) return pass;
    pass.batches.push_back(ids_of(*delivered.batch));
    pass.positions.push_back(delivered.position);
  }
}

inline Pass read_all(data::ReaderOptions options) {
  return read_all(*make_reader(std::move(options)));
}

inline Ids joined(const std::vector<Ids>& batches) {
  Ids all;
  for (const Ids& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

// The message of the Error that a call throws, whose code is checked.
template <typename Call>
std::string message_of(ErrorCode code, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK_EQ(error.code(), code);
    return error.what();
  }
  fail(__FILE__, __LINE__, "no Error was thrown");
}

inline bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace cpudist::testing
