# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every rule of scripts/tidy.py finds a sample that breaks it; the tree has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import tidy
from tidy_rules import text as texts
from tidy_rules.functions import native_functions

PY = "# Copyright (c) 2026 The torch_cpudist authors.\n"
PY += "# SPDX-License-Identifier: BSD-3-Clause\n"
CPP = PY.replace("#", "//")


def rules(name: str, body: str) -> list[tuple[str, int]]:
    return [(found.rule, found.line) for found in tidy.check_file(name, body)]


def long_python(lines: int) -> str:
    return "def long():\n" + "    x = 1\n" * (lines - 1)


def long_native(lines: int) -> str:
    return "void long_one() {\n" + "  ++x;\n" * (lines - 2) + "}\n"


@pytest.mark.parametrize(
    ("name", "body", "rule", "line"),
    [
        ("torch_cpudist/a.py", "import pickle\n", "pickle", 3),
        ("torch_cpudist/data/launcher.py", "import cloudpickle\n", "pickle", 3),
        ("torch_cpudist/a.py", "x = cPickle = pickle.loads(b)\n", "pickle", 3),
        ("torch_cpudist/snapshot/a.py", "x = torch.load(f)\n", "pickle", 3),
        ("benchmarks/a.py", "torch.load(f, weights_only=False)\n", "pickle", 3),
        ("examples/a.py", "np.load(f, allow_pickle = True)\n", "pickle", 3),
        ("torch_cpudist/a.py", "dist.all_gather_object(a, b)\n", "pickle", 3),
        ("torch_cpudist/a.py", "x = eval(text)\n", "eval", 3),
        ("torch_cpudist/a.py", "host = '0.0.0.0'\n", "bind-all", 3),
        ("scripts/a.py", "flags = ['-ffast-math']\n", "fast-math", 3),
        ("tests/a.py", "x = 1  # TODO later\n", "unfinished", 3),
        ("tests/a.py", "data = '/home/me/data'\n", "machine-path", 3),
        ("tests/a.py", "x = 1 \n", "blank", 3),
        ("tests/a.py", "if x:\n\ty = 1\n", "blank", 4),
        ("tests/a.py", "x = 1", "end", 3),
        ("tests/a.py", "x = (\n", "syntax", 3),
        ("tests/test_a.py", "x = 1\n", "no-tests", 1),
        ("tests/a.py", long_python(71), "function-lines", 3),
        ("tests/a.py", "x = 1\n" * 399, "file-lines", 401),
        ("tests/a.py", "# long: x\n" + "x = 1\n" * 898, "file-lines", 901),
        ("tests/a.py", "x = 1\n" * 9 + "# long: x\n" * 390, "file-lines", 401),
    ],
)
def test_python_rules(name: str, body: str, rule: str, line: int) -> None:
    assert rules(name, PY + body) == [(rule, line)]


def test_a_long_file_may_say_why() -> None:
    assert not rules("tests/a.py", PY + "# long: one class\n" + "x = 1\n" * 500)
    assert not rules("csrc/ops/a.cpp", CPP + "// long: x\n" + "int x;\n" * 500)


@pytest.mark.parametrize(
    ("name", "body", "rule", "line"),
    [
        ("csrc/ops/a.cpp", "#include <torch/extension.h>\n", "include", 3),
        ("csrc/client/a.h", "#include <torch/csrc/stable/tensor.h>\n", "include", 3),
        ("csrc/kernels/a.h", "#include <pybind11/pybind11.h>\n", "include", 3),
        ("csrc/client/a.cpp", "address = INADDR_ANY;\n", "bind-all", 3),
        ("csrc/data/a.cpp", "auto t = std::chrono::steady_clock::now();\n", "seam", 3),
        ("csrc/data/a.h", "std::condition_variable changed_;\n", "seam", 3),
        ("csrc/bind/a.cpp", "std::this_thread::sleep_for(a);\n", "seam", 3),
        ("csrc/data/a.cpp", "thread_ = std::thread([this] { run(); });\n", "seam", 3),
        ("csrc/wire/a.cpp", "std::thread helper(run);\n", "seam", 3),
        ("csrc/table/a.cpp", "const int fd = ::open(path, flags);\n", "seam", 3),
        ("csrc/table/a.cpp", "std::ifstream file(path);\n", "seam", 3),
        ("csrc/inference/a.h", "#include <torch/all.h>\n", "include", 3),
        ("csrc/backends/ccl/a.h", "#include <torch/all.h>\n", "include", 3),
        ("csrc/inference/a.cpp", "std::thread helper(run);\n", "seam", 3),
        ("csrc/library.cpp", "std::thread helper(run);\n", "seam", 3),
        ("csrc/client/a.cpp", "// " + "x" * 98 + "\n", "columns", 3),
        ("csrc/client/a.cpp", long_native(71), "function-lines", 3),
        ("csrc/client/a.cpp", "int x;\n" * 399, "file-lines", 401),
        ("csrc/client/a.cpp", "// long: x\n" + "int x;\n" * 898, "file-lines", 901),
    ],
)
def test_native_rules(name: str, body: str, rule: str, line: int) -> None:
    assert rules(name, CPP + body) == [(rule, line)]


