// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A run's key as Python has it: nothing shows it. What fails with it among its arguments prints
// them.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/errors.h"
#include "bind/bind.h"
#include "wire/handshake/handshake.h"

namespace cpudist::bind {

class Secret {
 public:
  explicit Secret(std::string key) : key_(std::move(key)) { wire::check_secret(key_); }
  const std::string& key() const { return key_; }
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
      .def("__repr__", [](const Secret&) { return "<Secret>"; })
      .def("__eq__",
           [](const Secret& self, const py::object& other) {
             return py::isinstance<Secret>(other) && self.equals(other.cast<const Secret&>());
           })
      .def("__hash__", [](const Secret&) { return 0; });
}

}  // namespace cpudist::bind
