// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The class DataShuffle: one global shuffle of a store, from listening to the end.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/data_holders.h"
#include "bind/refusals.h"
#include "bind/secret.h"
#include "data/shuffle/store.h"
#include "transport/tcp/channel.h"

namespace cpudist::bind {

namespace {

struct Shuffle {
  Shuffle(const data::Schema& schema, data::ShuffleOptions made)
      : options(std::move(made)),
        slabs(options.trainers),
        exchange(schema, options, [this](uint32_t source, std::span<const uint64_t> words, size_t) {
          slabs.add(source, words);
        }) {}
  ~Shuffle() {
    if (listener) listener->stop();
    exchange.close();
  }

  const data::ShuffleOptions options;
  data::ShuffleSlabs slabs;
  data::ShuffleExchange exchange;
  std::unique_ptr<transport::Listener> listener;         // until connect() takes it
  std::shared_ptr<const wire::Credentials> credentials;  // null without a key
  const std::shared_ptr<transport::Door> door = std::make_shared<transport::Door>();
};

struct ShuffleHolder : DataHolder<Shuffle> {
  using DataHolder::DataHolder;
};

std::unique_ptr<ShuffleHolder> make_shuffle(const DataSchema& schema, uint32_t rank,
                                            uint32_t trainers, uint64_t run_id, uint32_t epoch,
                                            std::string host, uint64_t connect_deadline_ms,
                                            uint64_t liveness_ms, uint64_t round_deadline_ms,
                                            const Secret* secret) {
  data::ShuffleOptions options;
  options.rank = rank;
  options.trainers = trainers;
  options.run_id = run_id;
  options.epoch = epoch;
  options.host = std::move(host);
  options.connect_deadline_ms = connect_deadline_ms;
  options.liveness_ms = liveness_ms;
  options.round_deadline_ms = round_deadline_ms;
  options.interrupted = python_wait(0.0).interrupted;
  wire::Identity own;
  own.run_id = run_id;
  own.epoch = epoch;
  own.rank = static_cast<uint16_t>(rank);
  auto shuffle = std::make_unique<Shuffle>(schema.schema, std::move(options));
  shuffle->credentials = credentials_of(secret, own, wire::Purpose::kShuffle);
  return std::make_unique<ShuffleHolder>(std::move(shuffle), "DataShuffle");
}

std::vector<std::string> listen_for_shuffle(const ShuffleHolder& self, const std::string& bind,
                                            uint16_t port_first, uint16_t port_last) {
  transport::ListenOptions options;
  options.bind_address = bind;
  options.port_first = port_first;
  options.port_last = std::max(port_first, port_last);
  Shuffle& shuffle = self.get();
  options.credentials = shuffle.credentials;
  options.door = shuffle.door;
  options.flow.heed(std::chrono::milliseconds(shuffle.options.liveness_ms));
  shuffle.listener = transport::listen_tcp(options, shuffle.exchange.handler());
  return shuffle.listener->addresses();
}

data::ShuffleKey make_key(const std::string& by, uint64_t used_slot) {
  using Kind = data::ShuffleKey::Kind;
  if (by == "record") return {Kind::kRecord, 0};
  if (by == "instance") return {Kind::kInstance, 0};
  if (by == "slot") return {Kind::kSlot, used_slot};
  throw Error(ErrorCode::kInvalidArgument,
              "by: expected 'record', 'instance' or 'slot', found '" + by + "'");
}

void run_shuffle(const ShuffleHolder& self, const StoreHolder& store,
                 std::vector<std::vector<std::string>> addresses, uint64_t seed,
                 const std::string& by, uint64_t used_slot) {
  Shuffle& shuffle = self.get();
  const data::ShuffleKey key = make_key(by, used_slot);
  auto connector = transport::make_tcp_connector(shuffle.exchange.handler(),
                                                 transport::ChannelLimits{}, shuffle.credentials);
  shuffle.exchange.connect(std::move(addresses), std::move(shuffle.listener), std::move(connector));
  data::shuffle_store(store.get(), shuffle.exchange, shuffle.slabs, shuffle.options.rank,
                      shuffle.options.trainers, seed, key);
  shuffle.exchange.close();
}

}  // namespace

void bind_data_shuffle(py::module_& module) {
  using no_gil = py::call_guard<GilReleased>;
  py::class_<ShuffleHolder>(module, "DataShuffle")
      .def(py::init(&make_shuffle), py::arg("schema"), py::kw_only(), py::arg("rank"),
           py::arg("trainers"), py::arg("run_id"), py::arg("epoch"), py::arg("host"),
           py::arg("connect_deadline_ms"), py::arg("liveness_ms"), py::arg("round_deadline_ms"),
           py::arg("secret") = py::none())
      .def("listen", &listen_for_shuffle, py::kw_only(), py::arg("bind"), py::arg("port_first"),
           py::arg("port_last"), no_gil())
      .def(
          "take_refusals",
          [](const ShuffleHolder& self, double timeout_s) {
            return told_refusals(*self.get().door, timeout_s);
          },
          py::arg("timeout_s"))
      .def("run", &run_shuffle, py::arg("store"), py::kw_only(), py::arg("addresses"),
           py::arg("seed"), py::arg("by"), py::arg("used_slot") = 0, no_gil());
}

}  // namespace cpudist::bind
