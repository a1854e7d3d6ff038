// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Pushes of a parameter set that is updated on arrival: the training thread packs and queues them,
// a thread of the queue merges, sends, and takes the answers.
//
// Memory: the training thread alone touches the trainer's weights and gradients; a queued push owns
// its payloads. Locks: `mutex_` is never held while a request is sent or waited for.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/buffer.h"
#include "base/errors.h"
#include "base/wait.h"
#include "client/background.h"
#include "client/push/coding.h"
#include "client/push/cut.h"
#include "client/push/staleness.h"
#include "client/session.h"
#include "client/stats.h"
#include "wire/messages.h"

namespace cpudist::client {

struct SetState;

// Of a parameter set that is updated on arrival.
struct QueueOptions {
  uint32_t size = 1;        // pushes that may wait while one is on its way
  uint32_t max_merge = 1;   // of them that travel as one
  std::vector<bool> mean;   // per parameter group: merged by the mean, else by the sum
  uint32_t pull_every = 1;  // pushes between two replies with dense values
};

// Throws kInvalidArgument where a queue of this layout cannot have these.
void check_options(const QueueOptions& options, const wire::ParamSetLayout& layout);

// One step, packed: a payload per server. Or the marker of a cut, which is behind the pushes that
// were queued before it and merged with none.
struct QueuedPush {
  std::optional<wire::Cut> marker;
  uint64_t hold_ms = 0;  // the marker, see PushQueue::mark
  std::vector<Buffer> payloads;
  std::vector<kernels::OptimizerConfig> configs;
  std::vector<wire::Version>
      read;  // per server: of the oldest values that the gradient was computed on
  uint64_t samples = 0;
  wire::WireDType dtype = wire::WireDType::kFloat32;  // deltas: what they were rounded to
};

// Of steps whose pushes were not answered by all servers when their client ended. They are the last
// ones that were queued.
struct Unapplied {
  uint64_t steps = 0;  // that not all servers have applied
  uint64_t torn = 0;   // those of them that some have
};

class PushQueue final : public Background {
 public:
  // `sequenced` is the client's: one request in flight per server.
  PushQueue(Session& session, std::mutex& sequenced, std::shared_ptr<SetState> set,
            const QueueOptions& options, wire::Pool pool);
  ~PushQueue() override;  // stop()
  PushQueue(const PushQueue&) = delete;
  PushQueue& operator=(const PushQueue&) = delete;

  // ---- the training thread ----
  // Waits for room. An interrupt or a timeout ends the wait, not the push: it is queued, then
  // kInterrupted or kTimeout is thrown. What else throws leaves `push` as it is.
  void add(QueuedPush&& push);
  // Queues a marker, for which there is always room. Another one may be on its way: a cut may be
  // over for who began it, and the next one begun, before this trainer has heard of that.
  // `hold_ms`: how long the training thread may wait behind it for other trainers; then the marker
  // is taken back, and may be given again. 0: for as long as servers do.
  void mark(wire::Cut cut, uint64_t hold_ms = 0);
  // What a marker was answered with, once, the oldest first; nothing before.
  std::optional<CutAnswer> take_cut_answer();
  void drain() override { drain("flush"); }
  void drain(const char* what);  // which waits, for messages; as throw_failure()
  // Whether all pushes are, which a marker may wait behind; does not wait. Throws what the queue
  // failed with.
  bool is_answered();
  void drain_pushes(const char* what);  // until then
  // What the queue has failed with, and sends nothing any more; or once why servers have refused a
  // push, of which nothing is left to do: those behind it are sent.
  void throw_failure();
  // The newest dense values of every server since the last call; empty frames where there are none.
  std::vector<wire::Frame> take_arrived();
  // Whether the next push asks for dense values.
  bool next_wants_dense();

  // Pushes of steps that were put into it, ever.
  uint64_t added() const;
  // Ends it, for who was counted as lost: what came of the steps that were not answered.
  // `carried_out`: per server, the last request of this client that was.
  Unapplied end(std::span<const uint64_t> carried_out);

