// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one vocabulary of tests
//
// Tables and blocks of one server that are updated and saved by hand, without the server around
// them; what is in the files of a snapshot; and loading those.
#pragma once

#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/wait.h"
#include "server/snapshot/input.h"
#include "server/snapshot/writer.h"
#include "server/update/update.h"
#include "support/memory_files.h"
#include "support/patience.h"
#include "support/server_fixture.h"

namespace cpudist::testing {

using Bytes = MemoryFiles::Bytes;

inline kernels::OptimizerConfig adagrad_config() {
  kernels::OptimizerConfig config;
  config.kind = kernels::OptimizerKind::kAdagrad;
  config.lr = 0.125;
  config.eps = 1e-10;
  return config;
}

// `tables` tables "t0" .. of `rows` rows of `dim`, and blocks "w" (float32) and "d" (float64).
inline wire::ParamSetLayout snapshot_layout(uint32_t tables, uint64_t rows, uint32_t dim,
                                            double average_decay = 0) {
  wire::ParamSetLayout layout = small_layout(adagrad_config());
  layout.tables.clear();
  layout.average_decay = average_decay;
  for (uint32_t i = 0; i < tables; ++i) {
    wire::TableSpec spec;
    spec.name = "t" + std::to_string(i);
    spec.rows = rows;
    spec.dim = dim;
    spec.remote = i % 2 == 1;
    if (spec.remote) spec.initial = {{kernels::InitialOp::kNormal, 0.0, 0.5}};
    layout.tables.push_back(spec);
  }
  return layout;
}

// Every row of a table by its key: count, last_seen, weight, state, average.
using RowsByKey = std::map<int64_t, Bytes>;

struct Rig {
  wire::ParamSetLayout layout;
  uint32_t shard;
  uint32_t servers;
  table::ParamStore store;
  std::shared_mutex mutex;
  server::UpdatePool pool;
  server::GradientUpdate update;
  wire::Version version;
  std::vector<std::shared_ptr<server::GoneKeys>> gone;  // by table; null where no row goes

  Rig(const wire::ParamSetLayout& given, uint32_t shard_id = 0, uint32_t server_count = 1,
      uint32_t threads = 1)
      : layout(given), shard(shard_id), servers(server_count), pool(threads), update(store, pool) {
    store.averaging = {layout.average_decay};
    for (uint32_t id = 0; id < layout.tables.size(); ++id) {
      store.tables.push_back(std::make_unique<table::Table>(
          id, layout.tables[id], layout.configs[0], shard, servers, store.averaging));
      const bool evicts = layout.tables[id].eviction.on;
      gone.push_back(evicts ? std::make_shared<server::GoneKeys>() : nullptr);
    }
    store.blocks.resize(layout.blocks.size());
    for (uint32_t id = 0; id < layout.blocks.size(); ++id) {
      if (layout.blocks[id].shard != shard) continue;
      store.blocks[id] = std::make_unique<table::DenseBlock>(id, layout.blocks[id],
                                                             layout.configs[0], store.averaging);
    }
  }

