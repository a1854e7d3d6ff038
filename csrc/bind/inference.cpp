// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Exported tables: lookups in files that Python has mapped.
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "bind/bind.h"
#include "bind/gil.h"
#include "bind/lent.h"
#include "inference/row_table.h"
#include "kernels/hash.h"
#include "kernels/quantize.h"
#include "wire/layout.h"

namespace cpudist::bind {

namespace {

using inference::CheckedBytes;
using inference::RowColumns;
using inference::RowDtype;
using inference::RowFile;
using inference::RowTable;

// Bytes and who lends them.
struct LentBytes {
  LentBytes(const py::object& data, std::vector<uint32_t> checksums, size_t chunk_bytes,
            std::string name)
      : lent(data),
        checked(std::make_shared<const CheckedBytes>(
            std::span(static_cast<const std::byte*>(lent.data()), lent.size_bytes()),
            std::move(checksums), chunk_bytes, std::move(name))) {}
  Lent lent;
  std::shared_ptr<const CheckedBytes> checked;
};

RowDtype row_dtype_from(const std::string& name) {
  if (name == "fp32") return RowDtype::kFloat32;
  if (name == "fp16") return RowDtype::kFloat16;
  if (name == "bf16") return RowDtype::kBFloat16;
  if (name == "int8") return RowDtype::kInt8;
  throw Error(ErrorCode::kInvalidArgument,
              "rows of dtype '" + name + "', expected fp32, fp16, bf16 or int8");
}

std::shared_ptr<RowFile> make_rows_file(const std::shared_ptr<LentBytes>& bytes, uint64_t rows,
                                        std::pair<uint32_t, uint32_t> buckets,
                                        const std::string& dtype, uint64_t dim, uint64_t keys,
                                        uint64_t weight, uint64_t scale, uint64_t bucket_begin) {
  // Who lends the bytes stays as long as who reads them.
  const std::shared_ptr<const CheckedBytes> checked(bytes, bytes->checked.get());
  return std::make_shared<RowFile>(checked, RowColumns{keys, weight, scale, bucket_begin}, rows,
                                   buckets.first, buckets.second, row_dtype_from(dtype), dim);
}

std::shared_ptr<RowTable> make_exported(const wire::TableSpec& spec,
                                        std::vector<std::vector<std::shared_ptr<RowFile>>> layers) {
  std::vector<inference::Layer> constant;
  for (auto& layer : layers) constant.emplace_back(layer.begin(), layer.end());
  return std::make_shared<RowTable>(spec.name, spec.rows, spec.dim, kernels::table_salt(spec.name),
                                    wire::initial_rows(spec), std::move(constant),
                                    inference::KeyRules{spec.open, spec.unknown_zeros});
}

uint64_t lookup_exported(const RowTable& table, uintptr_t ids, uint64_t count, bool small,
                         uintptr_t out) {
  const GilReleased release;
  auto* rows = reinterpret_cast<float*>(out);
  if (small) return table.lookup(reinterpret_cast<const int32_t*>(ids), count, rows);
  return table.lookup(reinterpret_cast<const int64_t*>(ids), count, rows);
}

void check_exported(const RowTable& table) {
  const GilReleased release;
  table.check_all();
}

void narrow_rows(uintptr_t rows, uint64_t count, uint64_t dim, const std::string& dtype,
                 uintptr_t out, uintptr_t scales) {
  const auto* values = reinterpret_cast<const float*>(rows);
  const RowDtype wanted = row_dtype_from(dtype);
  const GilReleased release;
  switch (wanted) {
    case RowDtype::kFloat32:
      throw Error(ErrorCode::kInvalidArgument, "narrow: fp32 is what rows have already");
    case RowDtype::kFloat16:
      kernels::to_half(values, reinterpret_cast<uint16_t*>(out), count * dim);
      return;
    case RowDtype::kBFloat16:
      kernels::to_bfloat16(values, reinterpret_cast<uint16_t*>(out), count * dim);
      return;
    case RowDtype::kInt8: {
      std::vector<uint16_t> short_scales(count);
      kernels::to_int8(values, count, dim, reinterpret_cast<int8_t*>(out), short_scales.data());
      kernels::from_bfloat16(short_scales.data(), reinterpret_cast<float*>(scales), count);
      return;
    }
  }
}

void raise_damage(const inference::Damage& damage) {
  try {
    const py::object cls = py::module_::import("torch_cpudist.errors").attr("SnapshotCorruptError");
    PyErr_SetObject(cls.ptr(), cls(damage.what(), damage.file()).ptr());
  } catch (py::error_already_set& error) {
    error.restore();
  }
}

}  // namespace

void bind_inference(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const inference::Damage& damage) {
      raise_damage(damage);
    }
  });
  py::class_<LentBytes, std::shared_ptr<LentBytes>>(module, "ExportedBytes")
      .def(py::init<const py::object&, std::vector<uint32_t>, size_t, std::string>(),
           py::arg("data"), py::arg("checksums"), py::arg("chunk_bytes"), py::arg("name"));
  py::class_<RowFile, std::shared_ptr<RowFile>>(module, "ExportedRows")
      .def(py::init(&make_rows_file), py::arg("data"), py::kw_only(), py::arg("rows"),
           py::arg("buckets"), py::arg("dtype"), py::arg("dim"), py::arg("keys") = 0,
           py::arg("weight") = 0, py::arg("scale") = 0, py::arg("bucket_begin") = 0);
  py::class_<RowTable, std::shared_ptr<RowTable>>(module, "ExportedTable")
      .def(py::init(&make_exported), py::arg("spec"), py::arg("layers"))
      .def("lookup", &lookup_exported, py::arg("ids"), py::arg("count"), py::arg("small"),
           py::arg("out"))
      .def("check_all", &check_exported);
  module.def("narrow_rows", &narrow_rows, py::arg("rows"), py::arg("count"), py::arg("dim"),
             py::arg("dtype"), py::arg("out"), py::arg("scales"));
}

}  // namespace cpudist::bind
