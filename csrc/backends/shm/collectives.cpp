// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The collectives: first those that only move bytes.
#include "backends/shm/collectives.h"

#include <string>
#include <vector>

#include "backends/shm/pieces.h"
#include "base/errors.h"

namespace cpudist::shm {

namespace {

void post_piece(Channel& channel, const Call& call, size_t begin) {
  if (begin == 0) {
    channel.post(header_of(call));
  } else {
    channel.post();
  }
}

Task barrier(Channel& channel, const Call& call) {
  channel.post(header_of(call));
  co_await Until{channel, channel.all()};
  channel.check_headers();
}

Task broadcast(Channel& channel, const Call& call) {
  const size_t size = call.size_bytes();
  const size_t piece = piece_bytes(channel, size);
  const bool is_root = channel.rank() == call.root;
  size_t begin = 0;
  do {
    const size_t length = std::min(piece, size - begin);
    const Condition free = channel.flip();
    if (is_root) {
      co_await Until{channel, free, false};
      copy_bytes(channel.slot(call.root), at(call.in, begin), length);
    }
    post_piece(channel, call, begin);
    co_await Until{channel, begin == 0 ? channel.all() : channel.from(call.root)};
    if (begin == 0) channel.check_headers();
    if (!is_root) copy_bytes(at(call.out, begin), channel.slot(call.root), length);
    begin += length;
  } while (begin < size);
}

// all_gather, and gather, where only the root has `outs`.
Task gather(Channel& channel, const Call& call) {
  const size_t size = call.size_bytes();
  const size_t piece = piece_bytes(channel, size);
  const bool receives = !call.outs.empty();
  size_t begin = 0;
  do {
    const size_t length = std::min(piece, size - begin);
    const Condition free = channel.flip();
    co_await Until{channel, free, false};
    copy_bytes(channel.slot(channel.rank()), at(call.in, begin), length);
    post_piece(channel, call, begin);
    if (receives || begin == 0) co_await Until{channel, channel.all()};
    if (begin == 0) channel.check_headers();
    for (int rank = 0; receives && rank < channel.size(); ++rank) {
      const void* from = rank == channel.rank() ? at(call.in, begin) : channel.slot(rank);
      copy_bytes(at(call.outs[static_cast<size_t>(rank)], begin), from, length);
    }
    begin += length;
  } while (begin < size);
}

Task scatter(Channel& channel, const Call& call) {
  const size_t size = call.size_bytes();
  const size_t ranks = static_cast<size_t>(channel.size());
  const size_t piece = piece_bytes(channel, size, ranks);
  const bool is_root = channel.rank() == call.root;
  const size_t me = static_cast<size_t>(channel.rank());
  size_t begin = 0;
  do {
    const size_t length = std::min(piece, size - begin);
    const Condition free = channel.flip();
    if (is_root) {
      co_await Until{channel, free, false};
      for (size_t rank = 0; rank < ranks; ++rank) {
        copy_bytes(at(channel.slot(call.root), rank * piece), at(call.ins[rank], begin), length);
      }
    }
    post_piece(channel, call, begin);
    co_await Until{channel, begin == 0 ? channel.all() : channel.from(call.root)};
    if (begin == 0) channel.check_headers();
    const void* from = is_root ? at(call.ins[me], begin)
                               : static_cast<const void*>(at(channel.slot(call.root), me * piece));
    copy_bytes(at(call.out, begin), from, length);
    begin += length;
  } while (begin < size);
}

// What a rank sends to and expects from each, in bytes: in front of its first piece.
void put_counts(const Channel& channel, const Call& call) {
  std::byte* slot = channel.slot(channel.rank());
  const size_t bytes = call.in_bytes.size() * sizeof(uint64_t);
  copy_bytes(slot, call.in_bytes.data(), bytes);
  copy_bytes(slot + bytes, call.out_bytes.data(), bytes);
}

uint64_t count_at(const Channel& channel, int rank, size_t index) {
  uint64_t count = 0;
  std::memcpy(&count, channel.slot(rank) + index * sizeof(count), sizeof(count));
  return count;
}

// Returns the largest message between two ranks. Throws Error(kConfigMismatch) on every rank
// if one expects another number of bytes than it is sent.
size_t checked_counts(const Channel& channel) {
  const size_t ranks = static_cast<size_t>(channel.size());
  size_t largest = 0;
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      const uint64_t sent = count_at(channel, static_cast<int>(from), to);
      const uint64_t expected = count_at(channel, static_cast<int>(to), ranks + from);
      largest = std::max<size_t>(largest, sent);
      if (sent == expected) continue;
      throw Error(ErrorCode::kConfigMismatch,
                  "backend shm: all_to_all: " + channel.name(static_cast<int>(from)) + " sends " +
                      std::to_string(sent) + " bytes to " + channel.name(static_cast<int>(to)) +
                      ", which expects " + std::to_string(expected) +
                      ". Make the split sizes fit.");
    }
  }
  return largest;
}

