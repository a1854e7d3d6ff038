// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
// long: one class and what it writes by

#include "server/snapshot/writer.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "base/threads.h"
#include "base/wait.h"
#include "server/snapshot/disk.h"
#include "server/snapshot/frozen.h"
#include "server/snapshot/output.h"
#include "server/snapshot/rows.h"

namespace cpudist::server {
namespace {

// Snapshots of a set that status() still knows.
constexpr size_t kKnown = 8;
constexpr const char* kManifest = "manifest.json";

// Appends as much of `why` as there is room for, and no half of a UTF-8 character.
void explain(std::string* reason, const char* why) noexcept {
  const size_t room = reason->capacity() - std::min(reason->capacity(), reason->size());
  size_t size = std::strlen(why);
  if (size > room) {
    size = room;
    while (size > 0 && (static_cast<unsigned char>(why[size]) & 0xc0u) == 0x80u) --size;
  }
  reason->append(why, size);
}

template <typename... Numbers>
std::string numbered(const char* format, Numbers... numbers) {
  char text[64];
  std::snprintf(text, sizeof text, format, numbers...);
  return text;
}

}  // namespace

struct SnapshotWriter::Impl {
  // A snapshot as this server has it.
  struct Written {
    SnapshotJob job;
    std::string directory;              // its own
    std::shared_ptr<FrozenSet> frozen;  // until it is over; under the writer's mutex
    uint64_t buffers_bytes = 0;         // of what writes it
    std::atomic<bool> given_up{false};
    // Of a row's last update, from which on the row is written.
    std::optional<uint32_t> since;
    bool rows_say_changes = true;  // of what changed since; under the writer's mutex
    std::vector<GoneMark> marks;   // at the cut, by table; without keys where no row goes
    // Keys that have lost their rows since the base, by table.
    std::vector<std::vector<GoneKeys::Part>> gone;
    wire::CutStatus status;         // under the writer's mutex
    std::vector<std::string> made;  // names of files, of the writer's thread
    // Of a failure: has room for all of it, since memory may be what failed.
    std::string reason;

    // At most: some may be there twice.
    uint64_t gone_keys(size_t table) const {
      uint64_t keys = 0;
      for (const GoneKeys::Part& part : gone[table]) keys += part->size();
      return keys;
    }
  };
  using WrittenPtr = std::shared_ptr<Written>;

  explicit Impl(SnapshotOptions given)
      : options(std::move(given)),
        files(options.files ? options.files : files::system_calls()),
        room(std::make_shared<table::ImageRoom>(options.memory_bytes, options.cap)),
        directory(options.directory) {}

  std::string server() const {
    return "server " + std::to_string(options.shard_id) + " (" + options.host + ")";
  }
  void start();  // with the mutex held
  void work();
  void write(const WrittenPtr& snapshot);
  void write_files(Written& snapshot);
  // Keys that have lost their rows since the base, by table, in order.
  static std::vector<std::vector<int64_t>> gone_keys(const Written& snapshot);
  static void take_out(std::span<const PartRows::Row> rows, std::vector<int64_t>* gone);
  // Leaves of `gone` the keys that have no row.
  void write_tables(Written& snapshot, Disk* disk, std::string* head, PartRows::Memory* buffers,
                    std::vector<std::vector<int64_t>>* gone);
  void write_part(Written& snapshot, PartRows* rows, wire::CutFile file, Disk* disk,
                  std::string* head);
  // The keys of `gone` are what is written.
  void write_gone(Written& snapshot, Disk* disk, std::string* head,
                  std::vector<std::vector<int64_t>>* gone);
  void check_going_on(const Written& snapshot) const;
  void remove_files(const Written& snapshot) noexcept;
  bool has_manifest(const Written& snapshot) const;
  void end(const WrittenPtr& snapshot, bool failed);
  // These with the mutex held.
  void check_free(const SnapshotJob& job) const;
  // Of a set, or null: it is cut, and what it was lies in its tables until it is written.
  WrittenPtr unwritten(uint32_t param_set) const;
  // One is written at a time: the largest buffers of all that wait are counted, once.
  bool lend_buffers(uint64_t size_bytes) noexcept;
  void give_back_buffers() noexcept;  // that none of those wants which are left
  void add(const WrittenPtr& snapshot);
  [[noreturn]] void refuse_memory(const SnapshotJob& job) const;
  WrittenPtr find(uint32_t param_set, uint64_t number) const;
  static bool can_be_base(const Written& snapshot);
  // Whether its server knows which keys have lost their rows since.
  static bool knows_gone(const Written& snapshot);
  std::optional<uint32_t> begin_of_changes(const SnapshotJob& job,
                                           const wire::Version& version) const;
  [[noreturn]] void refuse_changes(const SnapshotJob& job, const Written* base) const;
  void mark_gone(Written* snapshot, const SnapshotSource& source) const;
  void trim_gone(const Written& newest) const;

