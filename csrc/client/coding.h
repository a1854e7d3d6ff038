// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What stands between the plain payloads of a client and its links: which of them are coded, and
// what lossy pushes hold back.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "client/link.h"
#include "kernels/aligned.h"
#include "wire/codec/codec.h"
#include "wire/messages.h"

namespace cpudist::client {

struct ClientSet;
class Session;

// A payload as it goes to a server.
struct Outbound {
  Buffer payload;
  bool coded = false;
};

// Whether payloads to and from this server are coded: where values lose precision always, so that
// what is sent does not depend on where a server runs; else where bytes cross a network.
bool is_coded(const ClientSet& set, const Session& session, uint32_t server);

// Whether the rows of pushes are to stand in the order of their keys: so do coded ones. A norm is
// summed in that order on every link, so that its bits are the same.
bool orders_rows(const ClientSet& set, const Session& session, bool clips_norm);

// `values`: what the push was rounded to.
Outbound code_push(const ClientSet& set, const Session& session, uint32_t server, Buffer plain,
                   wire::WireDType values, const wire::Pool& pool);
// `exact`: the rows are wanted as the server has them.
Outbound code_pull_for(const ClientSet& set, const Session& session, uint32_t server, Buffer plain,
                       bool exact, const wire::Pool& pool);
Outbound pull_dense_from(const ClientSet& set, const Session& session, uint32_t server, bool exact);

// Makes the reply of a push or of a pull of dense values a plain one.
void decode_reply(const ClientSet& set, Request* request, const wire::Pool& pool);
// The rows of the reply of a pull; they live as long as it.
std::vector<std::span<const float>> rows_of_reply(std::span<const wire::TableRef> asked,
                                                  Request* request, const wire::Pool& pool,
                                                  wire::Version* version);

// What was rounded off of gradients that were sent, by row and block: the next gradient takes it
// along. Memory: the rows that were ever pushed, and 4 bytes per row of a table.
//
// Thread safety: one caller at a time, the one that sends pushes.
class Residues {
 public:
  explicit Residues(const wire::ParamSetLayout& layout);
  // Adds what is held back to the gradients of a packed push, rounds them to what travels, and
  // holds back the difference. A push of weight 0 is only rounded.
  void round(Buffer* push);

 private:
  struct Rows {
    kernels::AlignedBuffer<uint32_t> slots;  // by key, 0: none yet
    std::vector<kernels::AlignedBuffer<float>> slabs;
    uint32_t count = 0;
  };
  static constexpr uint32_t kSlabRows = 4096;

  float* find(Rows& rows, int64_t key, uint32_t dim);
  void round_table(const wire::TableSection& section, float* gradients);
  void round_block_of(const wire::DenseSection& section, float* gradient);

  const wire::ParamSetLayout& layout_;
  std::map<uint32_t, Rows> tables_;
  std::map<uint32_t, kernels::AlignedBuffer<float>> blocks_;
};

}  // namespace cpudist::client
