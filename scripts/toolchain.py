# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Finds what a build needs: torch, a C++20 compiler, ninja and Python's headers.

And writes files that it reads, only where they change.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

MINIMUM_GCC = 12
INSTALL_COMMANDS = (
    "pip install torch==2.13.0 setuptools ninja && pip install --no-build-isolation ."
)


class BuildError(Exception):
    """A build that cannot start or did not finish; the message says what to do."""


@dataclass(frozen=True)
class Torch:
    """Where the importable torch lives and which one it is."""

    root: Path
    version: str

    @property
    def target_version(self) -> str:
        """The stable ABI asked for, in the form of torch/csrc/stable/version.h."""
        major, minor = (int(part) for part in self.version.split(".")[:2])
        return f"0x{major:02x}{minor:02x}000000000000ULL"


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
    version = subprocess.run(
        [path, "-dumpversion"], capture_output=True, text=True, timeout=30, check=False
    ).stdout.strip()
    banner = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
    if "clang" not in banner and int(version.split(".")[0] or 0) < MINIMUM_GCC:
        raise BuildError(
            f"{compiler} {version} is too old for C++20: g++ {MINIMUM_GCC} or newer is "
            "needed; install it and set CXX"
        )
    return path


def find_ninja() -> str:
    """Return ninja, the one of this interpreter first.

    Raises:
        BuildError: there is none.
    """
    scripts = os.pathsep.join([sysconfig.get_path("scripts"), os.defpath])
    path = shutil.which("ninja", path=scripts) or shutil.which("ninja")
    if path is None:
        raise BuildError("ninja is not installed; run: pip install ninja")
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


def write_if_changed(path: Path, lines: Iterable[str]) -> None:
    """Write a text file unless it already says the same."""
    text = "\n".join(lines) + "\n"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