  wire::CutStatus look_for(const std::string& token) const;

  const SnapshotOptions options;
  const std::shared_ptr<files::Calls> files;
  const std::shared_ptr<table::ImageRoom> room;

  mutable std::mutex mutex;  // of what follows
  ConditionVariable wake;
  std::string directory;
  std::deque<WrittenPtr> known;      // the newest last
  std::deque<WrittenPtr> waiting;    // to be written, each of another set; the oldest first
  WrittenPtr current;                // being written
  uint64_t lent_buffers = 0;         // counted by the cap
  std::deque<WrittenPtr> abandoned;  // whose files are to be removed
  bool stopping = false;
  std::thread thread;
};

// ---- the thread ----

void SnapshotWriter::Impl::start() {
  if (thread.joinable()) return;
  thread = start_io_thread("the writer of snapshots of a server", [this] { work(); });
}

void SnapshotWriter::Impl::work() {
  std::unique_lock lock(mutex);
  while (true) {
    wake.wait(lock, [this] { return stopping || !waiting.empty() || !abandoned.empty(); });
    if (!abandoned.empty()) {
      const WrittenPtr gone = std::move(abandoned.front());
      abandoned.pop_front();
      lock.unlock();
      remove_files(*gone);
      lock.lock();
    } else if (!waiting.empty()) {
      current = std::move(waiting.front());
      waiting.pop_front();
      const WrittenPtr snapshot = current;
      lock.unlock();
      write(snapshot);
      lock.lock();
    } else {
      return;
    }
  }
}

void SnapshotWriter::Impl::write(const WrittenPtr& snapshot) {
  bool failed = true;
  try {
    write_files(*snapshot);
    failed = false;
  } catch (const std::bad_alloc&) {
    explain(&snapshot->reason, "no memory is left to write it");
  } catch (const std::exception& error) {
    explain(&snapshot->reason, error.what());
  }
  snapshot->frozen->release();
  if (failed) remove_files(*snapshot);
  end(snapshot, failed);
}

void SnapshotWriter::Impl::end(const WrittenPtr& snapshot, bool failed) {
  {
    // Goes without the mutex, and before anybody is told: its memory is free then.
    std::shared_ptr<FrozenSet> over;
    const std::lock_guard lock(mutex);
    over = std::move(snapshot->frozen);
  }
  const std::lock_guard lock(mutex);
  current.reset();
  give_back_buffers();
  wire::CutStatus& status = snapshot->status;
  status.state = failed ? wire::CutState::kFailed : wire::CutState::kDone;
  if (failed) {
    status.files.clear();
    status.reason = std::move(snapshot->reason);
    return;
  }
  if (!snapshot->given_up) return;
  try {
    abandoned.push_back(snapshot);
  } catch (const std::bad_alloc&) {
    return;  // its files stay, and are no snapshot without a manifest
  }
}

void SnapshotWriter::Impl::check_going_on(const Written& snapshot) const {
  if (snapshot.given_up) throw Error(ErrorCode::kSnapshot, "it was given up");
}

void SnapshotWriter::Impl::write_files(Written& snapshot) {
  check_going_on(snapshot);
  make_directories(*files, snapshot.directory);
  if (has_manifest(snapshot)) {
    throw Error(ErrorCode::kSnapshot, "a snapshot of that name is there already, in " +
                                          snapshot.directory + "; choose another name");
  }
  // What the disk reads from outlives it.
  PartRows::Memory buffers;
  std::string head;
  std::vector<std::vector<int64_t>> gone = gone_keys(snapshot);
  Disk disk(*files, snapshot.directory, snapshot.given_up, [&](wire::CutFile file) {
    const std::lock_guard lock(mutex);
    snapshot.status.files.push_back(std::move(file));
  });
  snapshot.frozen->copy_blocks();
  write_tables(snapshot, &disk, &head, &buffers, &gone);
  snapshot.frozen->release();
  write_gone(snapshot, &disk, &head, &gone);
  disk.wait();
  wire::CutFile file;
  file.name = numbered("s%03u-dense.safetensors", options.shard_id);
  snapshot.made.push_back(file.name);
  disk.write(std::move(file), snapshot.frozen->block_file(&head));
  disk.finish();
  sync_directory(*files, snapshot.directory);
  // Another server may have made it, and its entry need not be on the disk yet.
  const std::string above = snapshot.directory.substr(0, snapshot.directory.find_last_of('/'));
  sync_directory(*files, above.empty() ? "/" : above);
}

std::vector<std::vector<int64_t>> SnapshotWriter::Impl::gone_keys(const Written& snapshot) {
  std::vector<std::vector<int64_t>> found(snapshot.gone.size());
  for (size_t table = 0; table < found.size(); ++table) {
    std::vector<int64_t>& keys = found[table];
    keys.reserve(snapshot.gone_keys(table));
    for (const GoneKeys::Part& part : snapshot.gone[table]) {
      keys.insert(keys.end(), part->begin(), part->end());
    }
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  }
  return found;
}

// A key whose row went and was made anew has one: among what has changed, as it is new.
void SnapshotWriter::Impl::take_out(std::span<const PartRows::Row> rows,
                                    std::vector<int64_t>* gone) {
  std::vector<int64_t> there;
  for (const PartRows::Row& row : rows) {
    if (std::binary_search(gone->begin(), gone->end(), row.key)) there.push_back(row.key);
  }
  if (there.empty()) return;
  std::sort(there.begin(), there.end());
  std::erase_if(
      *gone, [&there](int64_t key) { return std::binary_search(there.begin(), there.end(), key); });
}

void SnapshotWriter::Impl::write_tables(Written& snapshot, Disk* disk, std::string* head,
                                        PartRows::Memory* buffers,
                                        std::vector<std::vector<int64_t>>* gone) {
  for (const FrozenSet::Table& table : snapshot.frozen->tables()) {
    if (table.records == 0) continue;
    disk->wait();  // for memory that may grow
    PartRows rows(table.shape, table.rows_per_slab, table.records, buffers);
    wire::CutFile file;
    file.table = table.id;
    uint32_t part = 0;
    while (true) {
      check_going_on(snapshot);
      const uint32_t copied = snapshot.frozen->copy_slab(table.id, rows.next());
      if (copied > 0) rows.take(copied, snapshot.since);
      if (rows.full() || (copied == 0 && !rows.empty())) {
        if (table.id < gone->size()) take_out(buffers->rows, &(*gone)[table.id]);
        file.name = numbered("s%03u-t%03u-%04u.safetensors", options.shard_id, table.id, part++);
        write_part(snapshot, &rows, file, disk, head);
      }
      if (copied == 0) break;
    }
  }
}

void SnapshotWriter::Impl::write_part(Written& snapshot, PartRows* rows, wire::CutFile file,
                                      Disk* disk, std::string* head) {
  file.rows = rows->size();
  rows->sort();
  disk->wait();  // until then it reads the part before
  *head = rows->head();
  snapshot.made.push_back(file.name);
  disk->write(std::move(file), {bytes_of(*head), rows->columns()});
}

void SnapshotWriter::Impl::write_gone(Written& snapshot, Disk* disk, std::string* head,
                                      std::vector<std::vector<int64_t>>* gone) {
  wire::CutFile file;
  file.name = numbered("s%03u-gone.safetensors", options.shard_id);
  std::vector<TensorEntry> entries;
  std::vector<std::span<const uint8_t>> pieces(1);
  uint64_t end = 0;
  for (uint32_t table = 0; table < gone->size(); ++table) {
    const std::vector<int64_t>& keys = (*gone)[table];
    if (keys.empty()) continue;
    TensorEntry entry{numbered("t%03u.keys", table), "I64", {keys.size()}};
    place_tensor(&entry, &end);
    entries.push_back(std::move(entry));
    pieces.emplace_back(reinterpret_cast<const uint8_t*>(keys.data()),
                        keys.size() * sizeof(int64_t));
    file.rows += keys.size();
  }
  snapshot.gone.clear();
  if (entries.empty()) return;
  disk->wait();  // until then it reads the head of a part
  *head = tensors_head("torch_cpudist.gone", entries);
  pieces.front() = bytes_of(*head);
  snapshot.made.push_back(file.name);
  disk->write(std::move(file), std::move(pieces));
}

bool SnapshotWriter::Impl::has_manifest(const Written& snapshot) const {
  // What cannot be looked at may be there: it is neither removed nor written over.
  const auto found = files->open(snapshot.directory + "/" + kManifest, O_RDONLY);
  return found.get() >= 0 || errno != ENOENT;
}

// As far as that goes: what stays is no snapshot without a manifest.
void SnapshotWriter::Impl::remove_files(const Written& snapshot) noexcept {
  try {
    if (has_manifest(snapshot)) return;
    for (const std::string& name : snapshot.made) files->remove(snapshot.directory + "/" + name);
    files->remove_directory(snapshot.directory);  // unless others have files in it
  } catch (const std::exception&) {
    return;
  }
}

SnapshotWriter::Impl::WrittenPtr SnapshotWriter::Impl::find(uint32_t param_set,
                                                            uint64_t number) const {
  const auto found = std::find_if(known.rbegin(), known.rend(), [&](const WrittenPtr& one) {
    return one->job.param_set == param_set && one->job.number == number;
  });
  return found == known.rend() ? nullptr : *found;
}

wire::CutStatus SnapshotWriter::Impl::look_for(const std::string& token) const {
  wire::CutStatus status;
  status.shard = options.shard_id;
  status.state = wire::CutState::kFailed;
  std::string place;
  {
    const std::lock_guard lock(mutex);
    place = directory;
  }
  if (place.empty()) {
    status.reason = server() + " has no snapshot directory";
  } else if (!wire::is_snapshot_name(token)) {
    status.reason = server() + ": a token with a name that no file of a snapshot has";
  } else if (files->open(place + "/" + token, O_RDONLY).get() < 0) {
    const std::string cause = std::generic_category().message(errno);
    status.reason = server() + " does not find " + token + " in " + place + ": " + cause;
  } else {
    status.state = wire::CutState::kDone;
  }
  return status;
}

// ---- the face ----

SnapshotWriter::SnapshotWriter(SnapshotOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

SnapshotWriter::~SnapshotWriter() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
    if (impl_->current) impl_->current->given_up = true;
    for (const Impl::WrittenPtr& one : impl_->waiting) one->given_up = true;
  }
  impl_->wake.notify_all();
  if (impl_->thread.joinable()) join_thread(impl_->thread);
}

