# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs a preset of CMakePresets.json, one build at a time in a folder.

`python scripts/cmake_build.py [PRESET [TARGET...]]` says in one sentence what a build
lacks, else configures, builds and prints the folder that the build is in. setup.py
calls it, and CMakeLists.txt asks it (`--describe`) for torch and Python's headers.
"""

from __future__ import annotations

import argparse
import fcntl
import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_GCC = 12
MINIMUM_CMAKE = (3, 24)
LOCK_DEADLINE_S = 900
INSTALL_COMMANDS = (
    "pip install torch==2.13.0 setuptools cmake ninja && "
    "pip install --no-build-isolation ."
)


class BuildError(Exception):
    """A build that cannot start or did not finish; the message says what to do."""


@dataclass(frozen=True)
class Torch:
    """Where the importable torch lives and which one it is."""

    root: Path
    version: str


def find_torch() -> Torch:
    """Find torch without importing it (an import costs seconds).

    Raises:
        BuildError: no torch can be imported, or it has no C++ headers.
    """
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(
            "torch_cpudist is compiled against the torch it will run with, and this "
            f"build cannot import torch; run: {INSTALL_COMMANDS}"
        )
    root = Path(spec.submodule_search_locations[0])
    text = (root / "version.py").read_text(encoding="utf-8")
    found = re.search(r"__version__\s*=\s*['\"]([^'\"]+)['\"]", text)
    if found is None or not (root / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError(
            f"the torch in {root} has no stable C++ headers; run: {INSTALL_COMMANDS}"
        )
    return Torch(root, found.group(1))


def find_compiler() -> str:
    """Return the C++ compiler ($CXX or g++), checked for C++20.

    Raises:
        BuildError: there is none, or it is too old.
    """
    compiler = os.environ.get("CXX", "g++")
    path = shutil.which(compiler)
    if path is None:
        raise BuildError(
            f"no C++ compiler: {compiler} is not on PATH; install g++ {MINIMUM_GCC} "
            "or newer (Debian, Ubuntu: apt install g++), or set CXX"
        )
    version = said_by(path, "-dumpversion").strip()
    clang = "clang" in said_by(path, "--version")
    if not clang and int(version.split(".")[0] or 0) < MINIMUM_GCC:
        raise BuildError(
            f"{compiler} {version} is too old for C++20: g++ {MINIMUM_GCC} or newer is "
            "needed; install it and set CXX"
        )
    return path


def said_by(*command: str) -> str:
    """Return what a program that is asked about itself prints."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout


def find_tool(name: str) -> str:
    """Return a program, the one of this interpreter first.

    Raises:
        BuildError: there is none.
    """
    path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if path is None:
        raise BuildError(f"{name} is not installed; run: pip install {name}")
    return path


def find_cmake() -> str:
    """Return cmake.

    Raises:
        BuildError: there is none, or it is too old.
    """
    path = find_tool("cmake")
    found = re.search(r"version (\d+)\.(\d+)", said_by(path, "--version"))
    if found is None or (int(found[1]), int(found[2])) < MINIMUM_CMAKE:
        least = ".".join(map(str, MINIMUM_CMAKE))
        raise BuildError(
            f"{path} is older than {least} or does not start; run: pip install cmake"
        )
    return path


def python_include() -> Path:
    """Return the folder of Python.h.

    Raises:
        BuildError: the development headers are not installed.
    """
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        raise BuildError(
            f"Python.h is not in {folder}; install Python's development headers "
            "(Debian, Ubuntu: apt install python3-dev)"
        )
    return folder


def describe() -> str:
    """Return what CMake needs to know of this interpreter, as a list of CMake.

    Raises:
        BuildError: something that the Python modules need is missing.
    """
    torch = find_torch()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return f"{torch.root};{torch.version};{python_include()};{suffix}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock: two ninjas in one folder would break each other's log.

    Raises:
        BuildError: another build holds it for LOCK_DEADLINE_S.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_DEADLINE_S
    with (folder / ".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"another build has held {folder / '.lock'} for "
                        f"{LOCK_DEADLINE_S} s; wait for it or end it, then try again"
                    ) from None
                time.sleep(0.1)
        yield


def presets(root: Path) -> list[str]:
    """Return the names of the presets."""
    text = (root / "CMakePresets.json").read_text(encoding="utf-8")
    every = json.loads(text)["configurePresets"]
    return [one["name"] for one in every if not one.get("hidden")]


def configure(root: Path, preset: str, settings: Sequence[str]) -> None:
    """Run CMake, from nothing where the last run had other tools.

    Raises:
        BuildError: something needed is missing, or CMake failed.
    """
    folder = root / "build" / preset
    tools = {
        "CMAKE_CXX_COMPILER": find_compiler(),
        "CMAKE_MAKE_PROGRAM": find_tool("ninja"),
        "CPUDIST_PYTHON": sys.executable,
    }
    command = [find_cmake(), "--preset", preset, "-S", str(root), "--log-level=WARNING"]
    stamp = folder / ".tools"
    now = json.dumps([command[0], tools, list(settings)])
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != now:
        command.append("--fresh")
        stamp.unlink(missing_ok=True)
    command += [f"-D{name}={value}" for name, value in tools.items()]
    done = subprocess.run(
        [*command, *settings], capture_output=True, text=True, check=False
    )
    # Warnings are shown; what it found on its way only where it failed.
    print(done.stderr, end="", file=sys.stderr)
    if done.returncode != 0:
        print(done.stdout, end="", file=sys.stderr)
        raise BuildError(f"configuring {preset} failed, see above")
    stamp.write_text(now, encoding="utf-8")


def build(
    preset: str,
    targets: Sequence[str],
    root: Path = ROOT,
    settings: Sequence[str] = (),
) -> Path:
    """Build targets of a preset with as many jobs as cores (or MAX_JOBS).

    Returns:
        The folder of the build.

    Raises:
        BuildError: something needed is missing, or the build failed; the compiler's
            messages are on standard error.
    """
    folder = root / "build" / preset
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    with locked(folder):
        configure(root, preset, settings)
        command = [find_cmake(), "--build", str(folder), "--parallel", jobs]
        command += ["--target", *targets, "--", "--quiet"]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            raise BuildError(f"building {', '.join(targets)} failed, see above")
    return folder


def put(built: Path, package: Path) -> None:
    """Copy what was built into the package, each file that changed by a move.

    A process that has mapped the old file keeps it.
    """
    for source in sorted(path for path in built.rglob("*") if path.is_file()):
        target = package / source.relative_to(built)
        if target.is_file() and filecmp.cmp(source, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        written = target.with_name(f"{target.name}.new")
        shutil.copyfile(source, written)
        shutil.copymode(source, written)
        written.replace(target)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset", nargs="?", default="release", choices=presets(ROOT))
    parser.add_argument("targets", nargs="*", metavar="target")
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--put", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sanitized = arguments.preset in ("asan", "tsan")
    targets = arguments.targets or ["native_tests" if sanitized else "extension"]
    try:
        if arguments.describe:
            print(describe())
        elif arguments.put:
            put(*arguments.put)
        else:
            print(build(arguments.preset, targets))
    except BuildError as error:
        print(f"torch_cpudist: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
