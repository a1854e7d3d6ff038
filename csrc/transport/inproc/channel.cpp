// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The in-process network: names, listeners, connectors, and the thread that delivers with faults.

#include "transport/inproc/channel.h"

#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/threads.h"
#include "transport/inproc/faults.h"
#include "transport/inproc/keyed.h"
#include "transport/inproc/link.h"

namespace cpudist::transport {
namespace inproc {
namespace {

constexpr char kScheme[] = "inproc:";

// Closes every link of a listener or connector and waits for the last callback on its side.
void stop_home(Home* home, bool server_side, const std::string& reason) {
  for (const auto& link : home->stop()) {
    End& end = server_side ? link->server() : link->client();
    end.close(reason);
    end.wait_closed();
  }
}

class Network final : public InprocNetwork {
 public:
  explicit Network(const FaultPlan& plan) {
    if (!plan.any()) return;
    faults_ = std::make_shared<FaultSchedule>(plan);
    thread_ = start_io_thread("the thread of an in-process network",
                              [faults = faults_] { faults->run(); });
  }
  ~Network() override {
    if (!thread_.joinable()) return;
    // In a forked child the thread does not exist; on itself it cannot wait.
    if (guard_.forked()) {
      thread_.detach();
      return;
    }
    faults_->stop();
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      join_thread(thread_);
    }
  }
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  std::unique_ptr<Listener> listen(const std::string& name, ConnectionHandler* handler,
                                   std::shared_ptr<const wire::Credentials> credentials) override;
  std::shared_ptr<Connector> connector(ConnectionHandler* handler,
                                       std::shared_ptr<const wire::Credentials> credentials,
                                       uint64_t handshake_deadline_ms) override;
  FaultCounts counts() const override { return faults_ ? faults_->counts() : FaultCounts{}; }

  void forget(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    listeners_.erase(name);
  }

  std::shared_ptr<Connection> connect(const std::string& address, const Link::Side& client) {
    guard_.check("in-process network");
    Link::Side server{};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const bool known_scheme = address.starts_with(kScheme);
      const auto found =
          known_scheme ? listeners_.find(address.substr(sizeof(kScheme) - 1)) : listeners_.end();
      if (found == listeners_.end()) {
        throw Error(ErrorCode::kAddress, "no server of this process listens at " + address);
      }
      server = found->second;
    }
    const auto link = Link::create(address, client, server, faults_);
    if (!client.home->add(link)) {
      throw Error(ErrorCode::kClosed, "the connector to " + address + " is stopped");
    }
    if (!server.home->add(link)) {
      client.home->remove(link);
      throw Error(ErrorCode::kAddress, "the server at " + address + " has stopped");
    }
    link->server().open();
    return link->share(link->client());
  }

 private:
  ProcessGuard guard_;
  std::shared_ptr<FaultSchedule> faults_;
  std::thread thread_;
  std::mutex mutex_;
  std::map<std::string, Link::Side> listeners_;
};

class InprocListener final : public Listener {
 public:
  InprocListener(std::shared_ptr<Network> network, std::string name, std::shared_ptr<Home> home,
                 std::unique_ptr<KeyedHandler> keyed)
      : keyed_(std::move(keyed)),
        network_(std::move(network)),
        name_(std::move(name)),
        home_(std::move(home)) {}
  ~InprocListener() override { stop(); }
  InprocListener(const InprocListener&) = delete;
  InprocListener& operator=(const InprocListener&) = delete;

  std::vector<std::string> addresses() const override { return {kScheme + name_}; }
  void stop() override {
    if (guard_.forked()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(stopped_, true)) return;
    network_->forget(name_);
    stop_home(home_.get(), true, "the server stopped listening");
  }

 private:
  ProcessGuard guard_;
  const std::unique_ptr<KeyedHandler> keyed_;  // null without a key
  std::shared_ptr<Network> network_;
  std::string name_;
  std::shared_ptr<Home> home_;
  std::mutex mutex_;
  bool stopped_ = false;
};

class InprocConnector final : public Connector {
 public:
  InprocConnector(std::shared_ptr<Network> network, ConnectionHandler* handler)
      : network_(std::move(network)), side_{handler, std::make_shared<Home>()} {}
  ~InprocConnector() override { stop(); }
  InprocConnector(const InprocConnector&) = delete;
  InprocConnector& operator=(const InprocConnector&) = delete;

  // Never waits: a server of this process is there or not.
  std::shared_ptr<Connection> connect(const std::string& address, TimePoint) override {
    return network_->connect(address, side_);
  }
  void stop() override {
    if (guard_.forked()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_home(side_.home.get(), false, "the connector stopped");
  }

 private:
  ProcessGuard guard_;
  std::shared_ptr<Network> network_;
  Link::Side side_;
  std::mutex mutex_;
};

std::unique_ptr<Listener> Network::listen(const std::string& name, ConnectionHandler* handler,
                                          std::shared_ptr<const wire::Credentials> credentials) {
  guard_.check("in-process network");
  const auto home = std::make_shared<Home>();
  std::unique_ptr<KeyedHandler> keyed;
  if (faults_ && credentials) {
    keyed = std::make_unique<KeyedHandler>(handler, std::move(credentials), kScheme + name);
  }
  const Link::Side side{keyed ? keyed.get() : handler, home};
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!listeners_.emplace(name, side).second) {
    throw Error(ErrorCode::kAddress, "the address " + (kScheme + name) + " is taken");
  }
  return std::make_unique<InprocListener>(std::static_pointer_cast<Network>(shared_from_this()),
                                          name, home, std::move(keyed));
}

std::shared_ptr<Connector> Network::connector(ConnectionHandler* handler,
                                              std::shared_ptr<const wire::Credentials> credentials,
                                              uint64_t handshake_deadline_ms) {
  const auto self = std::static_pointer_cast<Network>(shared_from_this());
  if (!faults_ || !credentials) return std::make_shared<InprocConnector>(self, handler);
  auto keyed = std::make_shared<KeyedConnector>(handler, std::move(credentials),
                                                std::chrono::milliseconds(handshake_deadline_ms));
  keyed->connect_by(std::make_shared<InprocConnector>(self, keyed.get()));
  return keyed;
}

}  // namespace
}  // namespace inproc

std::shared_ptr<InprocNetwork> InprocNetwork::create(const FaultPlan& plan) {
  return std::make_shared<inproc::Network>(plan);
}

}  // namespace cpudist::transport