void SnapshotWriter::set_directory(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const std::lock_guard lock(impl_->mutex);
  impl_->directory = std::move(path);
}

std::string SnapshotWriter::directory() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->directory;
}

files::Calls& SnapshotWriter::files() const { return *impl_->files; }

void SnapshotWriter::Impl::check_free(const SnapshotJob& job) const {
  if (!wire::is_snapshot_name(job.name)) {
    throw Error(ErrorCode::kInvalidArgument, "a snapshot cannot have that name");
  }
  if (directory.empty()) {
    throw Error(ErrorCode::kSnapshot, "snapshot " + job.name + ": " + server() +
                                          " has no directory for it; set CPUDIST_SNAPSHOT_DIR "
                                          "where servers start, or give opt.resume() a path");
  }
  const WrittenPtr before = unwritten(job.param_set);
  if (before == nullptr) return;
  throw Error(ErrorCode::kSnapshot, "snapshot " + before->job.name + " is still being written");
}

SnapshotWriter::Impl::WrittenPtr SnapshotWriter::Impl::unwritten(uint32_t param_set) const {
  if (current && current->job.param_set == param_set) return current;
  const auto found = std::find_if(waiting.begin(), waiting.end(), [&](const WrittenPtr& one) {
    return one->job.param_set == param_set;
  });
  return found == waiting.end() ? nullptr : *found;
}

