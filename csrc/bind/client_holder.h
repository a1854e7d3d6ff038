// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What Python holds of a client, and how its methods take memory: as addresses.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/holders.h"
#include "client/client.h"

namespace cpudist::bind {

using Address = uintptr_t;  // of a tensor's first element; 0 where nothing is given
using ParameterArgument = std::tuple<uint32_t, Address>;
using TableArgument = std::tuple<uint32_t, Address, uint64_t, Address>;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline std::vector<void*> pointers(const std::vector<Address>& addresses) {
  std::vector<void*> result;
  for (const Address address : addresses) result.push_back(at<void>(address));
  return result;
}

class ClientHolder {
 public:
  ClientHolder(client::ClientOptions options, const std::shared_ptr<NetworkHolder>& network,
               const std::shared_ptr<RankNetworkHolder>& ranks, py::object logger);
  ~ClientHolder();
  ClientHolder(const ClientHolder&) = delete;
  ClientHolder& operator=(const ClientHolder&) = delete;
  client::Client& get() const { return *client_.get("client"); }

 private:
  py::object logger_;
  ForkSafe<std::unique_ptr<client::Client>> client_;
};

using ClientClass = py::class_<ClientHolder>;
using NoGil = py::call_guard<py::gil_scoped_release>;

// The methods of trainers that step by themselves and exchange deltas.
void bind_exchange(ClientClass& client);

}  // namespace cpudist::bind
