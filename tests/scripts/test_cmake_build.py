# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The build: what it refuses, per-file flags, rebuilds that compile only changes."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import cmake_build
import pytest
import setuptools
from cmake_build import ROOT, BuildError, build
from patience import PATIENCE_S

pytestmark = pytest.mark.processes

SETUPTOOLS = Path(setuptools.__file__).parent
LICENSE = "// Copyright\n// License\n"
WITHOUT_TORCH = ["-DCPUDIST_EXTENSION=OFF"]
VECTORS = ("-fno-math-errno", "-fno-trapping-math")


def test_without_torch_the_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cmake_build, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="pip install torch==") as caught:
        cmake_build.find_torch()
    assert "--no-build-isolation" in str(caught.value)


def test_setup_stops_in_an_isolated_build(tmp_path: Path) -> None:
    # Build isolation: setuptools is there, torch is not.
    for name in ("setuptools", "_distutils_hack"):
        (tmp_path / name).symlink_to(SETUPTOOLS.parent / name)
    done = subprocess.run(
        [sys.executable, "-S", "setup.py", "bdist_wheel"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("torch_cpudist: ")
    assert cmake_build.INSTALL_COMMANDS in last


def test_torch_found_without_import_is_the_one_that_runs() -> None:
    import torch

    found = cmake_build.find_torch()
    assert found.version == str(torch.__version__)
    described = cmake_build.describe().split(";")
    assert described[:2] == [str(found.root), found.version]
    assert (Path(described[2]) / "Python.h").is_file()


def test_modules_ask_for_the_lowest_stable_abi() -> None:
    text = (ROOT / "cmake/extension.cmake").read_text(encoding="utf-8")
    assert "set(CPUDIST_STABLE_ABI 0x020a000000000000ULL)" in text
    oldest = cmake_build.find_torch().root / "include/torch/csrc/stable/version.h"
    assert "TORCH_VERSION_2_10_0" in oldest.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("compiler", "words"),
    [("no-such-compiler", "not on PATH"), ("old-g++", "too old")],
)
def test_compiler_is_checked(
    compiler: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old-g++"
    old.write_text("#!/bin/sh\necho 9.4.0\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(BuildError, match=words):
        cmake_build.find_compiler()


@pytest.mark.parametrize("said", ["cmake version 3.18.4", "no such interpreter"])
def test_cmake_is_checked(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "cmake"
    old.write_text(f"#!/bin/sh\necho {said}\n")
    old.chmod(0o755)
    monkeypatch.setattr(cmake_build, "find_tool", lambda name: str(old))
    with pytest.raises(BuildError, match=r"older than 3\.24.*pip install cmake"):
        cmake_build.find_cmake()


@pytest.mark.parametrize("name", ["cmake", "ninja"])
def test_missing_tools_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(BuildError, match=f"{name} is not installed; run: pip install"):
        cmake_build.find_tool(name)


def test_missing_headers_of_python_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cmake_build.sysconfig, "get_path", lambda name: str(tmp_path / name)
    )
    with pytest.raises(BuildError, match=r"Python\.h is not in .*python3-dev"):
        cmake_build.python_include()


def make_tree(root: Path) -> None:
    """A tree of the project's form: two sources, two headers, one test program."""
    for name in ("CMakeLists.txt", "CMakePresets.json"):
        shutil.copy(ROOT / name, root)
    shutil.copytree(ROOT / "cmake", root / "cmake")
    files = {
        "csrc/precompiled/standard.h": '#include "base/scale.h"\n',
        "csrc/base/scale.h": "constexpr int kScale = 1;\n",
        "csrc/base/part.h": "inline int value() { return 3 * kScale; }\n",
        "csrc/base/part.cpp": '#include "base/part.h"\nint part() { return value(); }',
        "csrc/base/other.cpp": "int other() { return 0; }\n",
        "csrc/data/read/batch.cpp": "int batch() { return 0; }\n",
        "csrc/backends/ccl/engine.cpp": "int engine() { return 0; }\n",
        "csrc/backends/ccl/group.cpp": "int group() { return 0; }\n",
        "csrc/kernels/levels/avx2.cpp": "int level() { return 0; }\n",
        "tests/native/precompiled/tests.h": "\n",
        "tests/native/main.cpp": "int part();\nint main() { return part(); }\n",
        "tests/fuzz/driver.cpp": "\n",
        "tests/fuzz/support/untraced.cpp": "\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def build_tree(root: Path, preset: str = "dev") -> Path:
    return build(preset, ["native_tests"], root, WITHOUT_TORCH) / "native_tests"


def objects_of(root: Path, preset: str = "dev") -> dict[str, int]:
    """When each object of the core was written."""
    folder = root / "build" / preset
    found = [*folder.rglob("codec.dir/**/*.o"), *folder.rglob("codec.dir/*.o")]
    return {one.name.removesuffix(".o"): one.stat().st_mtime_ns for one in found}


def status(program: Path) -> int:
    return subprocess.run([program], timeout=PATIENCE_S, check=False).returncode


def test_rebuild_compiles_only_what_a_header_touches(tmp_path: Path) -> None:
    make_tree(tmp_path)
    program = build_tree(tmp_path)
    first = objects_of(tmp_path)
    assert {"part.cpp", "other.cpp"} <= set(first)
    build_tree(tmp_path)
    assert objects_of(tmp_path) == first
    assert status(program) == 3

    part = tmp_path / "csrc/base/part.h"
    part.write_text("inline int value() { return 4 * kScale; }\n")
    build_tree(tmp_path)
    second = objects_of(tmp_path)
    assert {one for one in second if second[one] != first[one]} == {"part.cpp"}
    assert status(program) == 4

    # What a precompiled header includes touches every source that it is read before.
    (tmp_path / "csrc/base/scale.h").write_text("constexpr int kScale = 2;\n")
    build_tree(tmp_path)
    third = objects_of(tmp_path)
    assert third["part.cpp"] != second["part.cpp"]
    assert third["other.cpp"] != second["other.cpp"]
    assert status(program) == 8

    # A source is built because it is there, and a warning is an error.
    (tmp_path / "csrc/base/new.cpp").write_text("int made() { return 5; }\n")
    (tmp_path / "tests/native/main.cpp").write_text(
        "int made();\nint main() { return made(); }\n"
    )
    build_tree(tmp_path)
    assert status(program) == 5
    (tmp_path / "csrc/base/part.cpp").write_text(
        "int part() { int unused; return 1; }\n"
    )
    with pytest.raises(BuildError, match="building native_tests failed"):
        build_tree(tmp_path)


def test_two_builds_at_once_do_not_break_each_other(tmp_path: Path) -> None:
    make_tree(tmp_path)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            build_tree(tmp_path)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failures == []
    assert status(tmp_path / "build/dev/native_tests") == 3


def test_a_build_that_waits_too_long_says_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cmake_build, "LOCK_DEADLINE_S", 0)
    with (
        cmake_build.locked(tmp_path),
        pytest.raises(BuildError, match=r"another build has held .*\.lock for 0 s"),
        cmake_build.locked(tmp_path),
    ):
        pass


def configured(root: Path, preset: str) -> dict[str, str]:
    """The command that compiles each file of a tree, by the file's path."""
    cmake_build.configure(root, preset, WITHOUT_TORCH)
    text = (root / "build" / preset / "compile_commands.json").read_text()
    made = root / "build" / preset
    commands = {}
    for one in json.loads(text):
        path = Path(one["file"])
        inside = path.relative_to(made if path.is_relative_to(made) else root)
        commands[str(inside)] = one["command"]
    return commands


def test_sources_of_vector_levels_have_flags_of_their_own(tmp_path: Path) -> None:
    make_tree(tmp_path)
    vectors = platform.machine() in ("x86_64", "AMD64")
    for preset in ("release", "dev"):
        (tmp_path / "build" / preset).mkdir(parents=True)
        commands = configured(tmp_path, preset)
        level = commands["csrc/kernels/levels/avx2.cpp"].split()
        assert [flag in level for flag in VECTORS] == [vectors] * 2
        # A header is compiled with the flags of all; this file has others, so none.
        assert ("-include" in level) != vectors
        for path, command in commands.items():
            assert "-ffp-contract=off" in command.split()
            if "levels" not in path:
                assert not set(VECTORS) & set(command.split())


def test_sources_of_a_folder_are_one_unless_they_have_flags(tmp_path: Path) -> None:
    make_tree(tmp_path)
    (tmp_path / "build/release").mkdir(parents=True)
    configured(tmp_path, "release")
    folder = tmp_path / "build/release/CMakeFiles/codec.dir/Unity"
    text = (folder / "unity_csrc_base_0_cxx.cxx").read_text()
    included = [
        Path(line.split('"')[1]).name
        for line in text.splitlines()
        if "#include" in line
    ]
    assert included == ["other.cpp", "part.cpp"]
    every = "".join(one.read_text() for one in folder.glob("*.cxx"))
    assert ("levels/avx2.cpp" in every) != (platform.machine() in ("x86_64", "AMD64"))
    (tmp_path / "build/dev").mkdir(parents=True)
    assert "csrc/base/part.cpp" in configured(tmp_path, "dev")


@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("release", ["-O3", "-DNDEBUG"]),
        (
            "asan",
            [
                *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1"),
                "-fsanitize-undefined-trap-on-error",
            ],
        ),
        ("tsan", ["-fsanitize=thread", "-fno-sanitize-recover=all", "-O1"]),
    ],
)
def test_presets_compile_the_core_with_their_flags(
    preset: str, flags: list[str], tmp_path: Path
) -> None:
    make_tree(tmp_path)
    (tmp_path / "build" / preset).mkdir(parents=True)
    commands = configured(tmp_path, preset)
    for path, command in commands.items():
        if "codec.dir" in path or "core.dir" in path:
            assert set(flags) <= set(command.split()), path
            assert "-fvisibility=hidden" in command.split()
            assert "-Werror" in command.split()


def test_tests_without_threads_are_not_in_the_thread_sanitizers_program(
    tmp_path: Path,
) -> None:
    make_tree(tmp_path)
    pure = tmp_path / "tests/native/kernels/pure.cpp"
    pure.parent.mkdir()
    pure.write_text(LICENSE + "// threads: none\n")
    late = tmp_path / "tests/native/kernels/late.cpp"
    late.write_text("//\n" * 400 + "// threads: none\n")
    for preset in ("dev", "tsan"):
        (tmp_path / "build" / preset).mkdir(parents=True)
    configured(tmp_path, "tsan")
    configured(tmp_path, "dev")

    def said(preset: str) -> str:
        folder = tmp_path / "build" / preset
        units = folder.glob("CMakeFiles/native_test_sources.dir/Unity/*.cxx")
        return (folder / "build.ninja").read_text() + "".join(
            one.read_text() for one in units
        )

    assert "kernels/pure.cpp" in said("dev")
    assert "kernels/pure.cpp" not in said("tsan")
    assert "kernels/late.cpp" in said("tsan")


def test_tests_that_compute_for_long_are_optimized(tmp_path: Path) -> None:
    make_tree(tmp_path)
    model = tmp_path / "tests/native/server/model.cpp"
    model.parent.mkdir()
    model.write_text(LICENSE + "// optimized: yes\n")
    for preset, optimized in (("release", True), ("tsan", False)):
        (tmp_path / "build" / preset).mkdir(parents=True)
        commands = configured(tmp_path, preset)
        alone = [path for path in commands if path.endswith("server/model.cpp")]
        assert bool(alone) == optimized
        for path in alone:
            assert commands[path].rfind(" -O1") > commands[path].rfind(" -O0")
            assert "-include" not in commands[path].split()


def test_marked_tests_use_no_threads() -> None:
    threads = ("std::thread", "run_all", "std::async", "server/server.h")
    marked = [
        one
        for one in (ROOT / "tests/native").rglob("*.cpp")
        if "// threads: none\n" in one.read_text(encoding="utf-8")
    ]
    assert marked
    for one in marked:
        text = one.read_text(encoding="utf-8")
        assert not [word for word in (*threads, "client/client.h") if word in text], one


def test_other_tools_configure_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path)
    (tmp_path / "build/dev").mkdir(parents=True)
    configured(tmp_path, "dev")
    other = tmp_path / "other-g++"
    other.write_text('#!/bin/sh\nexec g++ "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    commands = configured(tmp_path, "dev")
    assert str(other) in commands["csrc/base/part.cpp"]


def test_what_changed_is_put_beside_and_moved(tmp_path: Path) -> None:
    built, package = tmp_path / "built", tmp_path / "package"
    (built / "backends").mkdir(parents=True)
    (built / "_core.so").write_text("one")
    (built / "backends/shim.h").write_text("shim")
    cmake_build.put(built, package)
    first = (package / "_core.so").stat()
    with (package / "_core.so").open() as mapped:
        cmake_build.put(built, package)
        assert (package / "_core.so").stat().st_ino == first.st_ino
        (built / "_core.so").write_text("two")
        cmake_build.put(built, package)
        assert mapped.read() == "one"
    assert (package / "_core.so").read_text() == "two"
    assert (package / "backends/shim.h").read_text() == "shim"
    assert not list(package.rglob("*.new"))
