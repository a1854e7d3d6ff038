// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "bind/client_holder.h"

#include "core/inproc_channel.h"
#include "core/tcp_channel.h"

namespace cpudist::bind {

namespace {

using core::Client;
using core::ClientOptions;

bool interrupted() {
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Called in a waiting thread of Python's, never in an I/O thread.
void log(PyObject* logger, int level, const std::string& text) {
  const py::gil_scoped_acquire gil;
  try {
    py::reinterpret_borrow<py::object>(logger)(level, text);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("torch_cpudist logger");
  }
}

bool needs_sockets(const ClientOptions& options) {
  for (const auto& addresses : options.servers) {
    for (const std::string& address : addresses) {
      if (address.starts_with("tcp:") || address.starts_with("unix:")) return true;
    }
  }
  return false;
}

std::unique_ptr<std::unique_ptr<Client>> make(ClientOptions options,
                                              const std::shared_ptr<NetworkHolder>& network,
                                              const std::shared_ptr<RankNetworkHolder>& ranks,
                                              const py::object& logger) {
  options.interrupted = &interrupted;
  if (!logger.is_none()) {
    // Borrowed: the holder outlives its client, and a copy would need the GIL to go.
    options.log = [raw = logger.ptr()](int level, const std::string& text) {
      log(raw, level, text);
    };
  }
  const bool sockets = needs_sockets(options);
  std::shared_ptr<core::InprocNetwork> inproc;
  if (network) inproc = network->get();
  std::shared_ptr<core::RankNetwork> lanes;
  if (ranks) lanes = ranks->get();
  const auto factory = [inproc, sockets, lanes](core::ConnectionHandler* handler) {
    return core::make_connector(
        inproc ? inproc->connector(handler) : nullptr,
        sockets ? core::make_tcp_connector(handler, core::ChannelLimits{}) : nullptr,
        lanes ? lanes->connector(handler) : nullptr);
  };
  return std::make_unique<std::unique_ptr<Client>>(
      std::make_unique<Client>(std::move(options), factory));
}

}  // namespace

ClientHolder::ClientHolder(ClientOptions options, const std::shared_ptr<NetworkHolder>& network,
                           const std::shared_ptr<RankNetworkHolder>& ranks, py::object logger)
    : logger_(std::move(logger)), client_(make(std::move(options), network, ranks, logger_)) {}

ClientHolder::~ClientHolder() {
  if (client_.forked()) return;
  const py::gil_scoped_release no_gil;
  client_.get("client").reset();
}

}  // namespace cpudist::bind
