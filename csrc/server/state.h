// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What all updates of one parameter set work on, whichever trainers they come from: the values of
// this server and how many updates they have had.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "server/shared.h"
#include "server/snapshot/gone_keys.h"
#include "server/snapshot/markers.h"
#include "server/update/push.h"
#include "wire/messages.h"

namespace cpudist::server {

class Replies;

// Thread safety: that of its ParamSet, whose lock is held.
struct ParamState {
  ParamState(uint32_t param_set, const wire::ParamSetLayout& decoded, ServerShared& of_server);
  ~ParamState();

  void count_update(const Pushes& pushes);
  // The values of now are those after these updates.
  void set_version(const wire::Version& loaded);
  // Where rows of a table have been freed; does not throw.
  using Freeing =
      std::function<void(const table::Table& table, std::span<const table::Freed> rows)>;
  // The end of an update of these pushes: looks at some records for each row that they name, in
  // every table that evicts rows. Where there is no memory for that, the next one does.
  void sweep(const Pushes& pushes, const Freeing& freeing) noexcept;
  // Looks at so many of the next records of a table. Throws std::bad_alloc; then nothing has gone.
  table::Swept sweep(table::Table& table, uint64_t records, uint64_t most, const Freeing& freeing);
  // Values are stored or loaded: what has gone until then does not count any more.
  void forget_gone() const noexcept;
  // What is asked for of tables and blocks. Throw kInvalidArgument where there is no such table.
  Buffer fetch(const wire::FetchRequest& request) const;
  Buffer fetch_run(const wire::FetchRun& request) const;
  wire::TableCounts table_counts(const wire::TableQuery& query) const;
  table::Table& table_of(const wire::TableQuery& query) const;
  std::vector<uint32_t> every_block() const;
  Buffer dense_values(const std::vector<uint32_t>& blocks) const;
  Buffer dense_averages() const;  // of every block
  wire::FilledPush fill_dense(const std::vector<uint32_t>& blocks,
                              std::span<const wire::TableRef> tables) const;
  // The same, coded: from where they lie, in one pass.
  Buffer coded_dense_values(const std::vector<uint32_t>& blocks, wire::WireDType dtype) const;
  // A reply to a push as its sender wants it. `made`: what was coded of the same payload before.
  using CodedForms = std::map<wire::WireDType, SharedPayload>;
  Answer form_of(const SharedPayload& plain, wire::SectionKind kind, const Push& push,
                 CodedForms* made) const;
  void answer_round(const Ticket& ticket, uint64_t round, Outbox& outbox) const;
  // Whether gradients may come before the push that they belong to: where pushes are of rounds, and
  // a cap of memory does not count what nobody may ever use.
  bool takes_parts() const;
  // What pushes are told, to be sent again, of whose update nothing was applied for lack of memory.
  // Where there is none for the cause either it was made with the set.
  SharedPayload refusal(const std::exception& cause) const noexcept;
  // An update failed half way: nobody can use the values any more. Returns what is told of that,
  // which needs no memory either.
  SharedPayload break_off(const std::exception& cause) noexcept;
  // What is told of what broke it.
  SharedPayload broken_payload() const noexcept;

  const uint32_t id;
  const wire::ParamSetLayout layout;
  const size_t tensor_count;  // dense parameters and tables
  ServerShared& shared;
  table::ParamStore store;
  std::vector<std::shared_ptr<GoneKeys>> gone;  // by table; null where no row goes
  // Of rounds whose commits are waited for: records that these name are in use.
  std::vector<const Pushes*> merged;
  wire::Version version;  // updates so far, and what is behind them
  bool ready = false;
  Markers markers;  // of cuts
  std::unique_ptr<Replies> replies;
  // An update failed half way, or trainers opened it with different layouts: nobody can use it.
  std::optional<Error> broken;

 private:
  std::vector<uint32_t> records_in_use(uint32_t table) const;
  Error no_memory(const char* cause) const;
  Error half_way(const char* cause) const;

  // Both for lack of memory, with what tells them.
  const SharedPayload refused_;
  const Error halved_;
  const SharedPayload halved_payload_;
};

}  // namespace cpudist::server
