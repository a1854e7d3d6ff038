# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The build: what it refuses, per-file flags, rebuilds that compile only changes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import native_build
import pytest
import setuptools
import sources
import toolchain

pytestmark = pytest.mark.processes

SETUPTOOLS = Path(setuptools.__file__).parent


def test_without_torch_the_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    with pytest.raises(native_build.BuildError, match="pip install torch==") as caught:
        native_build.find_torch()
    assert "--no-build-isolation" in str(caught.value)


def test_setup_stops_in_an_isolated_build(tmp_path: Path) -> None:
    # Build isolation: setuptools is there, torch is not.
    for name in ("setuptools", "_distutils_hack"):
        (tmp_path / name).symlink_to(SETUPTOOLS.parent / name)
    done = subprocess.run(
        [sys.executable, "-S", "setup.py", "bdist_wheel"],
        cwd=native_build.ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("torch_cpudist: ")
    assert toolchain.INSTALL_COMMANDS in last


def test_torch_found_without_import_is_the_one_that_runs() -> None:
    import torch

    found = native_build.find_torch()
    assert found.version == str(torch.__version__)
    major, minor = found.version.split(".")[:2]
    assert found.target_version == f"0x{int(major):02x}{int(minor):02x}000000000000ULL"


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
    with pytest.raises(native_build.BuildError, match=words):
        native_build.find_compiler()


def test_file_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("// one\n// build-flags: -mavx2 -mfma\n")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert sources.file_flags(source) == ["-mavx2", "-mfma"]
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert sources.file_flags(source) == []
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    source.write_text("//\n" * 20 + "// build-flags: -mavx2\n")
    assert sources.file_flags(source) == []


def test_sources_of_a_word_are_one_unless_they_have_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    for name in ("tcp.cpp", "tcp_socket.cpp", "tcp_avx.cpp", "wire.cpp"):
        (csrc / name).write_text("// build-flags: -mavx2\n" * (name == "tcp_avx.cpp"))

    def units() -> dict[str, str]:
        found = sources.sources_in(csrc)
        made = sources.merged_by_word(found, tmp_path / "made", tmp_path)
        return {str(one.relative_to(tmp_path)): one.read_text() for one in made}

    first = units()
    assert set(first) == {"made/csrc/tcp.cpp", "csrc/tcp_avx.cpp", "csrc/wire.cpp"}
    assert [Path(one).name for one in first["made/csrc/tcp.cpp"].split('"')[1::2]] == [
        "tcp.cpp",
        "tcp_socket.cpp",
    ]
    (csrc / "tcp_link.cpp").write_text("")
    assert "tcp_link.cpp" in units()["made/csrc/tcp.cpp"]


def test_tests_without_threads_say_so(tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("// A test.\n")
    assert sources.tests_threads(source)
    source.write_text("// threads: none\n")
    assert not sources.tests_threads(source)
    threads = ("std::thread", "run_all", "std::async", "core/server.h", "core/client.h")
    for marked in sources.sources_in(native_build.ROOT / "tests" / "native"):
        if not sources.tests_threads(marked):
            text = marked.read_text(encoding="utf-8")
            assert not [word for word in threads if word in text], marked


def make_target(root: Path) -> native_build.Target:
    sources = [root / "main.cpp", root / "part.cpp"]
    flags = [*native_build.COMMON, *native_build.WARNINGS, f"-I{root}"]
    build = root / "build"
    objects = [native_build.Objects(sources, flags, root / "common.h")]
    return native_build.Target(build, build / "program", objects, [], [])


def test_rebuild_compiles_only_what_a_header_touches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "ROOT", tmp_path)
    (tmp_path / "common.h").write_text('#include "scale.h"\n')
    (tmp_path / "scale.h").write_text("constexpr int kScale = 1;\n")
    (tmp_path / "part.h").write_text("inline int value() { return 3 * kScale; }\n")
    (tmp_path / "part.cpp").write_text(
        '#include "part.h"\nint part() { return value(); }\n'
    )
    (tmp_path / "main.cpp").write_text("int part();\nint main() { return part(); }\n")
    target = make_target(tmp_path)
    objects = [tmp_path / "build" / "obj" / n for n in ("main.o", "part.o")]

    native_build.run_ninja(target)
    first = [path.stat().st_mtime_ns for path in objects]
    native_build.run_ninja(target)
    assert [path.stat().st_mtime_ns for path in objects] == first
    assert subprocess.run([target.output], timeout=10, check=False).returncode == 3

    (tmp_path / "part.h").write_text("inline int value() { return 4 * kScale; }\n")
    native_build.run_ninja(target)
    second = [path.stat().st_mtime_ns for path in objects]
    assert second[0] == first[0]
    assert second[1] != first[1]
    assert subprocess.run([target.output], timeout=10, check=False).returncode == 4

    # What a precompiled header includes touches every source that it is read before.
    (tmp_path / "scale.h").write_text("constexpr int kScale = 2;\n")
    native_build.run_ninja(target)
    third = [path.stat().st_mtime_ns for path in objects]
    assert all(new != old for new, old in zip(third, second, strict=True))
    assert subprocess.run([target.output], timeout=10, check=False).returncode == 8

    (tmp_path / "part.cpp").write_text("int part() { int unused; return 1; }\n")
    with pytest.raises(native_build.BuildError, match="program failed"):
        native_build.run_ninja(target)


def test_only_gcc_reads_precompiled_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "ROOT", tmp_path)
    for name in ("main.cpp", "part.cpp"):
        (tmp_path / name).write_text("// build-flags: -mavx2\n" * (name == "part.cpp"))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    target = make_target(tmp_path)
    compilers = {"gcc": "Free Software Foundation", "other": "clang version 19"}
    found = {}
    for name, banner in compilers.items():
        compiler = tmp_path / name
        compiler.write_text(f"#!/bin/sh\necho '{banner}'\n")
        compiler.chmod(0o755)
        found[name] = "\n".join(native_build.ninja_lines([target], str(compiler)))
    assert "common.h" not in found["other"]
    # A header is compiled with the flags of all; a file with flags of its own has none.
    assert found["gcc"].count("-include") == 1
