// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one queue and its thread, which share a lock
//
// The life of a queued push.
#include "client/arrivals/queue.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/threads.h"
#include "client/state.h"

namespace cpudist::client {

namespace {

using std::chrono::milliseconds;

constexpr auto kQueuePollInterval = milliseconds(50);
constexpr auto kFirstRetry = milliseconds(5);
constexpr auto kLastRetry = milliseconds(500);

bool same_configs(const QueuedPush& a, const QueuedPush& b) {
  const size_t size_bytes = a.configs.size() * sizeof(kernels::OptimizerConfig);
  return a.configs.size() == b.configs.size() &&
         std::memcmp(a.configs.data(), b.configs.data(), size_bytes) == 0;
}

// The lock is let go while this lives, and held again when it ends, however that is.
class Unlocked {
 public:
  explicit Unlocked(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::unique_lock<std::mutex>& lock_;
};

}  // namespace

void check_options(const QueueOptions& options, const wire::ParamSetLayout& layout) {
  if (options.mean.size() != layout.configs.size()) {
    throw Error(ErrorCode::kInvalidArgument, "start_queue: one merge rule per parameter group");
  }
  if (options.size == 0 || options.max_merge == 0 || options.pull_every == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "queue size, merge count and pull interval must be at least 1");
  }
  if (layout.max_staleness != wire::kAnyStaleness && options.pull_every != 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "start_queue: with a bound on staleness every push brings dense values back");
  }
  if (layout.compensation.kind != wire::Compensation::kNone && options.max_merge != 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "start_queue: merged gradients were computed on different values, so delay "
                "compensation needs max_merge = 1");
  }
}

PushQueue::PushQueue(Session& session, std::mutex& sequenced, std::shared_ptr<SetState> set,
                     const QueueOptions& options, wire::Pool pool)
    : session_(session),
      sequenced_(sequenced),
      set_(std::move(set)),
      options_(options),
      pool_(std::move(pool)),
      arrived_(session.server_count()) {
  thread_ = start_thread("the thread that sends pushes", [this] { run(); });
}

PushQueue::~PushQueue() { stop(); }

void PushQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    // A thread that waits for room would wait for ever.
    if (!failure_) failure_ = Error(ErrorCode::kClosed, "the parameter set is closed");
  }
  queued_.notify_all();
  done_.notify_all();
  const std::lock_guard ending(ending_);
  if (thread_.joinable()) join_thread(thread_);
  const std::lock_guard lock(mutex_);  // its memory need not wait for who holds it
  waiting_.clear();
  for (wire::Frame& frame : arrived_) frame = wire::Frame();
}

void PushQueue::raise_failure() const {
  if (failure_) throw Error(*failure_);
}

void PushQueue::raise_refusal() {
  if (refusal_) throw Error(*std::exchange(refusal_, std::nullopt));
}

void PushQueue::throw_failure() {
  const std::lock_guard lock(mutex_);
  raise_failure();
  raise_refusal();
}

template <typename Ready>
void PushQueue::wait_until(std::unique_lock<std::mutex>& lock, const char* what,
                           const Ready& ready) {
  while (!ready()) {
    // Whoever is told of it takes locks of its own: none is held at either end.
    const Unlocked unlocked(lock);
    const WaitNotice notice(session_.options());
    std::unique_lock waiting(mutex_);
    wait_quietly(waiting, what, ready);
  }
}

template <typename Ready>
void PushQueue::wait_quietly(std::unique_lock<std::mutex>& lock, const char* what,
                             const Ready& ready) {
  const ClientOptions& options = session_.options();
  const TimePoint began = Clock::now();
  const auto note_wait = [&] {
    wait_s_ += std::chrono::duration<double>(Clock::now() - began).count();
  };
  while (!ready()) {
    const TimePoint until = held_until(began);
    done_.wait_until(lock, std::min(until, Clock::now() + kQueuePollInterval));
    if (ready()) break;
    if (Clock::now() >= until && held_) {
      const uint64_t number = held_->number;
      held_->since = Clock::now();  // lost on its way to a server it is asked for once more
      const Unlocked unlocked(lock);
      take_marker_back(session_, set_->id, number);
    }
    if (ready()) break;
    const bool late = Clock::now() - began > milliseconds(options.round_deadline_ms);
    lock.unlock();
    const bool interrupted = options.interrupted && options.interrupted();
    lock.lock();
    if (!interrupted && !late) continue;
    note_wait();
    if (interrupted) throw Error(ErrorCode::kInterrupted, "the wait was interrupted by a signal");
    throw Error(ErrorCode::kTimeout,
                std::string(what) + ": the servers have not taken the queued pushes within " +
                    std::to_string(options.round_deadline_ms) + " ms (CPUDIST_ROUND_DEADLINE_MS)");
  }
  note_wait();
}

