// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One connector for all address schemes.

#include <string_view>
#include <utility>

#include "core/errors.h"
#include "core/inproc_channel.h"

namespace cpudist::core {
namespace {

class Dispatch final : public Connector {
 public:
  Dispatch(std::shared_ptr<Connector> inproc, std::shared_ptr<Connector> tcp)
      : inproc_(std::move(inproc)), tcp_(std::move(tcp)) {}

  std::shared_ptr<Connection> connect(const std::string& address, TimePoint deadline) override {
    const std::string_view text = address;
    const bool in_process = text.starts_with("inproc:");
    if (!in_process && !text.starts_with("tcp:") && !text.starts_with("unix:")) {
      throw Error(ErrorCode::kAddress,
                  "expected an address inproc:NAME, unix:@NAME or tcp:IP:PORT, found '" +
                      address.substr(0, 200) + "'");
    }
    Connector* connector = in_process ? inproc_.get() : tcp_.get();
    if (connector == nullptr) {
      throw Error(ErrorCode::kAddress, "this client was made without a connector for " + address);
    }
    return connector->connect(address, deadline);
  }

  void stop() override {
    if (inproc_) inproc_->stop();
    if (tcp_) tcp_->stop();
  }

 private:
  std::shared_ptr<Connector> inproc_;
  std::shared_ptr<Connector> tcp_;
};

}  // namespace

std::shared_ptr<Connector> make_connector(std::shared_ptr<Connector> inproc,
                                          std::shared_ptr<Connector> tcp) {
  return std::make_shared<Dispatch>(std::move(inproc), std::move(tcp));
}

}  // namespace cpudist::core
