// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What a cap on memory counts: bytes under way, which are given back soon; bytes that are kept for
// as long as their owner lives; lent ones, which their owner gives up when others need them; and
// spare ones, which whoever needs memory may have at once.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace cpudist {

// Thread safety: all members.
class MemoryCap : public std::enable_shared_from_this<MemoryCap> {
 public:
  // 0: it counts, and everything has room.
  explicit MemoryCap(uint64_t cap_bytes) : cap_bytes_(cap_bytes) {}

  // Bytes under way. Gives them back when it goes.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&&) noexcept = default;
    Reservation& operator=(Reservation&&) = delete;
    ~Reservation() {
      if (cap_) cap_->change(&MemoryCap::used_, -static_cast<int64_t>(size_bytes_));
    }
    uint64_t size_bytes() const { return cap_ ? size_bytes_ : 0; }

   private:
    friend class MemoryCap;
    Reservation(std::shared_ptr<MemoryCap> cap, uint64_t size_bytes)
        : cap_(std::move(cap)), size_bytes_(size_bytes) {}

    std::shared_ptr<MemoryCap> cap_;
    uint64_t size_bytes_ = 0;
  };

  // Bytes that are kept, at least those that were promised. One thread at a time.
  class Kept {
   public:
    explicit Kept(std::shared_ptr<MemoryCap> cap) : cap_(std::move(cap)) {}  // may be null
    ~Kept() { count(0, 0); }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;

    void promise(uint64_t size_bytes) noexcept { count(size_bytes_, size_bytes); }
    void add(uint64_t size_bytes) noexcept { count(size_bytes_ + size_bytes, promised_bytes_); }
    void sub(uint64_t size_bytes) noexcept { count(size_bytes_ - size_bytes, promised_bytes_); }
    // Whether so many more are promised, or have room beside everything that there is.
    bool has_room(uint64_t size_bytes) const;

   private:
    void count(uint64_t size_bytes, uint64_t promised_bytes) noexcept;

    const std::shared_ptr<MemoryCap> cap_;
    uint64_t promised_bytes_ = 0;
    uint64_t size_bytes_ = 0;
  };

  // Nothing when the cap would be exceeded, except for the only bytes under way besides
  // `waiting_bytes`: what waits may wait for them. Spare bytes do not count.
  std::optional<Reservation> reserve(uint64_t size_bytes, uint64_t waiting_bytes);
  // Whatever there is.
  Reservation reserve_anyhow(uint64_t size_bytes);
  void add_spare(int64_t size_bytes) noexcept { change(&MemoryCap::spare_, size_bytes); }
  // What is left beside all but spare bytes. False, and nothing is lent, where that is too little.
  bool lend(uint64_t size_bytes) noexcept;
  void give_back(uint64_t size_bytes) noexcept {
    change(&MemoryCap::lent_, -static_cast<int64_t>(size_bytes));
  }
  // Beside all that there is, spare and lent bytes included.
  bool has_room(uint64_t size_bytes) const;

  uint64_t cap_bytes() const { return cap_bytes_; }
  uint64_t used_bytes() const { return read(&MemoryCap::used_); }  // under way
  uint64_t kept_bytes() const { return read(&MemoryCap::kept_); }
  uint64_t lent_bytes() const { return read(&MemoryCap::lent_); }
  uint64_t spare_bytes() const { return read(&MemoryCap::spare_); }

 private:
  using Count = uint64_t MemoryCap::*;

  void change(Count count, int64_t by) noexcept {
    const std::lock_guard lock(mutex_);
    this->*count += static_cast<uint64_t>(by);
  }
  uint64_t read(Count count) const {
    const std::lock_guard lock(mutex_);
    return this->*count;
  }

  const uint64_t cap_bytes_;
  mutable std::mutex mutex_;
  uint64_t used_ = 0;
  uint64_t kept_ = 0;
  uint64_t lent_ = 0;
  uint64_t spare_ = 0;
};

}  // namespace cpudist
