// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The class Server with its listeners.
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/holders.h"
#include "bind/refusals.h"
#include "bind/secret.h"
#include "server/server.h"
#include "transport/inproc/channel.h"
#include "transport/tcp/channel.h"

namespace cpudist::bind {

namespace {

using server::ServerOptions;

wire::Identity identity_of_server(const ServerOptions& options) {
  wire::Identity own;
  own.run_id = options.run_id;
  own.role = wire::Role::kServer;
  own.rank = static_cast<uint16_t>(options.shard_id);
  return own;
}

// A server with the channels that deliver to it.
struct ServerParts {
  ServerParts(server::ServerOptions options, const Secret* secret)
      : liveness(options.liveness_ms),
        credentials(credentials_of(secret, identity_of_server(options), wire::Purpose::kServers)),
        server(std::move(options)) {}
  ~ServerParts() { stop(); }
  ServerParts(const ServerParts&) = delete;
  ServerParts& operator=(const ServerParts&) = delete;

  void stop(const std::string& reason = {}) {
    server.stop(reason);
    for (const auto& listener : listeners) listener->stop();
    door->close();
  }

  const std::chrono::milliseconds liveness;
  const std::shared_ptr<const wire::Credentials> credentials;  // null without a key
  const std::shared_ptr<transport::Door> door = std::make_shared<transport::Door>();
  server::Server server;
  std::vector<std::shared_ptr<void>> networks;
  std::vector<std::unique_ptr<transport::Listener>>
      listeners;  // before the server and the networks
};

class ServerHolder {
 public:
  ServerHolder(server::ServerOptions options, const Secret* secret)
      : parts_(std::make_unique<std::unique_ptr<ServerParts>>(
            std::make_unique<ServerParts>(std::move(options), secret))) {}
  ~ServerHolder() {
    if (parts_.forked()) return;
    const GilReleased no_gil;
    parts_.get("server").reset();
  }
  ServerHolder(const ServerHolder&) = delete;
  ServerHolder& operator=(const ServerHolder&) = delete;
  ServerParts& parts() const { return *parts_.get("server"); }

