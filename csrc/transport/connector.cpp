// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One connector for all address schemes.

#include <string_view>
#include <utility>

#include "base/errors.h"
#include "transport/inproc/channel.h"

namespace cpudist::transport {
namespace {

class Dispatch final : public Connector {
 public:
  Dispatch(std::shared_ptr<Connector> inproc, std::shared_ptr<Connector> tcp,
           std::shared_ptr<Connector> ranks)
      : inproc_(std::move(inproc)), tcp_(std::move(tcp)), ranks_(std::move(ranks)) {}

  std::shared_ptr<Connection> connect(const std::string& address, TimePoint deadline) override {
    Connector* connector = find(address);
    if (connector == nullptr) {
      throw Error(ErrorCode::kAddress, "this client was made without a connector for " + address);
    }
    return connector->connect(address, deadline);
  }

  void stop_attempts() override {
    for (const auto& connector : {inproc_, tcp_, ranks_}) {
      if (connector) connector->stop_attempts();
    }
  }
  void stop() override {
    for (const auto& connector : {inproc_, tcp_, ranks_}) {
      if (connector) connector->stop();
    }
  }

 private:
  Connector* find(const std::string& address) const {
    const std::string_view text = address;
    if (text.starts_with("inproc:")) return inproc_.get();
    if (text.starts_with("tcp:") || text.starts_with("unix:")) return tcp_.get();
    if (text.starts_with("c10d:")) return ranks_.get();
    throw Error(ErrorCode::kAddress,
                "expected an address inproc:NAME, unix:@NAME, tcp:IP:PORT or c10d:RANK, found '" +
                    address.substr(0, 200) + "'");
  }

  std::shared_ptr<Connector> inproc_;
  std::shared_ptr<Connector> tcp_;
  std::shared_ptr<Connector> ranks_;
};

}  // namespace

std::shared_ptr<Connector> make_connector(std::shared_ptr<Connector> inproc,
                                          std::shared_ptr<Connector> tcp,
                                          std::shared_ptr<Connector> ranks) {
  return std::make_shared<Dispatch>(std::move(inproc), std::move(tcp), std::move(ranks));
}

}  // namespace cpudist::transport