bool SnapshotWriter::Impl::lend_buffers(uint64_t size_bytes) noexcept {
  if (options.cap == nullptr || size_bytes <= lent_buffers) return true;
  if (!options.cap->lend(size_bytes - lent_buffers)) return false;
  lent_buffers = size_bytes;
  return true;
}

void SnapshotWriter::Impl::give_back_buffers() noexcept {
  if (options.cap == nullptr) return;
  uint64_t largest = current ? current->buffers_bytes : 0;
  for (const WrittenPtr& one : waiting) largest = std::max(largest, one->buffers_bytes);
  options.cap->give_back(lent_buffers - largest);
  lent_buffers = largest;
}

void SnapshotWriter::Impl::refuse_memory(const SnapshotJob& job) const {
  throw Error(ErrorCode::kFull,
              "snapshot " + job.name + ", " + server() +
                  ": what it takes to write it has no room under memory_cap_bytes = " +
                  std::to_string(options.cap->cap_bytes()) + " beside rows and dense values (" +
                  std::to_string(options.cap->kept_bytes()) +
                  " bytes) and pushes. Set CPUDIST_SERVER_MEMORY_CAP_BYTES higher, or to 0 for no "
                  "cap, or use more servers");
}

void SnapshotWriter::Impl::add(const WrittenPtr& snapshot) {
  start();
  known.push_back(snapshot);
  try {
    waiting.push_back(snapshot);
  } catch (...) {
    known.pop_back();
    throw;
  }
  try {
    snapshot->frozen->freeze();
  } catch (...) {
    waiting.pop_back();
    known.pop_back();
    throw;
  }
  const auto of_set = [&](const WrittenPtr& one) {
    return one->job.param_set == snapshot->job.param_set;
  };
  if (static_cast<size_t>(std::count_if(known.begin(), known.end(), of_set)) > kKnown) {
    known.erase(std::find_if(known.begin(), known.end(), of_set));
  }
  trim_gone(*snapshot);
  wake.notify_all();
}