  std::vector<int64_t> own_keys(uint32_t table) const {
    server::ServerOptions options;
    options.shard_id = shard;
    options.server_count = servers;
    return keys_of(layout, options, table);
  }
  // Values of all blocks, and of all rows of the tables that are not remote.
  void store_values() {
    for (const auto& table : store.tables) {
      if (table->spec().remote) continue;
      const std::vector<int64_t> keys = own_keys(table->id());
      std::vector<float> weights;
      for (const int64_t key : keys) {
        for (uint32_t c = 0; c < table->dim(); ++c) weights.push_back(initial_weight(key, c));
      }
      wire::TableRows rows;
      rows.keys = keys;
      rows.weights = weights;
      table->store(rows);
    }
    for (const auto& block : store.blocks) {
      if (block == nullptr) continue;
      const Bytes bytes(block->spec().elements * size_of(block->spec().dtype), 0x3f);
      wire::BlockValues values;
      values.block = block->id();
      values.weights = bytes;
      block->store(values);
    }
  }
  // One update, as the only push of a round: these rows of each table, and every block.
  void push(const std::vector<std::vector<int64_t>>& keys) {
    PushSpec spec;
    spec.configs = layout.configs;
    for (const auto& block : store.blocks) {
      if (block != nullptr) spec.blocks[block->id()].resize(block->spec().elements, 0.5);
    }
    for (uint32_t table = 0; table < keys.size(); ++table) {
      for (const int64_t key : keys[table]) spec.tables[table].push_back({key, 0.25f});
    }
    server::Push push;
    push.payload = make_push(layout, spec);
    push.view = wire::decode_push(view(push.payload), layout);
    {
      const std::shared_lock lock(mutex);
      push.sections = server::locate_rows(push.view, store);
    }
    const std::unique_lock lock(mutex);
    server::Pushes pushes;
    pushes.emplace(0, std::move(push));
    update.prepare(pushes);
    update.apply(pushes, version.round);
    ++version.round;
    ++version.samples;
    ++version.steps;
    sweep();
  }
  // The end of an update, with the lock held: all rows go that are to.
  void sweep() {
    for (const auto& table : store.tables) {
      if (!table->evicts()) continue;
      table::Sweep all;
      all.updates = version.round;
      all.records = all.most = table->record_count();
      gone[table->id()]->add(table->sweep(all).freed);
    }
  }
  // Some rows of every table.
  void push_some(std::mt19937& random, size_t rows) {
    std::vector<std::vector<int64_t>> keys(store.tables.size());
    for (uint32_t table = 0; table < keys.size(); ++table) {
      const std::vector<int64_t> own = own_keys(table);
      std::set<int64_t> chosen;
      for (size_t i = 0; i < rows && !own.empty(); ++i) chosen.insert(own[random() % own.size()]);
      keys[table].assign(chosen.begin(), chosen.end());
    }
    push(keys);
  }

  // Of all rows, with the lock held.
  RowsByKey rows(uint32_t id) const {
    const table::Table& table = *store.tables[id];
    const table::RecordShape shape = table.shape();
    RowsByKey found;
    for (uint32_t record = 0; record < table.record_count(); ++record) {
      if (!table.header(record).is_row()) continue;
      const auto* begin = reinterpret_cast<const uint8_t*>(&table.header(record));
      const size_t elements = shape.dim * (shape.averaged ? 2 : 1) + shape.state_elements;
      const bool fresh =
          found
              .emplace(table.header(record).key,
                       Bytes(begin + sizeof(int64_t),
                             begin + sizeof(table::RowHeader) + elements * sizeof(float)))
              .second;
      CHECK(fresh);
    }
    return found;
  }
  std::vector<RowsByKey> all_rows() const {
    std::vector<RowsByKey> found;
    for (uint32_t id = 0; id < store.tables.size(); ++id) found.push_back(rows(id));
    return found;
  }
  // Weight, state and average of every block as files have them, with the lock held.
  std::map<std::string, Bytes> dense() const {
    std::map<std::string, Bytes> found;
    for (const auto& block : store.blocks) {
      if (block == nullptr) continue;
      const std::string& name = block->spec().name;
      found[name + ".weight"] = {block->weight().begin(), block->weight().end()};
      if (!block->state().empty()) {
        found[name + ".state"] = {block->state().begin(), block->state().end()};
      }
      if (!store.averaging.on()) continue;
      Bytes& average = found[name + ".average"];
      average.resize(block->weight().size());
      block->read_average(version.round, average.data());
    }
    return found;
  }

  server::SnapshotSource source() { return {store, layout, version, gone}; }
  // A cut, and what it holds.
  struct Cut {
    std::vector<RowsByKey> rows;
    std::map<std::string, Bytes> dense;
  };
  Cut begin(server::SnapshotWriter& writer, uint64_t number, const std::string& name,
            uint32_t param_set = 0) {
    const std::unique_lock lock(mutex);
    Cut cut{all_rows(), dense()};
    writer.begin({param_set, number, name, {0}}, source(), mutex);
    return cut;
  }
};

inline server::SnapshotOptions writer_options(const std::shared_ptr<MemoryFiles>& files,
                                              uint32_t shard = 0) {
  server::SnapshotOptions options;
  options.shard_id = shard;
  options.host = "host-s pid 1";
  options.directory = "/snaps";
  options.files = files;
  return options;
}

// Holds whoever uses files until it is let go, or this ends: a test that fails meanwhile ends, too.
class Gate {
 public:
  explicit Gate(MemoryFiles& files) {
    files.watch([state = state_] {
      std::unique_lock lock(state->mutex);
      state->reached = true;
      state->changed.notify_all();
      state->changed.wait(lock, [&] { return state->open; });
    });
  }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void wait_reached() {
    std::unique_lock lock(state_->mutex);
    CHECK(state_->changed.wait_for(lock, kPatience, [this] { return state_->reached; }));
  }
  void open() {
    const std::lock_guard lock(state_->mutex);
    state_->open = true;
    state_->changed.notify_all();
  }