Task all_to_all(Channel& channel, const Call& call) {
  const size_t ranks = static_cast<size_t>(channel.size());
  const size_t me = static_cast<size_t>(channel.rank());
  const size_t counts = (2 * ranks * sizeof(uint64_t) + kLine - 1) / kLine * kLine;
  const size_t room = (channel.slot_bytes() - counts) / ranks / kLine * kLine;
  const auto length_at = [](size_t size, size_t begin, size_t piece) {
    return begin < size ? std::min(piece, size - begin) : size_t{0};
  };
  size_t largest = 0, begin = 0;
  do {
    const Condition free = channel.flip();
    co_await Until{channel, free, false};
    std::byte* slot = channel.slot(channel.rank());
    if (begin == 0) put_counts(channel, call);
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (rank == me) continue;
      const size_t length = length_at(call.in_bytes[rank], begin, room);
      copy_bytes(slot + counts + rank * room, at(call.ins[rank], begin), length);
    }
    post_piece(channel, call, begin);
    co_await Until{channel, channel.all()};
    if (begin == 0) {
      channel.check_headers();
      largest = checked_counts(channel);
    }
    for (size_t rank = 0; rank < ranks; ++rank) {
      const size_t length = length_at(call.out_bytes[rank], begin, room);
      const void* from = channel.slot(static_cast<int>(rank)) + counts + me * room;
      copy_bytes(at(call.outs[rank], begin), rank == me ? at(call.ins[me], begin) : from, length);
    }
    begin += room;
  } while (begin < largest);
}

// -- reductions

enum class Memory { kOwn, kShared, kMixed };

// Where the elements of every rank can be read: the own ones where the user has them.
using Sources = std::vector<const void*>;

Sources slots_of(const Channel& channel, const void* own) {
  Sources sources(static_cast<size_t>(channel.size()));
  for (int rank = 0; rank < channel.size(); ++rank) {
    sources[static_cast<size_t>(rank)] = rank == channel.rank() ? own : channel.slot(rank);
  }
  return sources;
}

// Of a buffer that all ranks share: each sums its part, and writes it to all ranks'.
void sum_in_place(const Channel& channel, const Call& call, const SharedBuffer& buffer,
                  size_t offset) {
  const size_t width = size_of(call.dtype);
  const Part part = part_of(call.count, width, channel.rank(), channel.size());
  const size_t begin = offset + part.begin * width;
  // Piece by piece, so that what is copied to the others is still in cache.
  const size_t step = kPieceBytes / width;
  for (size_t done = 0; done < part.size; done += step) {
    const size_t count = std::min(step, part.size - done);
    const size_t place = begin + done * width;
    Sources sources;
    for (const SharedMemory& one : buffer.parts) sources.push_back(at(one.data(), place));
    std::byte* own = at(buffer.own(), place);
    reduce(call.dtype, call.reduction, own, sources.data(), channel.size(), count,
           divisor_of(channel, call));
    for (const SharedMemory& one : buffer.parts)
      copy_bytes(at(one.data(), place), own, count * width);
  }
}

Memory memory_of(const Channel& channel) {
  const Header& first = channel.header(0);
  bool any = false, all = true;
  for (int rank = 0; rank < channel.size(); ++rank) {
    const Header& one = channel.header(rank);
    any = any || one.buffer != 0;
    all = all && one.buffer != 0 && one.buffer == first.buffer && one.offset == first.offset;
  }
  if (all) return Memory::kShared;
  return any ? Memory::kMixed : Memory::kOwn;
}

// The own part of a piece that is in the ranks' slots; the sum takes the place of the own bytes.
void sum_part(const Channel& channel, const Call& call, size_t count) {
  const size_t width = size_of(call.dtype);
  const Part part = part_of(count, width, channel.rank(), channel.size());
  Sources sources;
  for (int rank = 0; rank < channel.size(); ++rank) {
    sources.push_back(at(channel.slot(rank), part.begin * width));
  }
  reduce(call.dtype, call.reduction, at(channel.slot(channel.rank()), part.begin * width),
         sources.data(), channel.size(), part.size, divisor_of(channel, call));
}

void copy_parts(const Channel& channel, const Call& call, size_t count, std::byte* out) {
  const size_t width = size_of(call.dtype);
  for (int rank = 0; rank < channel.size(); ++rank) {
    const Part part = part_of(count, width, rank, channel.size());
    copy_bytes(out + part.begin * width, at(channel.slot(rank), part.begin * width),
               part.size * width);
  }
}

