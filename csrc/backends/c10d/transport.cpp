// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Messages between ranks by send and recv of any c10d backend that moves bytes of the CPU, from
// threads without the GIL.
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backends/c10d/pairwise.h"
#include "backends/c10d/transport.h"
#include "backends/foreign_errors.h"
#include "bind/gil.h"
#include "transport/ranks/transport.h"

namespace cpudist::backends {

namespace {

namespace py = pybind11;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Longer than any run. Who is silent for too long is told by heartbeats, and a wait that runs out
// makes backends close the links to everybody.
constexpr std::chrono::hours kForever(24 * 365);

// Enough that a link is busy while the threads look at what has come.
constexpr size_t kAtOnce = 4;

class BackendTransport;

class WorkTransfer final : public transport::Transfer {
 public:
  WorkTransfer(std::shared_ptr<BackendTransport> transport, uint32_t peer, WorkPtr work,
               std::string trouble)
      : transport_(std::move(transport)),
        peer_(peer),
        work_(std::move(work)),
        trouble_(std::move(trouble)) {}
  ~WorkTransfer() override;
  WorkTransfer(const WorkTransfer&) = delete;
  WorkTransfer& operator=(const WorkTransfer&) = delete;

  std::string wait() override {
    if (!work_) return trouble_;
    try {
      return work_->wait(kForever) ? "" : "the message was cancelled";
    } catch (const std::exception& error) {
      return foreign_error(error).what();
    }
  }

 private:
  const std::shared_ptr<BackendTransport> transport_;
  const uint32_t peer_;
  const WorkPtr work_;  // null if it did not start
  const std::string trouble_;
};

class BackendTransport final : public transport::RankTransport,
                               public std::enable_shared_from_this<BackendTransport> {
 public:
  explicit BackendTransport(c10::intrusive_ptr<c10d::Backend> backend)
      : backend_(std::move(backend)),
        // oneCCL begins what was started together in an order of its own.
        at_once_(backend_->getBackendName() == "ccl" ? 1 : kAtOnce),
        pairwise_(dynamic_cast<PairwiseMessages*>(backend_.get())),
        peers_(static_cast<size_t>(backend_->getSize())) {
    if (pairwise_ != nullptr) pairwise_->fail_pairwise();
  }

  uint32_t rank() const override { return static_cast<uint32_t>(backend_->getRank()); }
  uint32_t size() const override { return static_cast<uint32_t>(backend_->getSize()); }
  size_t at_once() const override { return at_once_; }

  std::unique_ptr<transport::Transfer> start_send(uint32_t peer, const uint8_t* data,
                                                  size_t size_bytes,
                                                  std::shared_ptr<const void> owner) override {
    // A backend does not write to what it sends.
    return start(peer, const_cast<uint8_t*>(data), size_bytes, std::move(owner), &Backend::send);
  }

  std::unique_ptr<transport::Transfer> start_receive(uint32_t peer, uint8_t* data,
                                                     size_t size_bytes,
                                                     std::shared_ptr<void> owner) override {
    return start(peer, data, size_bytes, std::move(owner), &Backend::recv);
  }

  void cancel(uint32_t peer) noexcept override {
    std::vector<WorkPtr> works;
    {
      const std::lock_guard lock(mutex_);
      Peer& state = peers_.at(peer);
      state.cancelled = true;
      works.assign(state.under_way.begin(), state.under_way.end());
    }
    if (pairwise_ != nullptr) {
      give_up(peer);
      return;
    }
    for (const WorkPtr& work : works) abort(*work);
  }

  void forget(uint32_t peer, const WorkPtr& work) {
    const std::lock_guard lock(mutex_);
    peers_[peer].under_way.erase(work);
  }

 private:
  using Backend = c10d::Backend;
  using Call = WorkPtr (Backend::*)(std::vector<at::Tensor>&, int, int);
  struct Peer {
    bool cancelled = false;
    std::set<WorkPtr> under_way;
  };

  std::unique_ptr<transport::Transfer> failed(uint32_t peer, std::string trouble) {
    return std::make_unique<WorkTransfer>(shared_from_this(), peer, WorkPtr(), std::move(trouble));
  }

  std::unique_ptr<transport::Transfer> start(uint32_t peer, uint8_t* data, size_t size_bytes,
                                             std::shared_ptr<const void> owner, Call call) {
    WorkPtr work;
    try {
      std::vector<at::Tensor> tensors{at::from_blob(
          data, {static_cast<int64_t>(size_bytes)}, [owner = std::move(owner)](void*) {},
          at::TensorOptions().dtype(at::kByte))};
      if (is_cancelled(peer)) return failed(peer, "the link was cancelled");
      work = ((*backend_).*call)(tensors, static_cast<int>(peer), 0);
    } catch (const std::exception& error) {
      return failed(peer, foreign_error(error).what());
    }
    bool late = false;
    {
      const std::lock_guard lock(mutex_);
      peers_[peer].under_way.insert(work);
      late = peers_[peer].cancelled;
    }
    if (late && pairwise_ == nullptr) abort(*work);
    return std::make_unique<WorkTransfer>(shared_from_this(), peer, std::move(work), "");
  }

  bool is_cancelled(uint32_t peer) {
    const std::lock_guard lock(mutex_);
    return peers_[peer].cancelled;
  }

  // What starts later, too, fails by itself then.
  void give_up(uint32_t peer) noexcept {
    try {
      pairwise_->give_up(static_cast<int>(peer));
    } catch (const std::exception&) {
      // A forked child: the messages are its parent's.
    }
  }

  // Of a backend that cannot take one message back, everything is aborted.
  void abort(c10d::Work& work) noexcept {
    try {
      work.abort();
      return;
    } catch (const std::exception&) {
    }
    try {
      backend_->abort();
    } catch (const std::exception&) {
      // Then its own timeout ends the wait.
    }
  }

  const c10::intrusive_ptr<Backend> backend_;
  const size_t at_once_;
  PairwiseMessages* const pairwise_;  // the backend's; null if it has none
  std::mutex mutex_;
  std::vector<Peer> peers_;
};

WorkTransfer::~WorkTransfer() {
  if (work_) transport_->forget(peer_, work_);
}

using TransportPtr = std::shared_ptr<transport::RankTransport>;

py::capsule make_transport(const c10::intrusive_ptr<c10d::Backend>& backend) {
  // A receive waits for as long as the peer has nothing to say, also by the group's own limit.
  backend->setTimeout(kForever);
  auto made = std::make_unique<TransportPtr>(std::make_shared<BackendTransport>(backend));
  py::capsule capsule(made.get(), transport::kRankTransportCapsule, [](PyObject* object) {
    const std::unique_ptr<TransportPtr> owned(
        static_cast<TransportPtr*>(PyCapsule_GetPointer(object, transport::kRankTransportCapsule)));
    // The last owner destroys the backend, which may wait for its threads.
    const bind::GilReleased no_gil;
    owned->reset();
  });
  static_cast<void>(made.release());
  return capsule;
}

}  // namespace

void bind_transport(pybind11::module_& module) {
  module.def("make_rank_transport", &make_transport, py::arg("backend"));
}

}  // namespace cpudist::backends
