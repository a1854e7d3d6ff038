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
#include "bind/secret.h"
#include "client/client.h"
#include "client/push/cut.h"

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

// From now on `told(begins)` is called at both ends of the calling thread's waits for servers;
// None ends it. Returns who was told before. The caller keeps `told` alive.
py::object listen_to_waits(const py::object& told);

// Number, whether taken, name, reason, and of what was taken back: 1 on all servers, so that it may
// be marked again, 2 on some, while on others that came too late; else 0.
using MarkAnswer = std::tuple<uint64_t, bool, std::string, std::string, int>;

inline MarkAnswer mark_answer(const client::CutAnswer& answer) {
  const int taken_back = answer.taken_back ? 1 : answer.torn ? 2 : 0;
  return {answer.number, answer.taken, answer.name, answer.reason, taken_back};
}

class ClientHolder {
 public:
  ClientHolder(client::ClientOptions options, const std::shared_ptr<NetworkHolder>& network,
               const std::shared_ptr<RankNetworkHolder>& ranks, py::object logger,
               const Secret* secret);
  ~ClientHolder();
  ClientHolder(const ClientHolder&) = delete;
  ClientHolder& operator=(const ClientHolder&) = delete;
  client::Client& get() const { return *client_.get("client"); }

 private:
  py::object logger_;
  ForkSafe<std::unique_ptr<client::Client>> client_;
};

// A part of a client: its Python object keeps the client's alive.
template <typename Part>
class PartHolder {
 public:
  explicit PartHolder(std::shared_ptr<Part> part)
      : part_(std::make_unique<std::shared_ptr<Part>>(std::move(part))) {}
  ~PartHolder() {
    if (part_.forked()) return;
    const GilReleased no_gil;  // the last holder joins the thread of a queue
    part_.get("client").reset();
  }
  PartHolder(const PartHolder&) = delete;
  PartHolder& operator=(const PartHolder&) = delete;
  Part& get() const { return *share(); }
  const std::shared_ptr<Part>& share() const { return part_.get("client"); }

 private:
  ForkSafe<std::shared_ptr<Part>> part_;
};

using ParamSetHolder = PartHolder<client::ParamSet>;
using ParamSetClass = py::class_<ParamSetHolder>;
using NoGil = py::call_guard<GilReleased>;

// A method of what a holder holds, as a function of the holder. Its arguments are no addresses.
template <typename Holder, typename Class, typename Result, typename... Arguments>
auto method(Result (Class::*call)(Arguments...)) {
  return [call](const Holder& self, Arguments... arguments) -> Result {
    return (self.get().*call)(std::forward<Arguments>(arguments)...);
  };
}
template <typename Holder, typename Class, typename Result, typename... Arguments>
auto method(Result (Class::*call)(Arguments...) const) {
  return [call](const Holder& self, Arguments... arguments) -> Result {
    return (self.get().*call)(std::forward<Arguments>(arguments)...);
  };
}

// One step, as methods take it. Its memory is the caller's.
client::StepPush make_step(std::vector<kernels::OptimizerConfig> configs,
                           const std::vector<ParameterArgument>& parameters,
                           const std::vector<TableArgument>& tables,
                           const std::vector<Address>& weights);

// The class of trainers whose pushes are applied as they come, and how a set begins with it.
void bind_pushes(py::module_& module, ParamSetClass& set);
// Cuts of snapshots.
void bind_cuts(ParamSetClass& set);
// The class of trainers that step by themselves and exchange deltas, and how a set begins with it.
void bind_exchange(py::module_& module, ParamSetClass& set);
void bind_loads(ParamSetClass& set);

}  // namespace cpudist::bind
