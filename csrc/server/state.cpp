// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "server/state.h"

#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "server/replies.h"

namespace cpudist::server {

ParamState::ParamState(uint32_t param_set, const wire::ParamSetLayout& decoded,
                       ServerShared& of_server)
    : id(param_set),
      layout(decoded),
      tensor_count(wire::parameter_count(layout) + layout.tables.size()),
      shared(of_server),
      refused_(payload_of(no_memory("it has none left"))),
      halved_(half_way("it has no memory left")),
      halved_payload_(payload_of(halved_)) {}

ParamState::~ParamState() = default;

void ParamState::count_update(const Pushes& pushes) {
  ++version.round;
  for (const auto& [rank, push] : pushes) {
    version.samples += push.view.header.samples;
    version.steps += push.view.header.steps;
    markers.pushed(rank, push.ticket.incarnation);
  }
  shared.counters.rounds.fetch_add(1);
}

void ParamState::set_version(const wire::Version& loaded) {
  for (const auto& block : store.blocks) {
    if (block != nullptr) block->renumber(version.round, loaded.round);
  }
  for (const auto& table : store.tables) table->renumber(version.round, loaded.round);
  version = loaded;
  markers.restart();
}

std::vector<uint32_t> ParamState::every_block() const {
  std::vector<uint32_t> blocks;
  for (const auto& block : store.blocks) {
    if (block != nullptr) blocks.push_back(block->id());
  }
  return blocks;
}

Buffer ParamState::dense_values(const std::vector<uint32_t>& blocks) const {
  return std::move(fill_dense(blocks, {}).payload);
}

Buffer ParamState::dense_averages() const {
  const std::vector<uint32_t> blocks = every_block();
  wire::FilledPush reply = fill_dense(blocks, {});
  for (size_t i = 0; i < blocks.size(); ++i) {
    store.blocks[blocks[i]]->read_average(version.round, reply.blocks[i]);
  }
  return std::move(reply.payload);
}

wire::FilledPush ParamState::fill_dense(const std::vector<uint32_t>& blocks,
                                        std::span<const wire::TableRef> tables) const {
  std::vector<wire::BlockRef> refs;
  refs.reserve(blocks.size());
  for (const uint32_t block : blocks) {
    wire::BlockRef ref;
    ref.block = block;
    ref.size_bytes = store.blocks[block]->weight().size();
    refs.push_back(ref);
  }
  wire::FilledPush reply =
      wire::layout_dense(version, refs, shared.memory.pool(), tables, markers.number());
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto weight = store.blocks[blocks[i]]->weight();
    if (!weight.empty()) std::memcpy(reply.blocks[i], weight.data(), weight.size());
  }
  return reply;
}

Answer ParamState::form_of(const SharedPayload& plain, wire::SectionKind kind, const Push& push,
                           CodedForms* made) const {
  if (!push.coding) return plain;
  SharedPayload& coded = (*made)[push.coding->reply];
  if (coded == nullptr) {
    const wire::Coding coding{push.coding->reply, push.coding->reply};
    coded = std::make_shared<const Buffer>(
        code_sections(kind, plain->bytes(), layout, coding, shared.memory.pool()));
  }
  return {coded, true};
}

void ParamState::answer_round(const Ticket& ticket, uint64_t round, Outbox& outbox) const {
  shared.sequencer.finish(ticket, encode(wire::RoundReply{round, ready}), outbox);
}

Error ParamState::no_memory(const char* cause) const {
  return {ErrorCode::kOverloaded,
          "an update of parameter set " + std::to_string(id) + " finds no memory on server " +
              std::to_string(shared.options.shard_id) + ": " + cause +
              "; nothing of it was applied. Use more servers, or hosts with more memory"};
}

SharedPayload ParamState::refusal(const std::exception& cause) const noexcept {
  try {
    const auto* told = dynamic_cast<const Error*>(&cause);
    return payload_of(told == nullptr ? no_memory(cause.what()) : *told);
  } catch (const std::bad_alloc&) {
    return refused_;
  }
}

Error ParamState::half_way(const char* cause) const {
  return {ErrorCode::kInternal, "applying an update of parameter set " + std::to_string(id) +
                                    " failed half way on server " +
                                    std::to_string(shared.options.shard_id) + ": " + cause +
                                    "; its values cannot be used any more. Start again"};
}

SharedPayload ParamState::break_off(const std::exception& cause) noexcept {
  try {
    const Error error = half_way(cause.what());
    SharedPayload payload = payload_of(error);
    broken = error;
    return payload;
  } catch (const std::bad_alloc&) {
    broken = halved_;
    return halved_payload_;
  }
}

SharedPayload ParamState::broken_payload() const noexcept {
  try {
    return payload_of(*broken);
  } catch (const std::bad_alloc&) {
    return halved_payload_;
  }
}

}  // namespace cpudist::server
