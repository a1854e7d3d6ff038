// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What Python objects hold: everything they need alive, released in an order that is safe, and not
// at all in a forked child.
#pragma once

#include <memory>

#include "bind/bind.h"
#include "core/inproc_channel.h"

namespace cpudist::bind {

class NetworkHolder {
 public:
  explicit NetworkHolder(const core::FaultPlan& plan)
      : network_(std::make_unique<std::shared_ptr<core::InprocNetwork>>(
            core::InprocNetwork::create(plan))) {}
  ~NetworkHolder() {
    if (network_.forked()) return;
    // The last owner joins the delivery thread.
    const py::gil_scoped_release no_gil;
    network_.get("network").reset();
  }
  NetworkHolder(const NetworkHolder&) = delete;
  NetworkHolder& operator=(const NetworkHolder&) = delete;

  const std::shared_ptr<core::InprocNetwork>& get() const { return network_.get("network"); }

 private:
  ForkSafe<std::shared_ptr<core::InprocNetwork>> network_;
};

}  // namespace cpudist::bind