void PushQueue::add(QueuedPush&& push) {
  std::unique_lock lock(mutex_);
  raise_failure();
  const auto room = [this] {
    const auto pushes = std::count_if(waiting_.begin(), waiting_.end(),
                                      [](const QueuedPush& item) { return !item.marker; });
    return failure_ || static_cast<size_t>(pushes) < options_.size;
  };
  try {
    wait_until(lock, "push", room);
  } catch (...) {
    put(std::move(push));
    throw;
  }
  raise_failure();
  put(std::move(push));
}

void PushQueue::put(QueuedPush&& push) {
  waiting_.push_back(std::move(push));
  ++unanswered_;
  ++added_;
  queued_.notify_one();
}

TimePoint PushQueue::held_until(TimePoint began) const {
  if (!held_ || held_->hold_ms == 0) return TimePoint::max();
  return std::max(began, held_->since) + milliseconds(held_->hold_ms);
}

void PushQueue::mark(wire::Cut cut, uint64_t hold_ms) {
  const std::lock_guard lock(mutex_);
  raise_failure();
  QueuedPush item;
  item.hold_ms = hold_ms;
  item.marker = std::move(cut);
  waiting_.push_back(std::move(item));
  queued_.notify_one();
}

std::optional<CutAnswer> PushQueue::take_cut_answer() {
  const std::lock_guard lock(mutex_);
  if (cut_answers_.empty()) {
    raise_failure();
    return std::nullopt;
  }
  std::optional<CutAnswer> answer = std::move(cut_answers_.front());
  cut_answers_.pop_front();
  return answer;
}

void PushQueue::drain(const char* what) {
  std::unique_lock lock(mutex_);
  wait_until(lock, what, [this] { return failure_ || (waiting_.empty() && !busy_); });
  raise_failure();
  raise_refusal();
}

bool PushQueue::is_answered() {
  const std::lock_guard lock(mutex_);
  raise_failure();
  return unanswered_ == 0;
}

void PushQueue::drain_pushes(const char* what) {
  std::unique_lock lock(mutex_);
  wait_until(lock, what, [this] { return failure_ || unanswered_ == 0; });
  raise_failure();
}

std::vector<wire::Frame> PushQueue::take_arrived() {
  const std::lock_guard lock(mutex_);
  std::vector<wire::Frame> frames(arrived_.size());
  std::swap(frames, arrived_);
  return frames;
}

uint64_t PushQueue::added() const {
  const std::lock_guard lock(mutex_);
  return added_;
}

Unapplied PushQueue::end(std::span<const uint64_t> carried_out) {
  stop();
  const std::lock_guard lock(mutex_);
  const std::vector<uint64_t>& sent = delivery_.sequences;
  size_t applied = 0;
  for (size_t s = 0; s < sent.size(); ++s) {
    applied += sent[s] > 0 && s < carried_out.size() && sent[s] <= carried_out[s] ? 1 : 0;
  }
  Unapplied found{unanswered_, 0};
  if (!sent.empty() && applied == sent.size()) found.steps -= delivery_.steps;
  if (applied > 0 && applied < sent.size()) found.torn = delivery_.steps;
  return found;
}

uint64_t PushQueue::version() const {
  const std::lock_guard lock(mutex_);
  return version_.round;
}

uint64_t PushQueue::steps(uint64_t told) const {
  const std::lock_guard lock(mutex_);
  return std::max(told, version_.steps) + unanswered_;
}

bool PushQueue::next_wants_dense() { return ++pushes_ % options_.pull_every == 0; }

void PushQueue::run() {
  while (true) {
    try {
      std::vector<QueuedPush> batch = next_batch();
      if (batch.empty()) return;
      batch.front().marker ? deliver(batch.front()) : deliver(std::move(batch));
    } catch (const Error& error) {
      const std::lock_guard lock(mutex_);
      failure_ = error;
    } catch (const std::bad_alloc&) {
      const std::lock_guard lock(mutex_);
      failure_ = out_of_memory_;
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex_);
      failure_ = Error(ErrorCode::kInternal, std::string("push: ") + error.what());
    }
    const std::lock_guard lock(mutex_);
    busy_ = false;
    held_.reset();
    done_.notify_all();
    if (failure_) return;
  }
}