@pytest.mark.parametrize(
    "body",
    [
        # clocks
        "::gettimeofday(&now, nullptr);",
        "const auto now = std::time(nullptr);",
        "const time_t now = time(nullptr);",
        "::time(&now);",
        "const auto used = std::clock();",
        "auto now = std::chrono::utc_clock::now();",
        # waits
        "std::future<int> answer_;",
        "std::shared_future<int> answer_;",
        "std::promise<int> answer_;",
        "std::packaged_task<int()> work_;",
        "std::counting_semaphore<4> room_{4};",
        "std::binary_semaphore told_{0};",
        "std::latch begun_{2};",
        "std::barrier begun_(2);",
        "::sleep(1);",
        "usleep(10);",
        "::syscall(SYS_futex, &word, FUTEX_WAIT, 1, &time, nullptr, 0);",
        "::sem_timedwait(&room_, &until);",
        "pthread_cond_wait(&changed_, &mutex_);",
        "while (true) ::pause();",
        "const int ready = poll(&entry, 1, 100);",
        "::ppoll(&entry, 1, &limit, nullptr);",
        "::select(count, &set, nullptr, nullptr, &limit);",
        "epoll_wait(epoll_.get(), events.data(), 8, -1);",
        # threads
        "auto answer = std::async(std::launch::async, run);",
        # files
        "const ssize_t count = ::write(file, data, size);",
        "const ssize_t count = write(fd, data, size);",
        "const ssize_t count = read(file_.get(), data, size);",
        "const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);",
        "unlink(path.c_str());",
        "if (rename(from, to) != 0) refuse();",
        "std::rename(from, to);",
        "::mkdir(path, 0777);",
        "fsync(fd);",
        "std::freopen(path, mode, stderr);",
    ],
)
def test_what_goes_round_the_seam(body: str) -> None:
    assert rules("csrc/client/a.cpp", f"{CPP}{body}\n") == [("seam", 3)]
    assert rules("csrc/base/a.cpp", f"{CPP}{body}\n") == []


def test_every_folder_of_csrc_is_covered_or_a_named_exception() -> None:
    sources = [
        path.relative_to(tidy.ROOT).as_posix()
        for path in (tidy.ROOT / "csrc").rglob("*")
        if path.suffix in (".h", ".cpp")
    ]
    folders = {name.rpartition("/")[0] for name in sources}
    assert "csrc/inference" in folders
    planted = (
        "#include <torch/all.h>\nstd::chrono::steady_clock::now();\nusleep(1);\n"
        "std::thread helper(run);\n::fsync(fd);\n"
    )
    expected = [("include", 3), *(("seam", line) for line in (4, 5, 6, 7))]
    without = {}
    for folder in folders:
        found = rules(f"{folder}/planted.cpp", CPP + planted)
        if found != expected:
            without[folder] = [one for one in expected if one not in found]
    torch = [("include", 3)]
    assert without == {
        "csrc/base": expected[1:],
        "csrc/bind": torch,
        "csrc/ops": torch,
        "csrc/backends/c10d": torch,
    }


def test_no_exception_is_named_in_vain() -> None:
    for ban in texts.BANNED:
        for but in ban.but:
            below = tidy.ROOT / but
            files = list(below.rglob("*.*")) if below.is_dir() else [below]
            found = [one for one in files if one.suffix in ban.suffixes]
            assert any(ban.pattern.search(one.read_text()) for one in found), but


