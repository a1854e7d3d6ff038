// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A file system in memory, as a disk knows it: what was not synced may be lost, and from a call of
// the test's choice on every call fails (a full disk), or nothing happens any more (a crash).
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/file_calls.h"
#include "base/files.h"

namespace cpudist::testing {

// Thread safety: all members.
class MemoryFiles final : public files::Calls {
 public:
  using Bytes = std::vector<uint8_t>;

  // Call number `at` (from 0) of those that change something fails with this errno, and with
  // `for_ever` all after it.
  void fail_at(int64_t at, int error, bool for_ever) {
    const std::lock_guard lock(mutex_);
    fails_at_ = at;
    error_ = error;
    for_ever_ = for_ever;
  }
  int64_t calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  // Called before every read or write, without a lock.
  void watch(std::function<void()> told) { told_ = std::move(told); }

  // What a disk has after a crash. `keeps`: how much of a file, or whether an entry of a directory
  // (0 or 1), is there though it was not synced.
  template <typename Keeps>
  std::map<std::string, Bytes> after_crash(Keeps keeps) const {
    const std::lock_guard lock(mutex_);
    std::map<std::string, Bytes> found;
    for (const auto& [path, node] : nodes_) {
      if (node->directory || !survives(path, keeps)) continue;
      Bytes bytes = node->synced;
      if (node->bytes.size() > bytes.size()) {
        const size_t more = keeps(node->bytes.size() - bytes.size());
        bytes.insert(bytes.end(), node->bytes.begin() + static_cast<int64_t>(bytes.size()),
                     node->bytes.begin() + static_cast<int64_t>(bytes.size() + more));
      }
      found[path] = std::move(bytes);
    }
    return found;
  }
  // As the system shows it now.
  std::map<std::string, Bytes> contents() const {
    const std::lock_guard lock(mutex_);
    std::map<std::string, Bytes> found;
    for (const auto& [path, node] : nodes_) {
      if (!node->directory) found[path] = node->bytes;
    }
    return found;
  }
  bool has_directory(const std::string& path) const {
    const std::lock_guard lock(mutex_);
    const auto found = nodes_.find(path);
    return found != nodes_.end() && found->second->directory;
  }
  void put(const std::string& path, Bytes bytes) {
    const std::lock_guard lock(mutex_);
    for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1)) {
      add(path.substr(0, at), true)->kept = true;
    }
    const NodePtr node = add(path, false);
    node->bytes = node->synced = std::move(bytes);
    node->kept = true;
  }
  void flip(const std::string& path, size_t at) {
    const std::lock_guard lock(mutex_);
    nodes_.at(path)->bytes.at(at) ^= 0x10;
  }

  // ---- the calls ----
  Descriptor open(const std::string& path, int flags, mode_t) override {
    if (told_) told_();
    const std::lock_guard lock(mutex_);
    auto found = nodes_.find(path);
    const bool writes = (flags & O_CREAT) != 0;
    if (writes && !counted()) return Descriptor();
    if (found == nodes_.end()) {
      if (!writes || !nodes_.contains(parent(path))) return refused(ENOENT);
      add(path, false);
      found = nodes_.find(path);
    }
    if ((flags & O_TRUNC) != 0) found->second->bytes.clear();
    Descriptor made = files::open("/dev/null", O_RDONLY);
    open_[made.get()] = found->second;
    return made;
  }
  bool size_of(const Descriptor& file, uint64_t* size_bytes) override {
    const std::lock_guard lock(mutex_);
    *size_bytes = open_.at(file.get())->bytes.size();
    return true;
  }
  ssize_t read_at(const Descriptor& file, void* to, size_t size_bytes, uint64_t offset) override {
    if (told_) told_();
    const std::lock_guard lock(mutex_);
    const Bytes& bytes = open_.at(file.get())->bytes;
    if (offset >= bytes.size()) return 0;
    // In pieces, as a file system may.
    const size_t count = std::min({size_bytes, bytes.size() - offset, size_t{100000}});
    std::memcpy(to, bytes.data() + offset, count);
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const Descriptor& file, const void* from, size_t size_bytes) override {
    if (told_) told_();
    const std::lock_guard lock(mutex_);
    if (!counted()) return -1;
    Bytes& bytes = open_.at(file.get())->bytes;
    const size_t count = std::min<size_t>(size_bytes, 300000);
    const auto* begin = static_cast<const uint8_t*>(from);
    bytes.insert(bytes.end(), begin, begin + count);
    return static_cast<ssize_t>(count);
  }
  void begin_sync(const Descriptor&) override {}
  bool sync(const Descriptor& file) override {
    const std::lock_guard lock(mutex_);
    if (!counted()) return false;
    const NodePtr& node = open_.at(file.get());
    node->synced = node->bytes;
    for (auto& [path, other] : nodes_) {
      if (node->directory && parent(path) == node->path) other->kept = true;
    }
    return true;
  }
  bool make_directory(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    if (nodes_.contains(path)) return failed(EEXIST);
    if (!nodes_.contains(parent(path))) return failed(ENOENT);
    if (!counted()) return false;
    add(path, true);
    return true;
  }
  bool remove(const std::string& path) override { return take_away(path, false); }
  bool remove_directory(const std::string& path) override {
    {
      const std::lock_guard lock(mutex_);
      const bool full = std::any_of(nodes_.begin(), nodes_.end(),
                                    [&](const auto& entry) { return parent(entry.first) == path; });
      if (full) return failed(ENOTEMPTY);
    }
    return take_away(path, true);
  }

 private:
  struct Node {
    std::string path;
    bool directory = false;
    bool kept = false;  // its entry is on the disk
    Bytes bytes;
    Bytes synced;
  };
  using NodePtr = std::shared_ptr<Node>;

  static std::string parent(const std::string& path) {
    const size_t slash = path.find_last_of('/');
    return slash == 0 ? "/" : path.substr(0, slash);
  }
  static bool failed(int error) {
    errno = error;
    return false;
  }
  static Descriptor refused(int error) {
    errno = error;
    return Descriptor();
  }
  NodePtr add(const std::string& path, bool directory) {
    NodePtr& node = nodes_[path];
    if (node == nullptr) node = std::make_shared<Node>();
    node->path = path;
    node->directory = directory;
    return node;
  }
  bool take_away(const std::string& path, bool directory) {
    const std::lock_guard lock(mutex_);
    const auto found = nodes_.find(path);
    if (found == nodes_.end() || found->second->directory != directory) return failed(ENOENT);
    if (!counted()) return false;
    nodes_.erase(found);
    return true;
  }
  // Counts a call that changes something; false, with errno, where it is to fail.
  bool counted() {
    const int64_t number = calls_++;
    if (fails_at_ < 0 || number < fails_at_ || (number > fails_at_ && !for_ever_)) return true;
    errno = error_;
    return false;
  }
  template <typename Keeps>
  bool survives(const std::string& path, Keeps& keeps) const {
    for (std::string at = path; at != "/"; at = parent(at)) {
      const auto found = nodes_.find(at);
      if (found == nodes_.end()) return false;
      if (!found->second->kept && keeps(1) == 0) return false;
    }
    return true;
  }

  mutable std::mutex mutex_;
  std::function<void()> told_;
  std::map<std::string, NodePtr> nodes_{{"/", make_root()}};
  std::map<int, NodePtr> open_;
  int64_t calls_ = 0;
  int64_t fails_at_ = -1;
  int error_ = 0;
  bool for_ever_ = false;

  static NodePtr make_root() {
    auto root = std::make_shared<Node>();
    root->path = "/";
    root->directory = root->kept = true;
    return root;
  }
};

}  // namespace cpudist::testing