std::vector<QueuedPush> PushQueue::next_batch() {
  std::unique_lock lock(mutex_);
  queued_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
  std::vector<QueuedPush> batch;
  if (stopping_) return batch;
  // Steps of different learning rates are never one update.
  const auto joins = [&](const QueuedPush& next) {
    if (batch.empty()) return true;
    return !batch.front().marker && !next.marker && same_configs(batch.front(), next);
  };
  while (!waiting_.empty() && batch.size() < options_.max_merge && joins(waiting_.front())) {
    batch.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
  busy_ = true;
  done_.notify_all();
  return batch;
}

void PushQueue::deliver(std::vector<QueuedPush> batch) {
  const wire::WireDType deltas = batch.front().dtype;
  const std::vector<Outbound> payloads =
      code(batch.size() == 1 ? std::move(batch.front().payloads)
                             : merge_pushes(*set_, batch, options_.mean, pool_),
           deltas);
  const std::lock_guard lock(sequenced_);
  begin_delivery(batch.size());
  std::vector<RequestPtr> requests(payloads.size());
  try {
    exchange(payloads, requests);
  } catch (const Error& error) {
    if (!refuses_one(error, requests)) throw;
    return note_refusal(error);
  }
  take_answers(batch, std::move(requests));
}

bool PushQueue::refuses_one(const Error& error, const std::vector<RequestPtr>& requests) {
  const ErrorCode code = error.code();
  const bool refused =
      code == ErrorCode::kNonFinite || code == ErrorCode::kTableFull || code == ErrorCode::kFull;
  // What deltas have moved is in this trainer's values already.
  if (!refused || set_->layout.exchanges_deltas) return false;
  session_.drain(session_.options().round_deadline_ms, Session::Caller::kBackground);
  return std::none_of(requests.begin(), requests.end(), [this](const RequestPtr& request) {
    // That server expects the same push again.
    return session_.refused({&request, 1}) && request->error->code() == ErrorCode::kOverloaded;
  });
}

void PushQueue::note_refusal(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (!refusal_) refusal_ = error;
  unanswered_ -= delivery_.steps;
  delivery_ = Delivery();
}

void PushQueue::begin_delivery(uint64_t steps) {
  std::vector<uint64_t> none(set_->server_count);
  const std::lock_guard lock(mutex_);
  delivery_ = Delivery{steps, std::move(none)};
}

void PushQueue::deliver(const QueuedPush& marker) {
  const wire::Cut& cut = *marker.marker;
  CutAnswer answer;
  {
    const std::lock_guard lock(sequenced_);
    session_.drain(session_.options().round_deadline_ms, Session::Caller::kBackground);
    std::vector<RequestPtr> requests(set_->server_count);
    for (const uint32_t s : session_.send_order()) {
      requests[s] = session_.send(s, wire::FrameKind::kCut, set_->id, encode(cut));
    }
    hold(marker);
    session_.wait(requests, Session::Caller::kBackground);
    answer = join_answers(cut.number, requests);
  }
  // What was asked for before is over: the reply to the next push says when to mark again.
  if (answer.taken_back) set_->cut_wanted = 0;
  const std::lock_guard lock(mutex_);
  cut_answers_.push_back(std::move(answer));
}

void PushQueue::hold(const QueuedPush& marker) {
  const std::lock_guard lock(mutex_);
  held_ = Held{marker.marker->number, marker.hold_ms, Clock::now()};
  done_.notify_all();  // who waits already looks at its clock
}

std::vector<Outbound> PushQueue::code(std::vector<Buffer> payloads, wire::WireDType deltas) {
  const bool gradients = !set_->layout.exchanges_deltas;
  const wire::WireDType values = gradients ? set_->layout.push_dtype : deltas;
  std::vector<Outbound> coded;
  if (set_->residues) set_->residues_dropped += set_->residues->begin();
  for (uint32_t s = 0; s < payloads.size(); ++s) {
    if (set_->residues) set_->residues->round(&payloads[s]);
    coded.push_back(code_push(*set_, session_, s, std::move(payloads[s]), values, pool_));
  }
  return coded;
}

RequestPtr PushQueue::send(uint32_t server, const Outbound& out) {
  RequestPtr request =
      session_.send(server, wire::FrameKind::kPush, set_->id, out.payload.share(), out.coded);
  const std::lock_guard lock(mutex_);
  delivery_.sequences[server] = request->header.sequence;
  return request;
}

void PushQueue::exchange(const std::vector<Outbound>& payloads, std::vector<RequestPtr>& requests) {
  // Another operation of this trainer that was interrupted may still be on its way.
  session_.drain(session_.options().round_deadline_ms, Session::Caller::kBackground);
  const TimePoint deadline = Clock::now() + milliseconds(session_.options().round_deadline_ms);
  // Deltas are many rows. A server in this process adds them in this thread, which is not to happen
  // while others do so on the same host: one core would be left to two that train.
  const bool apart =
      set_->layout.exchanges_deltas && set_->layout.mode == wire::UpdateMode::kOnArrival;
  for (const uint32_t s : session_.send_order()) {
    if (apart && session_.in_process(s)) wait_for(requests, payloads, deadline);
    requests[s] = send(s, payloads[s]);
  }
  wait_for(requests, payloads, deadline);
}

// A server that has no memory for a push refuses it and expects it again. All are waited for at
// once: one that was lost on its way may be what a server waits for that holds another.
void PushQueue::wait_for(std::vector<RequestPtr>& requests, const std::vector<Outbound>& payloads,
                         TimePoint deadline) {
  auto pause = kFirstRetry;
  while (true) {
    std::vector<RequestPtr> sent;
    for (const RequestPtr& request : requests) {
      if (request && !session_.answered({&request, 1})) sent.push_back(request);
    }
    try {
      session_.wait(sent, Session::Caller::kBackground);
      return;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kOverloaded || Clock::now() + pause > deadline) throw;
    }
    {
      std::unique_lock lock(mutex_);
      if (queued_.wait_for(lock, pause, [this] { return stopping_; })) {
        throw Error(ErrorCode::kClosed, "the client is closed");
      }
    }
    pause = std::min(pause * 2, kLastRetry);
    for (const RequestPtr& request : sent) {
      if (!session_.refused({&request, 1})) continue;
      if (request->error->code() != ErrorCode::kOverloaded) continue;  // which ends the next wait
      requests[request->server] = send(request->server, payloads[request->server]);
      const std::lock_guard lock(mutex_);
      ++staleness_.overloaded;
    }
  }
}