bool SnapshotWriter::Impl::can_be_base(const Written& snapshot) {
  return snapshot.status.state == wire::CutState::kDone && snapshot.rows_say_changes &&
         knows_gone(snapshot);
}

bool SnapshotWriter::Impl::knows_gone(const Written& snapshot) {
  return std::all_of(snapshot.marks.begin(), snapshot.marks.end(),
                     [](const GoneMark& one) { return !one.keys || one.keys->knows(one.mark); });
}

void SnapshotWriter::Impl::mark_gone(Written* snapshot, const SnapshotSource& source) const {
  const WrittenPtr base =
      snapshot->since ? find(snapshot->job.param_set, snapshot->job.base) : nullptr;
  snapshot->gone.resize(base ? source.gone.size() : 0);
  for (size_t table = 0; table < source.gone.size(); ++table) {
    const std::shared_ptr<GoneKeys>& keys = source.gone[table];
    snapshot->marks.push_back({keys, keys ? keys->mark() : 0});
    if (base && keys) snapshot->gone[table] = keys->since(base->marks[table].mark);
  }
}

// What went before the oldest snapshot that is known is of no use.
void SnapshotWriter::Impl::trim_gone(const Written& newest) const {
  for (size_t table = 0; table < newest.marks.size(); ++table) {
    const GoneMark& mark = newest.marks[table];
    if (!mark.keys) continue;
    uint64_t oldest = mark.mark;
    for (const WrittenPtr& one : known) {
      const bool same = table < one->marks.size() && one->marks[table].keys == mark.keys;
      const bool counts = one->rows_say_changes && one->status.state != wire::CutState::kFailed;
      if (same && counts) oldest = std::min(oldest, one->marks[table].mark);
    }
    mark.keys->trim(oldest);
  }
}

