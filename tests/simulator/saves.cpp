// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause

#include "simulator/saves.h"

#include <cstring>
#include <utility>

#include "support/snapshot_fixture.h"

namespace cpudist::simulator {

void Saves::taken(uint64_t number) {
  pending_ = number;
  done_.clear();
}

std::string Saves::poll(client::ParamSet& set, Cluster& cluster, uint64_t* failed) {
  if (pending_ == 0) return {};
  for (uint32_t server = 0; server < plan_.servers; ++server) {
    if (done_.contains(server)) continue;
    wire::CutStatus status = set.cut_status(server, pending_, "");
    if (status.state == wire::CutState::kWriting) return {};
    if (status.state != wire::CutState::kDone) {
      events_.note("cut " + std::to_string(pending_) + " is not written by server " +
                   std::to_string(server) + ": " + status.reason);
      *failed = std::exchange(pending_, 0);
      return {};
    }
    done_[server] = std::move(status);
  }
  return commit(cluster);
}

std::string Saves::commit(Cluster& cluster) {
  Saved saved;
  saved.number = std::exchange(pending_, 0);
  saved.values.dense.assign(plan_.servers, {});
  saved.values.rows = model_.first_rows();
  const std::string what = "cut " + std::to_string(saved.number) + ": ";
  std::map<uint32_t, Mark> marks;
  for (auto& [server, told] : done_) {
    if (told.members != done_.at(0).members) return what + "servers differ in who has marked it";
    for (const uint32_t rank : told.members) {
      const auto& known = marks_[saved.number];
      if (!known.contains(rank)) return what + "a trainer is in it that has not marked it";
      marks[rank] = known.at(rank);
    }
    saved.values =
        read(server, cluster.disk(server).contents(), told, saved.number, std::move(saved.values));
    saved.told.push_back(told);
  }
  const std::string wrong = model_.check_cut(saved.values, cluster.owners(), marks);
  if (!wrong.empty()) return what + wrong;
  events_.note("cut " + std::to_string(saved.number) + " is committed");
  newest_ = std::move(saved);
  ++committed_;
  return {};
}

Values Saves::read(uint32_t server, const Disk& disk, const wire::CutStatus& told, uint64_t number,
                   Values values) const {
  for (const wire::CutFile& one : told.files) {
    const auto found = disk.find("/snaps/" + name_of(number) + "/" + one.name);
    if (found == disk.end()) {
      testing::fail(__FILE__, __LINE__, "cut " + std::to_string(number) + ": no file " + one.name);
    }
    const testing::Bytes& file = found->second;
    testing::check_sums(one, file);
    if (one.table == wire::kDenseFile) {
      const auto tensors = testing::tensors_of(file);
      const auto at = tensors.at(layout_.blocks[server].name + ".weight");
      std::vector<float>& dense = values.dense[server];
      dense.resize((at.end - at.begin) / sizeof(float));
      std::memcpy(dense.data(), file.data() + at.begin, at.end - at.begin);
      continue;
    }
    for (const auto& [key, row] : testing::rows_of(file, layout_.tables[0].name, one.rows)) {
      std::memcpy(&values.rows[model_.row_of(key)], row.data() + 2 * sizeof(uint32_t),
                  sizeof(float));
    }
    values.made += one.rows;
  }
  return values;
}

void Saves::load(client::ParamSet& set, const std::vector<Disk>& disks) const {
  const std::string name = name_of(newest_->number);
  for (uint32_t server = 0; server < plan_.servers; ++server) {
    const wire::CutStatus& told = newest_->told[server];
    wire::Load load;
    load.kind = wire::LoadKind::kVersion;
    load.version = told.version;
    load.snapshot = name;
    load.file = "none";
    set.load(server, load);
    load.kind = wire::LoadKind::kReplace;
    load.table_step = told.table_steps[0];
    set.load(server, load);
    for (const wire::CutFile& one : told.files) {
      if (one.table == wire::kDenseFile) continue;
      const auto file = disks[server].find("/snaps/" + name + "/" + one.name);
      if (file == disks[server].end()) {
        testing::fail(__FILE__, __LINE__,
                      "the disk of server " + std::to_string(server) + " has lost " + one.name +
                          " of " + name + ", which was committed");
      }
      wire::Load rows = testing::load_of(server, plan_.servers, one, file->second, name);
      rows.version = told.version;
      rows.table_step = told.table_steps[0];
      set.load(server, rows);
    }
    const std::vector<float>& dense = newest_->values.dense[server];
    set.store_parameter(server, dense.data(), nullptr, told.block_steps[server]);
  }
}

}  // namespace cpudist::simulator
