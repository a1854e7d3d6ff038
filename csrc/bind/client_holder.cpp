// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "bind/client_holder.h"

#include <algorithm>

#include "transport/inproc/channel.h"
#include "transport/liveness.h"
#include "transport/tcp/channel.h"

namespace cpudist::bind {

namespace {

using client::Client;
using client::ClientOptions;

bool interrupted() {
  const GilTaken gil;
  return PyErr_CheckSignals() != 0;
}

// Who listens to the waits of this thread; borrowed, see listen_to_waits.
thread_local PyObject* wait_listener = nullptr;

void tell_of_wait(bool begins) {
  if (wait_listener == nullptr) return;
  with_gil([begins] {
    try {
      py::reinterpret_borrow<py::object>(wait_listener)(begins);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a listener to waits");
    }
  });
}

// Called in a waiting thread of Python's, never in an I/O thread.
void log(PyObject* logger, int level, const std::string& text) {
  with_gil([&] {
    try {
      py::reinterpret_borrow<py::object>(logger)(level, text);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("torch_cpudist logger");
    }
  });
}

bool needs_sockets(const client::ClientOptions& options) {
  for (const auto& addresses : options.servers) {
    for (const std::string& address : addresses) {
      if (address.starts_with("tcp:") || address.starts_with("unix:")) return true;
    }
  }
  return false;
}

wire::Identity identity_of_client(const client::ClientOptions& options) {
  wire::Identity own;
  own.run_id = options.run_id;
  own.incarnation = options.incarnation;
  own.rank = static_cast<uint16_t>(options.trainer_rank);
  return own;
}

// One thread proves the key to one server after the other, and says in between that it is there.
transport::ChannelLimits limits_of(const client::ClientOptions& options) {
  transport::ChannelLimits limits;
  const uint64_t silence_ms = 2 * transport::beat_interval(options.liveness_ms).count();
  limits.handshake_deadline_ms = std::min(limits.handshake_deadline_ms, silence_ms);
  return limits;
}

std::unique_ptr<std::unique_ptr<client::Client>> make(
    client::ClientOptions options, const std::shared_ptr<NetworkHolder>& network,
    const std::shared_ptr<RankNetworkHolder>& ranks, const py::object& logger,
    const Secret* secret) {
  options.interrupted = &interrupted;
  options.waiting = &tell_of_wait;
  if (!logger.is_none()) {
    // Borrowed: the holder outlives its client, and a copy would need the GIL to go.
    options.log = [raw = logger.ptr()](int level, const std::string& text) {
      log(raw, level, text);
    };
  }
  const bool sockets = needs_sockets(options);
  std::shared_ptr<transport::InprocNetwork> inproc;
  if (network) inproc = network->get();
  std::shared_ptr<transport::RankNetwork> lanes;
  if (ranks) lanes = ranks->get();
  const auto credentials =
      credentials_of(secret, identity_of_client(options), wire::Purpose::kServers);
  const transport::ChannelLimits limits = limits_of(options);
  const auto factory = [inproc, sockets, lanes, credentials,
                        limits](transport::ConnectionHandler* handler) {
    return transport::make_connector(
        inproc ? inproc->connector(handler, credentials, limits.handshake_deadline_ms) : nullptr,
        sockets ? transport::make_tcp_connector(handler, limits, credentials) : nullptr,
        lanes ? lanes->connector(handler) : nullptr);
  };
  return std::make_unique<std::unique_ptr<client::Client>>(
      std::make_unique<client::Client>(std::move(options), factory));
}

}  // namespace

client::StepPush make_step(std::vector<kernels::OptimizerConfig> configs,
                           const std::vector<ParameterArgument>& parameters,
                           const std::vector<TableArgument>& tables,
                           const std::vector<Address>& weights) {
  client::StepPush step;
  step.configs = std::move(configs);
  for (const auto& [index, gradient] : parameters) {
    step.parameters.push_back({index, at<const void>(gradient)});
  }
  for (const auto& [index, keys, count, rows] : tables) {
    step.tables.push_back({index, at<const int64_t>(keys), count, at<const float>(rows)});
  }
  step.weights = pointers(weights);
  return step;
}

py::object listen_to_waits(const py::object& told) {
  py::object before = py::none();
  if (wait_listener != nullptr) before = py::reinterpret_borrow<py::object>(wait_listener);
  wait_listener = told.is_none() ? nullptr : told.ptr();
  return before;
}

ClientHolder::ClientHolder(client::ClientOptions options,
                           const std::shared_ptr<NetworkHolder>& network,
                           const std::shared_ptr<RankNetworkHolder>& ranks, py::object logger,
                           const Secret* secret)
    : logger_(std::move(logger)),
      client_(make(std::move(options), network, ranks, logger_, secret)) {}

ClientHolder::~ClientHolder() {
  if (client_.forked()) return;
  const GilReleased no_gil;
  client_.get("client").reset();
}

}  // namespace cpudist::bind