std::optional<uint32_t> SnapshotWriter::Impl::begin_of_changes(const SnapshotJob& job,
                                                               const wire::Version& version) const {
  if (job.base == 0) return std::nullopt;
  const WrittenPtr base = find(job.param_set, job.base);
  if (base && can_be_base(*base)) {
    const uint64_t round = base->status.version.round;
    // Rows say the low half of the update that they had last.
    if (version.round - round < uint64_t{1} << 31) return static_cast<uint32_t>(round);
  }
  refuse_changes(job, base.get());
}

void SnapshotWriter::Impl::refuse_changes(const SnapshotJob& job, const Written* base) const {
  const std::string cut = "cut " + std::to_string(job.base);
  std::string why = " does not know what has changed since " + cut +
                    ": it began after that, or values were stored or loaded since. "
                    "Save a full one";
  const bool written = base != nullptr && base->status.state == wire::CutState::kDone;
  if (written && base->rows_say_changes && !knows_gone(*base)) {
    why = " does not know any more which keys have lost their rows since " + cut +
          ": they were more than it keeps of a table, " + std::to_string(GoneKeys::kMostBytes) +
          " bytes of them, or it had no memory for them. Changes alone cannot be written; the "
          "next snapshot that is due has all rows. Save a full one";
  }
  throw Error(ErrorCode::kSnapshot, "snapshot " + job.name + ": " + server() + why);
}

void SnapshotWriter::begin(SnapshotJob job, const SnapshotSource& source, std::shared_mutex& lock) {
  const std::lock_guard guard(impl_->mutex);
  impl_->check_free(job);
  const std::optional<uint32_t> since = impl_->begin_of_changes(job, source.version);
  try {
    const auto snapshot = std::make_shared<Impl::Written>();
    snapshot->since = since;
    snapshot->frozen = std::make_shared<FrozenSet>(
        source.store, source.layout, source.version, lock,
        std::make_shared<table::ImageMemory>(impl_->room), impl_->options.dense_at_once);
    snapshot->directory = (impl_->directory == "/" ? "" : impl_->directory) + "/" + job.name;
    snapshot->job = job;
    impl_->mark_gone(snapshot.get(), source);
    snapshot->reason.reserve(wire::kCutReasonBytesMax);
    snapshot->reason.append("snapshot " + job.name + ", " + impl_->server() + ": ");
    snapshot->status = snapshot->frozen->status();
    snapshot->status.state = wire::CutState::kWriting;
    snapshot->status.shard = impl_->options.shard_id;
    snapshot->status.members = job.members;
    snapshot->status.base = job.base;
    uint64_t& buffers = snapshot->buffers_bytes;
    for (const FrozenSet::Table& table : snapshot->frozen->tables()) {
      buffers =
          std::max(buffers, PartRows::size_bytes(table.shape, table.rows_per_slab, table.records));
    }
    // All of them, and those of one table that have a row again.
    uint64_t most = 0;
    for (size_t table = 0; table < snapshot->gone.size(); ++table) {
      const uint64_t keys = snapshot->gone_keys(table);
      buffers += keys * sizeof(int64_t);
      most = std::max(most, keys);
    }
    buffers += most * sizeof(int64_t);
    if (!snapshot->frozen->lend() || !impl_->lend_buffers(buffers)) impl_->refuse_memory(job);
    try {
      impl_->add(snapshot);
    } catch (...) {
      impl_->give_back_buffers();
      throw;
    }
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory, "snapshot " + job.name + ", " + impl_->server() +
                                             ": there is no memory to keep what it would save");
  }
}