void PushQueue::take_answers(const std::vector<QueuedPush>& batch,
                             std::vector<RequestPtr> requests) {
  uint64_t samples = 0;
  for (const QueuedPush& push : batch) samples += push.samples;
  std::vector<wire::Version> applied;
  std::vector<bool> has_dense;
  uint64_t cut_wanted = 0;
  const bool changes = set_->layout.exchanges_deltas;
  const auto kind = changes ? wire::SectionKind::kChanges : wire::SectionKind::kDense;
  for (const RequestPtr& request : requests) {
    decode_reply(*set_, kind, request.get(), pool_);
    const wire::Frame& reply = request->reply;
    const std::span<const uint8_t> payload = reply.payload.bytes();
    if (changes) {
      const wire::ChangesHeader header = wire::decode_changes(payload, set_->layout).header;
      applied.push_back(header.version);
      cut_wanted = std::max(cut_wanted, header.cut_wanted);
      has_dense.push_back(true);
      continue;
    }
    const wire::DenseView view = wire::decode_dense(payload, set_->layout);
    applied.push_back(view.version);
    cut_wanted = std::max(cut_wanted, view.cut_wanted);
    has_dense.push_back(!view.blocks.empty());
  }
  set_->cut_wanted = cut_wanted;
  const std::lock_guard lock(mutex_);
  version_ = applied.front();
  unanswered_ -= batch.size();
  delivery_ = Delivery();
  for (const QueuedPush& push : batch) {
    staleness_.count(push.read, applied, samples);
  }
  staleness_.merged += batch.size() - 1;
  for (size_t s = 0; s < requests.size(); ++s) {
    if (has_dense[s]) arrived_[s] = std::move(requests[s]->reply);
  }
}

void PushQueue::add_stats(ClientStats* stats) const {
  const std::lock_guard lock(mutex_);
  stats->wait_s += wait_s_;
  stats->queued += static_cast<uint64_t>(
      std::count_if(waiting_.begin(), waiting_.end(), [](const auto& one) { return !one.marker; }));
  stats->staleness.add(staleness_);
}

}  // namespace cpudist::client