  uint64_t version() const;  // updates of server 0 with the last push that was applied
  // Steps of all trainers behind these updates, or `told` if more, and those of its own pushes that
  // server 0 has not answered yet.
  uint64_t steps(uint64_t told) const;
  void stop() override;
  void add_stats(ClientStats* stats) const override;

 private:
  void put(QueuedPush&& push);  // with the lock held
  void run();
  std::vector<QueuedPush> next_batch();
  void deliver(std::vector<QueuedPush> batch);
  void deliver(const QueuedPush& marker);
  void hold(const QueuedPush& marker);  // it is on its way
  // Rounds and codes the payloads of the servers as their links want them.
  std::vector<Outbound> code(std::vector<Buffer> payloads, wire::WireDType deltas);
  // Sends a payload to every server and waits for the answers.
  void exchange(const std::vector<Outbound>& payloads, std::vector<RequestPtr>& requests);
  // Whether it was only the pushes of `requests` that this was the answer to, and they are over.
  bool refuses_one(const Error& error, const std::vector<RequestPtr>& requests);
  void note_refusal(const Error& error);
  RequestPtr send(uint32_t server, const Outbound& out);
  void begin_delivery(uint64_t steps);
  // Returns when all that were sent are answered.
  void wait_for(std::vector<RequestPtr>& requests, const std::vector<Outbound>& payloads,
                TimePoint deadline);
  void take_answers(const std::vector<QueuedPush>& batch, std::vector<RequestPtr> requests);
  template <typename Ready>
  void wait_until(std::unique_lock<std::mutex>& lock, const char* what, const Ready& ready);
  template <typename Ready>
  void wait_quietly(std::unique_lock<std::mutex>& lock, const char* what, const Ready& ready);
  void raise_failure() const;  // with the lock held
  void raise_refusal();        // the same
  // When a wait since `began` has waited for the marker that is on its way for so long as it may;
  // with the lock held. TimePoint::max(): it need not end.
  TimePoint held_until(TimePoint began) const;

  // The pushes that are on their way.
  struct Delivery {
    uint64_t steps = 0;
    std::vector<uint64_t> sequences;  // per server, of its request; 0: not sent
  };
  // The marker that is on its way.
  struct Held {
    uint64_t number = 0;
    uint64_t hold_ms = 0;
    TimePoint since;
  };

  Session& session_;
  std::mutex& sequenced_;
  const std::shared_ptr<SetState> set_;
  const QueueOptions options_;
  const wire::Pool pool_;

  mutable std::mutex mutex_;
  ConditionVariable queued_;  // the queue's thread
  ConditionVariable done_;    // the training thread
  std::deque<QueuedPush> waiting_;
  bool busy_ = false;  // a batch is on its way
  std::optional<Held> held_;
  bool stopping_ = false;
  std::optional<Error> failure_;
  std::optional<Error> refusal_;  // that the training thread has not heard of
  // Made beforehand: where it is told there is no memory for its text.
  const Error out_of_memory_{ErrorCode::kOutOfMemory,
                             "the queue of pushes has no memory left, and a push may be lost; give "
                             "this process more memory, or set send_queue_size lower"};
  std::deque<CutAnswer> cut_answers_;  // that nobody has taken
  std::vector<wire::Frame> arrived_;
  uint64_t pushes_ = 0;      // training thread
  wire::Version version_;    // of server 0
  uint64_t unanswered_ = 0;  // pushes
  uint64_t added_ = 0;
  Delivery delivery_;
  StalenessStats staleness_;
  double wait_s_ = 0;
  std::mutex ending_;  // held by the one that joins the thread; another that stops waits for it
  std::thread thread_;
};

// Sums or averages the gradients of several steps, each table and block over the steps that have
// it. `mean`: per parameter group.
std::vector<Buffer> merge_pushes(const SetState& set, const std::vector<QueuedPush>& pushes,
                                 const std::vector<bool>& mean, const wire::Pool& pool);
// Clips a packed gradient in place as torch clips a gradient: by value, then by the norm over all
// payloads, or each tensor by its own. 0 is no clipping.
void clip_push(const SetState& set, std::vector<Buffer>& payloads, double clip_value,
               double clip_norm, bool each = false);

}  // namespace cpudist::client
