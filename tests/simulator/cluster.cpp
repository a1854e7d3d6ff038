// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "simulator/cluster.h"

#include "base/wait.h"
#include "kernels/hash.h"
#include "support/server_fixture.h"

namespace cpudist::simulator {
namespace {

constexpr uint64_t kSlabBytes = uint64_t{4} << 20;  // of rows of which nobody knows the number

}  // namespace

Cluster::Cluster(const Plan& plan, const wire::ParamSetLayout& layout, Model& model, size_t life,
                 const std::vector<Disk>& disks, testing::SeededSchedule& schedule,
                 EventLog& events)
    : plan_(plan),
      layout_(layout),
      model_(model),
      schedule_(schedule),
      events_(events),
      run_id_(7 + life),
      hosts_(plan.servers) {
  transport::FaultPlan faults = plan.network;
  faults.seed += 1000 * life;
  network_ = transport::InprocNetwork::create(faults);
  for (uint32_t server = 0; server < plan.servers; ++server) start(server, disks[server], life);
}

Cluster::~Cluster() {
  for (const Host& host : hosts_) host.gate->server().stop();
  for (const Host& host : hosts_) host.listener->stop();
}

void Cluster::start(uint32_t server, const Disk& disk, size_t life) {
  const testing::SeededSchedule::Starting starting(schedule_, process_of_server(server));
  Host& host = hosts_[server];
  host.disk = std::make_shared<testing::MemoryFiles>();
  host.disk->put("/snaps/here", {});
  for (const auto& [path, bytes] : disk) host.disk->put(path, bytes);
  host.disk->watch([this] {
    schedule_.pause();
    if (plan_.slow_disk) let_pass(std::chrono::milliseconds(schedule_.below(20)));
  });
  server::ServerOptions options;
  options.run_id = run_id_;
  options.shard_id = server;
  options.server_count = plan_.servers;
  options.trainer_count = plan_.trainers;
  options.liveness_ms = kLivenessMs;
  options.reconnect_grace_ms = plan_.grace_ms();
  options.elastic = !plan_.in_rounds();
  options.snapshot_dir = "/snaps";
  options.files = host.disk;
  options.host = "host-" + std::to_string(server) + " life " + std::to_string(life);
  if (plan_.capped) options.snapshot_memory_bytes = 1;
  if (plan_.memory_cap > 0) {
    options.memory_cap_bytes =
        testing::values_bytes(layout_, options) + kSlabBytes + plan_.memory_cap;
  }
  Gate::Pushed pushed;
  if (plan_.strategy == Strategy::kGeo) {
    pushed = [this, server](uint32_t rank, uint32_t incarnation, const wire::PushView& push) {
      model_.pushed(server, rank, incarnation, push);
    };
  }
  host.gate = std::make_unique<Gate>(options, layout_, plan_.bound, pushed, schedule_, events_);
  host.listener = network_->listen("server" + std::to_string(server), host.gate.get(),
                                   credentials(wire::Role::kServer, server, 0));
}

client::ClientOptions Cluster::client_options(uint32_t rank, uint32_t incarnation) const {
  client::ClientOptions options;
  options.run_id = run_id_;
  options.trainer_rank = rank;
  options.trainer_count = plan_.trainers;
  options.incarnation = incarnation;
  options.rpc_retries = 1000;
  options.liveness_ms = kLivenessMs;
  options.reconnect_grace_ms = plan_.grace_ms();
  options.probe_ms = options.resend_ms = 10;
  options.connect_deadline_ms = options.rpc_deadline_ms = options.round_deadline_ms = kHangMs;
  options.host = "trainer " + std::to_string(rank) + " process " + std::to_string(incarnation);
  for (const Host& host : hosts_) options.servers.push_back(host.listener->addresses());
  return options;
}

std::shared_ptr<transport::Connector> Cluster::connector(transport::ConnectionHandler* handler,
                                                         uint32_t rank, uint32_t incarnation) {
  return network_->connector(handler, credentials(wire::Role::kTrainer, rank, incarnation));
}

std::shared_ptr<const wire::Credentials> Cluster::credentials(wire::Role role, uint32_t rank,
                                                              uint32_t incarnation) const {
  if (!plan_.keyed) return nullptr;
  const wire::Identity own{run_id_, 0, incarnation, role, static_cast<uint16_t>(rank)};
  return wire::make_credentials("a key of at least thirty-two bytes", own, wire::Purpose::kServers);
}

std::vector<uint32_t> Cluster::owners() const {
  std::vector<uint32_t> owners;
  const uint64_t salt = kernels::table_salt(layout_.tables[0].name);
  for (const int64_t key : model_.keys()) {
    owners.push_back(wire::owner_of_bucket(kernels::bucket_of(key, salt), plan_.servers));
  }
  return owners;
}

std::string Cluster::over_cap() const {
  for (const Host& host : hosts_) {
    const uint64_t cap = host.gate->memory_cap();
    const server::ServerStats stats = host.gate->server().stats();
    const uint64_t kept = stats.table_bytes + stats.dense_bytes;
    if (cap == 0 || kept <= cap) continue;
    return "a server keeps " + std::to_string(kept) + " bytes, and may keep " + std::to_string(cap);
  }
  return {};
}

void Cluster::kill(uint32_t server) {
  Host& host = hosts_[server];
  if (host.left) return;
  host.left = after_crash(host);
  host.gate->kill();
  host.listener->stop();
}

Disk Cluster::after_crash(const Host& host) {
  return host.disk->after_crash([this](size_t most) { return schedule_.below(most + 1); });
}

std::vector<Disk> Cluster::lose_power() {
  std::vector<Disk> disks;
  for (const Host& host : hosts_) disks.push_back(host.left ? *host.left : after_crash(host));
  return disks;
}

void Cluster::add_to(Counts* counts) const {
  const transport::FaultCounts made = network_->counts();
  counts->frames += made.dropped + made.duplicated + made.reordered + made.delayed + made.cut;
}

uint64_t Cluster::stale() const {
  uint64_t count = 0;
  for (const Host& host : hosts_) count += host.gate->stale();
  return count;
}

}  // namespace cpudist::simulator