 private:
  ForkSafe<std::unique_ptr<ServerParts>> parts_;
};

std::vector<std::string> listen_tcp(ServerHolder& self, const std::string& bind,
                                    uint16_t port_first, uint16_t port_last, bool unix_socket,
                                    uint32_t threads) {
  transport::ListenOptions options;
  options.bind_address = bind;
  options.port_first = port_first;
  options.port_last = std::max(port_first, port_last);
  options.unix_socket = unix_socket;
  options.threads = threads;
  ServerParts& parts = self.parts();
  options.credentials = parts.credentials;
  options.door = parts.door;
  options.flow.heed(parts.liveness);
  parts.listeners.push_back(transport::listen_tcp(options, &parts.server));
  return parts.listeners.back()->addresses();
}

std::string listen_inproc(ServerHolder& self, const NetworkHolder& network,
                          const std::string& name) {
  ServerParts& parts = self.parts();
  parts.networks.push_back(network.get());
  parts.listeners.push_back(network.get()->listen(name, &parts.server, parts.credentials));
  return parts.listeners.back()->addresses().front();
}

std::string listen_ranks(ServerHolder& self, const RankNetworkHolder& network) {
  ServerParts& parts = self.parts();
  parts.networks.push_back(network.get());
  parts.listeners.push_back(network.get()->listen(&parts.server));
  return parts.listeners.back()->addresses().front();
}

bool wait_done(ServerHolder& self, double timeout_s) {
  // A year is as good as for ever and does not overflow the clock.
  const std::chrono::duration<double> timeout(std::clamp(timeout_s, 0.0, 3.2e7));
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  while (true) {
    const auto slice = std::min(deadline, Clock::now() + std::chrono::milliseconds(50));
    bool done = false;
    {
      const GilReleased no_gil;
      done = self.parts().server.wait_done(slice);
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (done || Clock::now() >= deadline) return done;
  }
}

server::NonFinite nonfinite_of(const std::string& name) {
  if (name == "raise") return server::NonFinite::kRaise;
  if (name == "skip") return server::NonFinite::kSkip;
  if (name == "apply") return server::NonFinite::kApply;
  throw Error(ErrorCode::kInvalidArgument,
              "nonfinite is \"raise\", \"skip\" or \"apply\", not \"" + name + "\"");
}

py::dict server_stats(const ServerHolder& self) {
  server::ServerStats stats;
  transport::Door::Counts door;
  {
    const GilReleased release;
    stats = self.parts().server.stats();
    door = self.parts().door->counts();
  }
  py::dict result;
  result["rounds"] = stats.rounds;
  result["pushes"] = stats.pushes;
  result["nonfinite"] = stats.nonfinite;
  result["duplicates"] = stats.duplicates;
  result["bytes_received"] = stats.bytes_received;
  result["bytes_sent"] = stats.bytes_sent;
  result["rows"] = stats.rows;
  result["table_bytes"] = stats.table_bytes;
  result["dense_bytes"] = stats.dense_bytes;
  result["marks_bytes"] = stats.marks_bytes;
  result["backup_bytes"] = stats.backup_bytes;
  result["pending_bytes"] = stats.pending_bytes;
  result["snapshot_bytes"] = stats.snapshot_bytes;
  result["snapshot_waits"] = stats.snapshot_waits;
  result["memory_bytes"] = stats.memory_bytes;
  result["connections"] = stats.connections;
  result["refused"] = stats.refused;
  result["unauthenticated"] = door.refused;
  result["turned_away"] = door.turned_away;
  result["half_open"] = door.waiting;
  result["trainers"] = stats.trainers;
  result["lost"] = stats.lost;
  result["present"] = stats.present;
  return result;
}

py::tuple take_refusals(const ServerHolder& self, double timeout_s) {
  return told_refusals(*self.parts().door, timeout_s);
}

py::list table_stats(const ServerHolder& self) {
  std::vector<server::TableStats> tables;
  {
    const GilReleased release;
    tables = self.parts().server.table_stats();
  }
  py::list result;
  for (const server::TableStats& table : tables) {
    py::dict one;
    one["param_set"] = table.param_set;
    one["name"] = table.name;
    one["remote"] = table.remote;
    one["rows"] = table.rows;
    one["bytes"] = table.bytes;
    one["created"] = table.created;
    one["filtered"] = table.filtered;
    one["evicted"] = table.evicted;
    one["unknown_reads"] = table.unknown_reads;
    py::list pushed;
    for (const uint64_t rows : table.pushed) pushed.append(rows);
    one["pushed"] = std::move(pushed);
    result.append(std::move(one));
  }
  return result;
}

}  // namespace

void bind_server(py::module_& module) {
  const server::ServerOptions defaults;
  using no_gil = py::call_guard<GilReleased>;
  py::class_<ServerHolder>(module, "Server")
      .def(py::init([](uint64_t run_id, uint32_t shard_id, uint32_t server_count,
                       uint32_t trainer_count, uint32_t threads, uint64_t liveness_ms,
                       uint64_t reconnect_grace_ms, uint64_t join_deadline_ms, bool elastic,
                       uint64_t rejoin_ms, uint64_t memory_cap_bytes, const std::string& nonfinite,
                       std::string host, std::string snapshot_dir, uint64_t snapshot_memory_bytes,
                       const Secret* secret) {
             server::ServerOptions options;
             options.run_id = run_id;
             options.shard_id = shard_id;
             options.server_count = server_count;
             options.trainer_count = trainer_count;
             options.threads = threads;
             options.liveness_ms = liveness_ms;
             options.reconnect_grace_ms = reconnect_grace_ms;
             options.join_deadline_ms = join_deadline_ms;
             options.elastic = elastic;
             options.rejoin_ms = rejoin_ms;
             options.memory_cap_bytes = memory_cap_bytes;
             options.nonfinite = nonfinite_of(nonfinite);
             options.host = std::move(host);
             options.snapshot_dir = std::move(snapshot_dir);
             options.snapshot_memory_bytes = snapshot_memory_bytes;
             return std::make_unique<ServerHolder>(std::move(options), secret);
           }),
           py::kw_only(), py::arg("run_id"), py::arg("shard_id") = defaults.shard_id,
           py::arg("server_count") = defaults.server_count,
           py::arg("trainer_count") = defaults.trainer_count, py::arg("threads") = defaults.threads,
           py::arg("liveness_ms") = defaults.liveness_ms,
           py::arg("reconnect_grace_ms") = defaults.reconnect_grace_ms,
           py::arg("join_deadline_ms") = defaults.join_deadline_ms,
           py::arg("elastic") = defaults.elastic, py::arg("rejoin_ms") = defaults.rejoin_ms,
           py::arg("memory_cap_bytes") = defaults.memory_cap_bytes, py::arg("nonfinite") = "raise",
           py::arg("host") = "", py::arg("snapshot_dir") = "",
           py::arg("snapshot_memory_bytes") = defaults.snapshot_memory_bytes,
           py::arg("secret") = py::none())
      .def("listen_tcp", &listen_tcp, py::arg("bind") = "127.0.0.1", py::arg("port_first") = 0,
           py::arg("port_last") = 0, py::arg("unix_socket") = true, py::arg("threads") = 1,
           no_gil())
      .def("listen_inproc", &listen_inproc, py::arg("network"), py::arg("name"), no_gil())
      .def("listen_ranks", &listen_ranks, py::arg("network"), no_gil())
      .def(
          "set_snapshot_directory",
          [](ServerHolder& self, const std::string& path) {
            self.parts().server.set_snapshot_directory(path);
          },
          py::arg("path"), no_gil())
      .def("wait_done", &wait_done, py::arg("timeout_s"))
      .def(
          "stop", [](ServerHolder& self, const std::string& reason) { self.parts().stop(reason); },
          py::arg("reason") = "", no_gil())
      .def("stats", &server_stats)
      .def("take_refusals", &take_refusals, py::arg("timeout_s"))
      .def("table_stats", &table_stats);
}

}  // namespace cpudist::bind
