// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Memory that the ranks of one host share, and how it is laid out. It has no name in any file
// system: others open it through /proc while its maker holds the descriptor, so that nothing is
// left behind however a process ends.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "backends/shm/types.h"

namespace cpudist::shm {

// Anonymous memory, mapped; the descriptor is closed by seal().
class SharedMemory {
 public:
  SharedMemory() = default;
  // Throws Error(kOverloaded) when the system has no memory for it.
  static SharedMemory create(size_t size_bytes);
  // Maps what process `pid` holds as descriptor `fd`; an empty one if that cannot be opened.
  static SharedMemory open(int pid, int fd, size_t size_bytes);
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }
  int fd() const { return fd_; }
  explicit operator bool() const { return data_ != nullptr; }
  // Closes the descriptor: nobody else can open it from now on.
  void seal();

 private:
  std::byte* data_ = nullptr;
  size_t size_bytes_ = 0;
  int fd_ = -1;
};

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
constexpr uint64_t kMagic = 0x63707564'73686d31ULL;
constexpr size_t kTextBytes = 512;
constexpr size_t kCpuWords = 16;

// What the other ranks of the host see of one rank.
struct alignas(kLine) RankLine {
  std::atomic<uint32_t> posted{0};   // events this rank has come to
  std::atomic<uint32_t> waiters{0};  // that sleep on `posted`
  std::atomic<uint32_t> left{0};     // 1: it has closed the group
  std::atomic<int32_t> pid{0};
  alignas(kLine) std::array<Header, 2> headers;  // of its calls, by their parity
  alignas(kLine) std::atomic<uint32_t> doorbell{0};
  std::atomic<uint32_t> door_waiters{0};
};

// One direction between two ranks: bytes in order. `head` counts what was written, `tail` what was
// read.
struct alignas(kLine) Ring {
  std::atomic<uint64_t> head{0};
  std::atomic<uint32_t> given_up{0};  // 1: its writer takes no part in messages with its reader
  alignas(kLine) std::atomic<uint64_t> tail{0};
};

struct Control {
  uint64_t magic = 0;
  uint64_t nonce = 0;
  std::atomic<uint32_t> broken{0};  // 1: being written, 2: `code` and `text` say why
  uint32_t code = 0;
  std::array<char, kTextBytes> text{};
  std::array<std::atomic<uint64_t>, kCpuWords> cpus{};  // that some rank may run on
};

// Where things are in the memory of a group of `size` ranks.
struct Layout {
  explicit Layout(int ranks);
  int size;
  size_t slot_bytes;  // of each of a rank's two buffers
  size_t ring_bytes;  // of each direction between two ranks
  size_t lines, rings, slots, ring_data, total;
};

// The memory of one group.
class Segment {
 public:
  static Segment none(int ranks) { return Segment(SharedMemory(), ranks); }
  static Segment create(int ranks, uint64_t nonce);
  // An empty one if it cannot be opened or is another group's.
  static Segment open(int ranks, uint64_t nonce, int pid, int fd);

  explicit operator bool() const { return static_cast<bool>(*memory_); }
  int fd() const { return memory_->fd(); }
  void seal() { memory_->seal(); }
  const Layout& layout() const { return layout_; }
  Control& control() const;
  RankLine& line(int rank) const;
  std::byte* slot(int rank, unsigned buffer) const;
  Ring& ring(int from, int to) const;
  std::byte* ring_data(int from, int to) const;

 private:
  Segment(SharedMemory memory, int ranks)
      : memory_(std::make_shared<SharedMemory>(std::move(memory))), layout_(ranks) {}
  std::shared_ptr<SharedMemory> memory_;  // ranks that are threads of one process share it
  Layout layout_;
};

}  // namespace cpudist::shm