@pytest.mark.parametrize(
    "text",
    ["word " * 20 + "words\n", "- > " + "word " * 30 + "\n", "``a\n" * 2 + "x " * 51],
)
def test_texts_are_wrapped(text: str) -> None:
    found = rules("docs/a.md", text.rstrip() + "\n")
    assert found == [("columns", text.rstrip().count("\n") + 1)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torch_cpudist/launcher.py", PY + "import cloudpickle\n"),
        ("torch_cpudist/a.py", PY + "x = torch.load(f, weights_only=True)\n"),
        ("torch_cpudist/a.py", PY + "model.eval()\nnp.load(f, allow_pickle=False)\n"),
        ("tests/a.py", PY + long_python(70)),
        ("tests/a.py", PY + "x = 1\n" * 398),
        ("csrc/ops/a.cpp", CPP + "#include <torch/csrc/stable/tensor.h>\n"),
        ("csrc/client/a.cpp", CPP + long_native(70)),
        ("csrc/base/a.h", CPP + "std::this_thread::sleep_for(a);\n"),
        ("csrc/transport/tcp/socket.cpp", CPP + "poll(&entry, 1, 100);\n"),
        ("csrc/library.cpp", CPP + "#include <torch/csrc/stable/library.h>\n"),
        ("csrc/data/a.h", CPP + "bool poll();\nvoid open(const Ticket& ticket);\n"),
        ("csrc/data/a.cpp", CPP + "changed_.wait_for(lock, limit);\nwrite(text);\n"),
        ("csrc/data/a.h", CPP + "std::thread thread_;\nfile = files::open(path, 0);\n"),
        ("scripts/a.sh", "#!/usr/bin/env bash\n" + PY),
        ("docs/a.md", "word " * 19 + "words\n| " + "cell " * 40 + "|\n"),
        ("docs/a.md", "```\n" + "code " * 40 + "\n```\n- " + "x" * 99 + "\n"),
        ("docs/a.md", "Two blanks end this line.  \nNo pickle, no eval(x).\n"),
    ],
)
def test_allowed(name: str, text: str) -> None:
    assert rules(name, text) == []


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("torch_cpudist/a.py", "x = 1\n", 1),
        ("csrc/a.cpp", PY, 1),
        ("scripts/a.sh", "#!/usr/bin/env bash\n# Copyright\n", 2),
        (".ci/run", "#!/usr/bin/env bash\nexit 0\n", 2),
    ],
)
def test_license(name: str, text: str, line: int) -> None:
    assert rules(name, text) == [("license", line)]


def test_native_functions_are_found_whole() -> None:
    source = """
namespace a {
struct Pair {
  Pair(int x, int y) : x_{x}, y_(y) {
    if (x) { go("}"); }  // }
  }
  int get() const { return x_; }
  int x_{0};
};
const int table[] = {1, 2};
template <typename T>
auto big(T value) -> std::vector<T> {
  auto twice = [&](int n) {
    return n * 1'000;
  };
  return {value, twice(2)};
}
}  // namespace a
"""
    found = [(line, count) for line, _, count in native_functions(source)]
    assert found == [(4, 3), (7, 1), (12, 6)]


def test_header_without_user(tmp_path: Path) -> None:
    folder = tmp_path / "csrc" / "client"
    folder.mkdir(parents=True)
    (folder / "used.h").write_text(CPP)
    (folder / "dead.h").write_text(CPP)
    (folder / "a.cpp").write_text(CPP + '#include "client/used.h"\n')
    found = [str(violation) for violation in tidy.check_tree(tmp_path)]
    assert found == ["csrc/client/dead.h:1: dead-file: no file includes this header"]


def test_use_without_include(tmp_path: Path) -> None:
    folder = tmp_path / "csrc" / "client"
    folder.mkdir(parents=True)
    (folder / "inner.h").write_text(CPP + "#include <vector>\n")
    (folder / "outer.h").write_text(CPP + '#include "inner.h"\n')
    body = CPP + '#include "client/outer.h"\nstd::vector<int> a;\nstd::mutex b;\n'
    (folder / "a.cpp").write_text(body)
    found = [str(violation) for violation in tidy.check_tree(tmp_path)]
    line = body.count("\n")
    what = "std::mutex is used without #include <mutex>"
    assert found == [f"csrc/client/a.cpp:{line}: includes: {what}"]


def test_this_tree_is_tidy() -> None:
    found = list(tidy.check_tree(tidy.ROOT))
    assert [str(violation) for violation in found] == []
