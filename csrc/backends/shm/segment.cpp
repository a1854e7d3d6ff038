// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Making, finding and mapping shared memory.
#include "backends/shm/segment.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/files.h"

namespace cpudist::shm {

namespace {

constexpr size_t kSlotBytes = size_t{1} << 20;
constexpr size_t kRingBytes = size_t{256} << 10;

size_t rounded(size_t size_bytes) { return (size_bytes + kPage - 1) / kPage * kPage; }

[[noreturn]] void refuse(const char* what, size_t size_bytes) {
  throw Error(ErrorCode::kOverloaded,
              std::string("shared memory of ") + std::to_string(size_bytes) + " bytes: " + what +
                  ": " + std::strerror(errno) +
                  "; allow this process more memory and descriptors (the container's "
                  "limits, ulimit -n, ulimit -v)");
}

std::byte* map(int fd, size_t size_bytes) {
  void* found = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return found == MAP_FAILED ? nullptr : static_cast<std::byte*>(found);
}

}  // namespace

SharedMemory SharedMemory::create(size_t size_bytes) {
  SharedMemory made;
  made.size_bytes_ = rounded(std::max<size_t>(size_bytes, 1));
  made.fd_ = ::memfd_create("cpudist", MFD_CLOEXEC);
  if (made.fd_ < 0) refuse("memfd_create", size_bytes);
  if (::ftruncate(made.fd_, static_cast<off_t>(made.size_bytes_)) != 0) {
    refuse("ftruncate", size_bytes);
  }
  made.data_ = map(made.fd_, made.size_bytes_);
  if (made.data_ == nullptr) refuse("mmap", size_bytes);
  return made;
}

SharedMemory SharedMemory::open(int pid, int fd, size_t size_bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  SharedMemory found;
  const Descriptor opened = files::open(path, O_RDWR);
  if (opened.get() < 0) return found;
  const size_t wanted = rounded(std::max<size_t>(size_bytes, 1));
  struct stat status{};
  if (files::read_status(opened, &status) && S_ISREG(status.st_mode) &&
      static_cast<size_t>(status.st_size) == wanted) {
    found.data_ = map(opened.get(), wanted);
    found.size_bytes_ = wanted;
  }
  return found;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, size_bytes_);
  seal();
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      fd_(std::exchange(other.fd_, -1)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

void SharedMemory::seal() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Layout::Layout(int ranks) : size(ranks) {
  const size_t n = static_cast<size_t>(ranks);
  slot_bytes = kSlotBytes;
  ring_bytes = kRingBytes;
  lines = rounded(sizeof(Control));
  rings = lines + rounded(n * sizeof(RankLine));
  slots = rings + rounded(n * n * sizeof(Ring));
  ring_data = slots + n * 2 * slot_bytes;
  total = ring_data + n * n * ring_bytes;
}

Segment Segment::create(int ranks, uint64_t nonce) {
  Segment made(SharedMemory::create(Layout(ranks).total), ranks);
  for (int rank = 0; rank < ranks; ++rank) new (&made.line(rank)) RankLine;
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) new (&made.ring(from, to)) Ring;
  }
  auto* control = new (&made.control()) Control;
  control->nonce = nonce;
  control->magic = kMagic;
  return made;
}

Segment Segment::open(int ranks, uint64_t nonce, int pid, int fd) {
  Segment found(SharedMemory::open(pid, fd, Layout(ranks).total), ranks);
  if (found && (found.control().magic != kMagic || found.control().nonce != nonce)) {
    return none(ranks);
  }
  return found;
}

Control& Segment::control() const { return *reinterpret_cast<Control*>(memory_->data()); }

RankLine& Segment::line(int rank) const {
  return reinterpret_cast<RankLine*>(memory_->data() + layout_.lines)[rank];
}

std::byte* Segment::slot(int rank, unsigned buffer) const {
  const size_t index = static_cast<size_t>(rank) * 2 + buffer;
  return memory_->data() + layout_.slots + index * layout_.slot_bytes;
}

Ring& Segment::ring(int from, int to) const {
  return reinterpret_cast<Ring*>(memory_->data() + layout_.rings)[from * layout_.size + to];
}

std::byte* Segment::ring_data(int from, int to) const {
  const size_t index =
      static_cast<size_t>(from) * static_cast<size_t>(layout_.size) + static_cast<size_t>(to);
  return memory_->data() + layout_.ring_data + index * layout_.ring_bytes;
}

}  // namespace cpudist::shm
