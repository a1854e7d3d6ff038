// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Coded payloads: what push.h and rows.h lay out, with keys sorted and coded and values in the
// dtype of the wire. Sender and receiver work on plain payloads; these functions stand between them
// and the link. docs/wire.md, "Coded payloads", gives the bytes.
//
// Decoding is a pure function of the bytes and the layout: it throws Error(kProtocol) before it
// allocates more than the bytes can be the code of.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "wire/dtype.h"
#include "wire/layout.h"
#include "wire/rows.h"
#include "wire/sections.h"

namespace cpudist::wire {

// How a payload is coded, and in what its answer is to bring values.
struct Coding {
  WireDType values = WireDType::kFloat32;
  WireDType reply = WireDType::kFloat32;
};

struct Decoded {
  Buffer payload;  // plain
  Coding coding;
};

// Memory for the plain payload; an empty buffer refuses it with Error(kOverloaded).
using Allocate = std::function<Buffer(uint64_t size_bytes)>;
Allocate allocate_from(Pool pool);

// `plain` is a whole payload that this process has made. Values that were rounded to the dtype
// before lose nothing.
Buffer code_sections(SectionKind kind, std::span<const uint8_t> plain, const ParamSetLayout& layout,
                     const Coding& coding, const Pool& pool);
// A dense reply without rows, of values where they lie: what the first one makes of layout_dense().
// `blocks` in increasing order.
Buffer code_dense(Version version, uint64_t cut_wanted, std::span<const DenseSection> blocks,
                  const ParamSetLayout& layout, const Coding& coding, const Pool& pool);
// Keys come out in increasing order.
Decoded decode_sections(SectionKind kind, std::span<const uint8_t> coded,
                        const ParamSetLayout& layout, const Allocate& allocate);

// The keys of each table must increase: the answer has the rows in their order.
Buffer code_pull(std::span<const uint8_t> plain, const ParamSetLayout& layout, const Coding& coding,
                 const Pool& pool);
Decoded decode_coded_pull(std::span<const uint8_t> coded, const ParamSetLayout& layout,
                          const Allocate& allocate);

// The answer to a pull of these tables. That in float32 is the plain one behind its coding: it is
// filled in place, and read in place.
FilledRows layout_coded_rows(const Coding& coding, Version version, std::span<const TableRef> refs,
                             const Pool& pool);
// The plain bytes in an answer, empty if they are to be decoded.
std::span<const uint8_t> plain_rows_in(std::span<const uint8_t> coded);
Buffer code_rows(std::span<const uint8_t> plain, std::span<const TableRef> asked,
                 const Coding& coding, const Pool& pool);
Decoded decode_coded_rows(std::span<const uint8_t> coded, std::span<const TableRef> asked,
                          const Allocate& allocate);

// A pull of dense values has neither keys nor values.
Buffer encode_coded_pull_dense(const Coding& coding, uint64_t step);
uint64_t decode_coded_pull_dense(std::span<const uint8_t> coded, Coding* coding);

// Sorts keys that are not negative.
void sort_keys(std::span<int64_t> keys);

}  // namespace cpudist::wire