wire::CutStatus SnapshotWriter::status(uint32_t param_set, uint64_t number,
                                       const std::string& token) const {
  if (number == 0) return impl_->look_for(token);
  const std::lock_guard lock(impl_->mutex);
  const Impl::WrittenPtr found = impl_->find(param_set, number);
  if (found) {
    wire::CutStatus status = found->status;
    if (status.state == wire::CutState::kWriting) status.files.clear();
    status.can_be_base = Impl::can_be_base(*found);
    return status;
  }
  wire::CutStatus unknown;
  unknown.shard = impl_->options.shard_id;
  return unknown;
}

void SnapshotWriter::abandon(uint32_t param_set, uint64_t number) {
  std::unique_lock lock(impl_->mutex);
  const Impl::WrittenPtr found = impl_->find(param_set, number);
  if (!found) return;
  std::erase(impl_->known, found);
  found->given_up = true;
  if (found->status.state == wire::CutState::kDone) impl_->abandoned.push_back(found);
  impl_->wake.notify_all();
  // One that waits has no files, and need not keep rows until it is its turn.
  if (std::find(impl_->waiting.begin(), impl_->waiting.end(), found) == impl_->waiting.end())
    return;
  const std::shared_ptr<FrozenSet> frozen = found->frozen;
  lock.unlock();
  frozen->release();
  lock.lock();
  if (std::erase(impl_->waiting, found) == 0) return;  // it is its turn, and it sees that
  impl_->give_back_buffers();
  const std::shared_ptr<FrozenSet> over = std::move(found->frozen);
  lock.unlock();
}

void SnapshotWriter::forget_bases(uint32_t param_set) {
  const std::lock_guard lock(impl_->mutex);
  for (const Impl::WrittenPtr& one : impl_->known) {
    if (one->job.param_set == param_set) one->rows_say_changes = false;
  }
}

void SnapshotWriter::forget(uint32_t param_set) {
  forget_bases(param_set);  // another set may get its number
  std::shared_ptr<FrozenSet> frozen;
  {
    const std::lock_guard lock(impl_->mutex);
    if (const Impl::WrittenPtr found = impl_->unwritten(param_set)) frozen = found->frozen;
  }
  if (frozen) frozen->forget();
}

bool SnapshotWriter::has_room() const { return impl_->room->has_room(); }

void SnapshotWriter::wait_for_room(TimePoint latest) { impl_->room->wait_for_room(latest); }

void SnapshotWriter::give_up_for_memory() noexcept {
  const std::lock_guard lock(impl_->mutex);
  const auto give_up = [](const Impl::WrittenPtr& one) {
    if (one && one->frozen) one->frozen->give_up_for_memory();
  };
  give_up(impl_->current);
  for (const Impl::WrittenPtr& one : impl_->waiting) give_up(one);
}

uint64_t SnapshotWriter::image_bytes() const { return impl_->room->used_bytes(); }

uint64_t SnapshotWriter::waits() const { return impl_->room->waits(); }

}  // namespace cpudist::server
