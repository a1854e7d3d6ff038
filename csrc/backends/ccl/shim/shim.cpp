// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Calls oneCCL for shim.h. Nothing but oneCCL's v1 C++ interface is used here, which is the only
// one that its CPU wheels have.
#include "shim.h"

#include <cstdio>
#include <exception>
#include <memory>
#include <oneapi/ccl.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

thread_local std::string last_error;

// Runs a call of oneCCL, whose exceptions must not cross the boundary.
template <typename Call, typename Result>
Result guarded(Result failed, Call&& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "an exception of an unknown type";
  }
  return failed;
}

// oneCCL keeps the store as long as the communicator, and writes to it when that is destroyed: then
// the process that keeps the store may be gone, and an exception would end this one.
class Store final : public ccl::kvs_interface {
 public:
  Store(int id, const cpudist_ccl_store& calls) : id_(id), calls_(calls) {}

  ccl::vector_class<char> get(const ccl::string_class& key) override {
    ccl::vector_class<char> value;
    auto emit = [](void* sink, const char* data, size_t size) {
      static_cast<ccl::vector_class<char>*>(sink)->assign(data, data + size);
    };
    if (calls_.get(calls_.context, key.c_str(), &value, emit) != 0) failed("read");
    return value;
  }

  void set(const ccl::string_class& key, const ccl::vector_class<char>& value) override {
    if (calls_.set(calls_.context, key.c_str(), value.data(), value.size()) != 0) failed("write");
  }

  int get_id() override { return id_; }

  void close() { closing_ = true; }

 private:
  void failed(const char* what) const {
    if (closing_) return;
    throw std::runtime_error(std::string("the members' store refused to ") + what);
  }

  int id_;
  cpudist_ccl_store calls_;
  bool closing_ = false;
};

struct Communicator {
  std::shared_ptr<Store> store;
  std::unique_ptr<ccl::communicator> handle;
  int size = 0;
};

ccl::communicator& handle_of(void* communicator) {
  return *static_cast<Communicator*>(communicator)->handle;
}

ccl::datatype datatype_of(int dtype) {
  switch (dtype) {
    case CPUDIST_CCL_INT8:
      return ccl::datatype::int8;
    case CPUDIST_CCL_UINT8:
      return ccl::datatype::uint8;
    case CPUDIST_CCL_INT16:
      return ccl::datatype::int16;
    case CPUDIST_CCL_INT32:
      return ccl::datatype::int32;
    case CPUDIST_CCL_INT64:
      return ccl::datatype::int64;
    case CPUDIST_CCL_FLOAT16:
      return ccl::datatype::float16;
    case CPUDIST_CCL_FLOAT32:
      return ccl::datatype::float32;
    case CPUDIST_CCL_FLOAT64:
      return ccl::datatype::float64;
    case CPUDIST_CCL_BFLOAT16:
      return ccl::datatype::bfloat16;
    default:
      throw std::invalid_argument("unknown dtype");
  }
}

ccl::reduction reduction_of(int reduction) {
  switch (reduction) {
    case CPUDIST_CCL_SUM:
      return ccl::reduction::sum;
    case CPUDIST_CCL_PROD:
      return ccl::reduction::prod;
    case CPUDIST_CCL_MIN:
      return ccl::reduction::min;
    case CPUDIST_CCL_MAX:
      return ccl::reduction::max;
    default:
      throw std::invalid_argument("unknown reduction");
  }
}

// Starts a collective.
template <typename Call>
void* begin(Call&& call) {
  return guarded(static_cast<void*>(nullptr),
                 [&] { return static_cast<void*>(new ccl::event(call())); });
}

const char* error() { return last_error.c_str(); }

const char* release() {
  static const std::string text = [] {
    const ccl::library_version version = ccl::get_library_version();
    return std::to_string(version.major) + "." + std::to_string(version.minor) + "." +
           std::to_string(version.update);
  }();
  return text.c_str();
}

