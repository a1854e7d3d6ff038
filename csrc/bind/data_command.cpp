// Copyright (c) 2026 The torch_cpudist authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The class DataCommand: a command whose whole output goes into a file.
#include <array>
#include <cerrno>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/file_calls.h"
#include "bind/data_holders.h"
#include "data/read/command_output.h"

namespace cpudist::bind {

namespace {

// Runs in the calling thread, which is one of Python's; stopped by any other.
class CommandRun {
 public:
  CommandRun(data::Command command, std::string path)
      : command_(std::move(command)), path_(std::move(path)) {}

  void run(const Descriptor& file, data::Notices& notices) {
    data::CommandOutput output(command_, path_, stop_, notices);
    const auto calls = files::system_calls();
    std::array<char, 65536> piece;
    while (const size_t size = output.read(piece.data(), piece.size())) {
      if (!files::write_all(*calls, file, piece.data(), size)) {
        throw Error(ErrorCode::kDataFile, "cannot keep the output of the command '" +
                                              command_.text + "' on " + path_ +
                                              " in a temporary file: " + data::system_text(errno));
      }
    }
  }
  void stop() noexcept { stop_.raise(); }

 private:
  const data::Command command_;
  const std::string path_;
  data::StopSignal stop_;
};

// A descriptor that stays the caller's, whose file object closes it.
struct Borrowed {
  explicit Borrowed(int number) : file(number) {}
  ~Borrowed() { file.release(); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  Descriptor file;
};

struct CommandHolder : DataHolder<CommandRun> {
  using DataHolder::DataHolder;
};

std::unique_ptr<CommandHolder> make_command(std::string command, std::string path,
                                            double timeout_s) {
  return std::make_unique<CommandHolder>(
      std::make_unique<CommandRun>(data::Command{std::move(command), timeout_s}, std::move(path)),
      "DataCommand");
}

void run_command(const CommandHolder& self, int descriptor, const py::function& tell) {
  data::Notices notices([&tell](const std::string& text) { with_gil([&] { tell(text); }); });
  CommandRun& command = self.get();
  const GilReleased no_gil;
  const Borrowed output(descriptor);
  command.run(output.file, notices);
}

}  // namespace

void bind_data_command(py::module_& module) {
  py::class_<CommandHolder>(module, "DataCommand")
      .def(py::init(&make_command), py::arg("command"), py::arg("path"), py::kw_only(),
           py::arg("timeout_s"))
      .def("run", &run_command, py::arg("descriptor"), py::arg("tell"))
      .def("stop", [](const CommandHolder& self) { self.get().stop(); });
}

}  // namespace cpudist::bind