 private:
  struct State {
    std::mutex mutex;
    ConditionVariable changed;
    bool reached = false;
    bool open = false;
  };

  // Files may still be used when this has gone.
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Waits until it is neither written nor known.
inline wire::CutStatus status_at_end(const server::SnapshotWriter& writer, uint64_t number,
                                     uint32_t param_set = 0) {
  const TimePoint deadline = Clock::now() + kPatience;
  while (true) {
    wire::CutStatus status = writer.status(param_set, number, "");
    if (status.state != wire::CutState::kWriting) return status;
    CHECK(Clock::now() < deadline);
    let_pass(std::chrono::milliseconds(1));
  }
}

// ---- what is in a file ----

struct TensorView {
  std::string dtype;
  std::string shape;
  uint64_t begin = 0;  // in the file
  uint64_t end = 0;
};

// The tensors of a file that the writer wrote, whose names have no quotes.
inline std::map<std::string, TensorView> tensors_of(const Bytes& file) {
  uint64_t length = 0;
  CHECK(file.size() >= sizeof length);
  std::memcpy(&length, file.data(), sizeof length);
  CHECK_EQ(length % 8, 0u);
  CHECK(8 + length <= file.size());
  const std::string json(file.begin() + 8, file.begin() + 8 + static_cast<int64_t>(length));
  std::map<std::string, TensorView> found;
  const std::string mark = "\":{\"dtype\":\"";
  uint64_t covered = 0;
  for (size_t at = json.find(mark); at != std::string::npos; at = json.find(mark, at + 1)) {
    const auto between = [&](const std::string& from, const std::string& to) {
      const size_t begin = json.find(from, at) + from.size();
      return json.substr(begin, json.find(to, begin) - begin);
    };
    const size_t name_begin = json.rfind('"', at - 1) + 1;
    TensorView tensor{between("\"dtype\":\"", "\""), between("\"shape\":[", "]"), 0, 0};
    const std::string offsets = between("\"data_offsets\":[", "]");
    tensor.begin = 8 + length + std::stoull(offsets);
    tensor.end = 8 + length + std::stoull(offsets.substr(offsets.find(',') + 1));
    CHECK(tensor.begin <= tensor.end && tensor.end <= file.size());
    covered += tensor.end - tensor.begin;
    found[json.substr(name_begin, at - name_begin)] = tensor;
  }
  CHECK_EQ(8 + length + covered, file.size());
  return found;
}

inline void check_sums(const wire::CutFile& told, const Bytes& file) {
  CHECK_EQ(file.size(), told.bytes);
  CHECK_EQ(told.checksums.size(), (file.size() + wire::kChecksumBytes - 1) / wire::kChecksumBytes);
  for (size_t i = 0; i < told.checksums.size(); ++i) {
    const size_t begin = i * wire::kChecksumBytes;
    const size_t size = std::min<size_t>(wire::kChecksumBytes, file.size() - begin);
    CHECK_EQ(crc32c(file.data() + begin, size), told.checksums[i]);
  }
}

inline constexpr const char* kRowColumns[] = {"keys",  "weight",    "state",
                                              "count", "last_seen", "average"};

// The rows of a part, which must be in the order of their buckets and keys.
inline RowsByKey rows_of(const Bytes& file, const std::string& table, uint64_t rows) {
  const auto tensors = tensors_of(file);
  const auto cell = [&](const char* name, uint64_t row) {
    const auto found = tensors.find(name);
    if (found == tensors.end()) return Bytes();
    const uint64_t width = (found->second.end - found->second.begin) / rows;
    const auto begin = file.begin() + static_cast<int64_t>(found->second.begin + row * width);
    return Bytes(begin, begin + static_cast<int64_t>(width));
  };
  std::vector<int32_t> begins(kernels::kBucketCount + 1);
  const TensorView& index = tensors.at("bucket_begin");
  CHECK_EQ(index.end - index.begin, begins.size() * 4);
  std::memcpy(begins.data(), file.data() + index.begin, begins.size() * 4);
  CHECK_EQ(begins.back(), rows);
  RowsByKey found;
  std::pair<uint32_t, int64_t> last{0, -1};
  for (uint64_t row = 0; row < rows; ++row) {
    int64_t key = 0;
    std::memcpy(&key, cell("keys", row).data(), sizeof key);
    const uint32_t bucket = kernels::bucket_of(key, kernels::table_salt(table));
    CHECK(std::pair(bucket, key) > last || row == 0);
    CHECK(begins[bucket] <= static_cast<int64_t>(row));
    CHECK(begins[bucket + 1] > static_cast<int64_t>(row));
    last = {bucket, key};
    Bytes bytes;
    for (const char* name : {"count", "last_seen", "weight", "state", "average"}) {
      const Bytes part = cell(name, row);
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    CHECK(found.emplace(key, bytes).second);
  }
  return found;
}

// All files that a status names, against what was there at the cut.
inline void check_snapshot(const Rig& rig, const Rig::Cut& cut, const wire::CutStatus& status,
                           const std::map<std::string, Bytes>& files, const std::string& place) {
  std::vector<RowsByKey> found(cut.rows.size());
  std::map<std::string, Bytes> dense;
  for (const wire::CutFile& told : status.files) {
    const auto file = files.find(place + "/" + told.name);
    if (file == files.end()) fail(__FILE__, __LINE__, "no file " + told.name);
    check_sums(told, file->second);
    if (told.table != wire::kDenseFile) {
      found[told.table].merge(rows_of(file->second, rig.layout.tables[told.table].name, told.rows));
      continue;
    }
    for (const auto& [name, tensor] : tensors_of(file->second)) {
      const auto at = [&](uint64_t byte) {
        return file->second.begin() + static_cast<int64_t>(byte);
      };
      dense[name] = {at(tensor.begin), at(tensor.end)};
    }
  }
  for (size_t table = 0; table < found.size(); ++table) {
    CHECK_EQ(found[table].size(), cut.rows[table].size());
    CHECK(found[table] == cut.rows[table]);
  }
  CHECK(dense == cut.dense);
}

// ---- loading ----

// What trainer 0 tells a server of one part: the rows of its buckets.
inline wire::Load load_of(uint32_t shard, uint32_t servers, const wire::CutFile& told,
                          const Bytes& file, const std::string& snapshot) {
  wire::Load load;
  load.table = told.table;
  load.snapshot = snapshot;
  load.file = told.name;
  load.file_bytes = told.bytes;
  load.checksums = told.checksums;
  const auto tensors = tensors_of(file);
  for (size_t i = 0; i < wire::kLoadColumns; ++i) {
    const auto found = tensors.find(kRowColumns[i]);
    if (found != tensors.end()) load.offsets[i] = found->second.begin;
  }
  const auto begin_of = [&](uint32_t bucket) {
    int32_t begin = 0;
    std::memcpy(&begin, file.data() + tensors.at("bucket_begin").begin + bucket * 4, 4);
    return static_cast<uint64_t>(begin);
  };
  uint32_t first = 0;
  while (first < kernels::kBucketCount && wire::owner_of_bucket(first, servers) < shard) {
    ++first;
  }
  uint32_t last = first;
  while (last < kernels::kBucketCount && wire::owner_of_bucket(last, servers) == shard) {
    ++last;
  }
  load.row_begin = begin_of(first);
  load.row_end = begin_of(last);
  return load;
}

inline wire::Load load_of(const Rig& rig, const wire::CutFile& told, const Bytes& file,
                          const std::string& snapshot) {
  return load_of(rig.shard, rig.servers, told, file, snapshot);
}

inline void load_rows(Rig& rig, MemoryFiles& files, const wire::Load& load) {
  table::Table& table = *rig.store.tables[load.table];
  const server::LoadedRows rows(files, "/snaps", load, table.shape());
  table.load(rows.columns());
}

// A push of rows of each table, so many keys of it drawn, beside what `spec` has.
inline server::Push drawn_push(const Rig& rig, PushSpec spec, std::mt19937& random, int draws) {
  for (uint32_t table = 0; table < rig.layout.tables.size(); ++table) {
    std::set<int64_t> keys;
    const std::vector<int64_t> own = rig.own_keys(table);
    for (int i = 0; i < draws; ++i) keys.insert(own[random() % own.size()]);
    for (const int64_t key : keys) spec.tables[table].push_back({key, 0.5f});
  }
  server::Push push;
  push.payload = make_push(rig.layout, spec);
  push.view = wire::decode_push(view(push.payload), rig.layout);
  push.sections = server::locate_rows(push.view, rig.store);
  return push;
}

}  // namespace cpudist::testing