Task all_reduce(Channel& channel, const Buffers& buffers, const Call& call) {
  const size_t size = call.size_bytes(), width = size_of(call.dtype);
  const size_t piece = piece_bytes(channel, size);
  const bool shares = channel.size() >= kSharingRanks && size >= kSharedBytes;
  Header header = header_of(call);
  std::shared_ptr<SharedBuffer> buffer;
  if (size > kCopiedBytes && call.in == call.out) buffer = buffers.find(call.in, size);
  if (buffer != nullptr) {
    header.buffer = buffer->id;
    header.offset = static_cast<uint64_t>(static_cast<const std::byte*>(call.in) - buffer->own());
  }
  const Condition free = channel.flip();
  co_await Until{channel, free, false};
  if (buffer == nullptr) copy_bytes(channel.slot(channel.rank()), call.in, std::min(piece, size));
  channel.post(header);
  co_await Until{channel, channel.all()};
  channel.check_headers();
  const Memory memory = memory_of(channel);
  if (memory == Memory::kShared) {
    sum_in_place(channel, call, *buffer, header.offset);
    channel.post();
    co_await Until{channel, channel.all()};
    co_return;
  }
  bool deposited = memory == Memory::kOwn;
  for (size_t begin = 0; begin < size; begin += piece) {
    const size_t length = std::min(piece, size - begin);
    if (!deposited) {
      const Condition next = channel.flip();
      co_await Until{channel, next, false};
      copy_bytes(channel.slot(channel.rank()), at(call.in, begin), length);
      channel.post();
      co_await Until{channel, channel.all()};
    }
    deposited = false;
    if (shares) {
      sum_part(channel, call, length / width);
      channel.post();
      co_await Until{channel, channel.all()};
      copy_parts(channel, call, length / width, at(call.out, begin));
    } else {
      const Sources sources = slots_of(channel, at(call.in, begin));
      reduce(call.dtype, call.reduction, at(call.out, begin), sources.data(), channel.size(),
             length / width, divisor_of(channel, call));
    }
  }
}

Task reduce_to_root(Channel& channel, const Call& call) {
  const size_t size = call.size_bytes(), width = size_of(call.dtype);
  const size_t piece = piece_bytes(channel, size);
  const bool is_root = channel.rank() == call.root;
  size_t begin = 0;
  do {
    const size_t length = std::min(piece, size - begin);
    const Condition free = channel.flip();
    if (!is_root) {
      co_await Until{channel, free, false};
      copy_bytes(channel.slot(channel.rank()), at(call.in, begin), length);
    }
    post_piece(channel, call, begin);
    if (is_root || begin == 0) co_await Until{channel, channel.all()};
    if (begin == 0) channel.check_headers();
    if (is_root) {
      const Sources sources = slots_of(channel, at(call.in, begin));
      reduce(call.dtype, call.reduction, at(call.out, begin), sources.data(), channel.size(),
             length / width, divisor_of(channel, call));
    }
    begin += length;
  } while (begin < size);
}

// Every rank's buffer holds a region for each other rank.
Task reduce_scatter(Channel& channel, const Call& call) {
  const size_t size = call.size_bytes(), width = size_of(call.dtype);
  const size_t ranks = static_cast<size_t>(channel.size());
  const size_t me = static_cast<size_t>(channel.rank());
  const size_t piece = piece_bytes(channel, size, ranks);
  size_t begin = 0;
  do {
    const size_t length = std::min(piece, size - begin);
    const Condition free = channel.flip();
    co_await Until{channel, free, false};
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (rank == me) continue;
      copy_bytes(at(channel.slot(channel.rank()), rank * piece), at(call.ins[rank], begin), length);
    }
    post_piece(channel, call, begin);
    co_await Until{channel, channel.all()};
    if (begin == 0) channel.check_headers();
    Sources sources = slots_of(channel, at(call.ins[me], begin));
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (rank != me) sources[rank] = at(sources[rank], me * piece);
    }
    reduce(call.dtype, call.reduction, at(call.out, begin), sources.data(), channel.size(),
           length / width, divisor_of(channel, call));
    begin += length;
  } while (begin < size);
}

}  // namespace

Task make_task(Channel& channel, const Buffers& buffers, const Call& call) {
  if (call.reduction != Reduction::kNone) {
    check_reducible(call.dtype, call.reduction, call.average);
  }
  channel.begin_call();
  switch (call.kind) {
    case Kind::kBarrier:
      return barrier(channel, call);
    case Kind::kAllReduce:
      return all_reduce(channel, buffers, call);
    case Kind::kReduce:
      return reduce_to_root(channel, call);
    case Kind::kBroadcast:
      return broadcast(channel, call);
    case Kind::kAllGather:
    case Kind::kGather:
      return gather(channel, call);
    case Kind::kScatter:
      return scatter(channel, call);
    case Kind::kReduceScatter:
      return reduce_scatter(channel, call);
    case Kind::kAllToAll:
      return all_to_all(channel, call);
  }
  throw Error(ErrorCode::kInternal, "backend shm: an unknown collective");
}

}  // namespace cpudist::shm
