// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A run's key as Python has it: nothing shows it. What fails with it among its arguments prints
// them.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/errors.h"
#include "base/hmac.h"
#include "bind/bind.h"
#include "wire/handshake/handshake.h"

namespace cpudist::bind {

class Secret {
 public:
  explicit Secret(std::string key) : key_(std::move(key)) { wire::check_secret(key_); }
  const std::string& key() const { return key_; }
  // Of words that are no part of a handshake: what that proves is as long, and begins with another.
  Mac sign(std::string_view data) const {
    std::string signed_bytes(kWritten, sizeof kWritten);
    signed_bytes += data;
    return hmac_sha256(
        key_, {reinterpret_cast<const uint8_t*>(signed_bytes.data()), signed_bytes.size()});
  }
  bool has_signed(std::string_view data, std::string_view mac) const {
    Mac found{};
    if (mac.size() != found.size()) return false;
    std::copy(mac.begin(), mac.end(), found.begin());
    return equal_macs(found, sign(data));
  }
  // In a time that says nothing of where they differ.
  bool equals(const Secret& other) const {
    if (key_.size() != other.key_.size()) return false;
    unsigned differs = 0;
    for (size_t i = 0; i < key_.size(); ++i) {
      differs |= static_cast<unsigned char>(key_[i]) ^ static_cast<unsigned char>(other.key_[i]);
    }
    return differs == 0;
  }

 private:
  static constexpr char kWritten[] = "cpudist written";

  std::string key_;
};

// Null without a key.
inline std::shared_ptr<const wire::Credentials> credentials_of(const Secret* secret,
                                                               const wire::Identity& own,
                                                               wire::Purpose purpose) {
  return secret == nullptr ? nullptr : wire::make_credentials(secret->key(), own, purpose);
}

inline void bind_secret(py::module_& module) {
  py::class_<Secret>(module, "Secret")
      .def(py::init([](const py::object& key) {
             // Not by its type: of a misfit the message would have the argument.
             if (!py::isinstance<py::bytes>(key)) {
               throw py::type_error(std::string("Secret: expected bytes, found ") +
                                    Py_TYPE(key.ptr())->tp_name);
             }
             return std::make_unique<Secret>(key.cast<std::string>());
           }),
           py::arg("key"))
      .def(
          "sign",
          [](const Secret& self, const py::bytes& data) {
            const Mac mac = self.sign(std::string_view(data));
            return py::bytes(reinterpret_cast<const char*>(mac.data()), mac.size());
          },
          py::arg("data"))
      .def(
          "has_signed",
          [](const Secret& self, const py::bytes& data, const py::bytes& mac) {
            return self.has_signed(std::string_view(data), std::string_view(mac));
          },
          py::arg("data"), py::arg("mac"))
      .def("__repr__", [](const Secret&) { return "<Secret>"; })
      .def("__eq__",
           [](const Secret& self, const py::object& other) {
             return py::isinstance<Secret>(other) && self.equals(other.cast<const Secret&>());
           })
      .def("__hash__", [](const Secret&) { return 0; });
}

}  // namespace cpudist::bind