void* make(int size, int rank, int id, const cpudist_ccl_store* store) {
  return guarded(static_cast<void*>(nullptr), [&] {
    auto made = std::make_unique<Communicator>();
    made->size = size;
    made->store = std::make_shared<Store>(id, *store);
    made->handle = std::make_unique<ccl::communicator>(
        ccl::create_communicator(size, rank, std::shared_ptr<ccl::kvs_interface>(made->store)));
    return static_cast<void*>(made.release());
  });
}

void free_communicator(void* communicator) {
  const std::unique_ptr<Communicator> made(static_cast<Communicator*>(communicator));
  made->store->close();
  guarded(0, [&] {
    made->handle.reset();
    return 0;
  });
}

void* allreduce(void* communicator, const void* in, void* out, size_t count, int dtype,
                int reduction) {
  return begin([&] {
    return ccl::allreduce(in, out, count, datatype_of(dtype), reduction_of(reduction),
                          handle_of(communicator));
  });
}

void* reduce(void* communicator, const void* in, void* out, size_t count, int dtype, int reduction,
             int root) {
  return begin([&] {
    return ccl::reduce(in, out, count, datatype_of(dtype), reduction_of(reduction), root,
                       handle_of(communicator));
  });
}

void* reduce_scatter(void* communicator, const void* in, void* out, size_t out_count, int dtype,
                     int reduction) {
  return begin([&] {
    return ccl::reduce_scatter(in, out, out_count, datatype_of(dtype), reduction_of(reduction),
                               handle_of(communicator));
  });
}

void* broadcast(void* communicator, void* buffer, size_t size_bytes, int root) {
  return begin([&] {
    return ccl::broadcast(buffer, size_bytes, ccl::datatype::uint8, root, handle_of(communicator));
  });
}

void* allgather(void* communicator, const void* in, size_t size_bytes, void* out) {
  return begin([&] {
    const auto size = static_cast<size_t>(static_cast<Communicator*>(communicator)->size);
    const ccl::vector_class<size_t> counts(size, size_bytes);
    return ccl::allgatherv(in, size_bytes, out, counts, ccl::datatype::uint8,
                           handle_of(communicator));
  });
}

void* alltoall(void* communicator, const void* in, const size_t* in_bytes, void* out,
               const size_t* out_bytes) {
  return begin([&] {
    const int size = static_cast<Communicator*>(communicator)->size;
    return ccl::alltoallv(in, ccl::vector_class<size_t>(in_bytes, in_bytes + size), out,
                          ccl::vector_class<size_t>(out_bytes, out_bytes + size),
                          ccl::datatype::uint8, handle_of(communicator));
  });
}

void* send(void* communicator, void* buffer, size_t size_bytes, int peer) {
  return begin([&] {
    return ccl::send(buffer, size_bytes, ccl::datatype::uint8, peer, handle_of(communicator));
  });
}

void* receive(void* communicator, void* buffer, size_t size_bytes, int peer) {
  return begin([&] {
    return ccl::recv(buffer, size_bytes, ccl::datatype::uint8, peer, handle_of(communicator));
  });
}

void* barrier(void* communicator) {
  return begin([&] { return ccl::barrier(handle_of(communicator)); });
}

int test(void* event) {
  return guarded(-1, [&] { return static_cast<ccl::event*>(event)->test() ? 1 : 0; });
}

void forget(void* event) {
  const std::unique_ptr<ccl::event> done(static_cast<ccl::event*>(event));
}

constexpr cpudist_ccl_shim kShim = {
    CPUDIST_CCL_SHIM_VERSION,
    error,
    release,
    make,
    free_communicator,
    allreduce,
    reduce,
    reduce_scatter,
    broadcast,
    allgather,
    alltoall,
    send,
    receive,
    barrier,
    test,
    forget,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const cpudist_ccl_shim* cpudist_ccl_open(
    char* error_text, size_t error_size) {
  const bool started = guarded(false, [] {
    ccl::init();
    return true;
  });
  if (started) return &kShim;
  std::snprintf(error_text, error_size, "%s", last_error.c_str());
  return nullptr;
}
