# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hooks the native build into setuptools; everything else is in pyproject.toml.

torch is no build requirement: pip would then compile against a torch of its own choice,
not against the one that runs. Without an importable torch the build stops with the
command to run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

from cmake_build import BuildError, build, find_torch, put  # noqa: E402


class CMakeBuildExt(build_ext):
    """Builds _core and _c10d with CMake, in place or into the wheel's folder."""

    def run(self) -> None:
        """Build beside the sources when editable, else below build_lib."""
        folder = ROOT if self.inplace else Path(self.build_lib)
        try:
            built = build("release", ["package"])
        except BuildError as error:
            raise SystemExit(f"torch_cpudist: {error}") from None
        put(built / "package", folder.resolve() / "torch_cpudist")


def check_platform() -> None:
    """Stop with one sentence where the package cannot work."""
    if not sys.platform.startswith("linux"):
        raise SystemExit(f"torch_cpudist runs on Linux only; this is {sys.platform}")
    if sys.version_info < (3, 11):  # noqa: UP036
        found = ".".join(map(str, sys.version_info[:3]))
        raise SystemExit(f"torch_cpudist needs Python 3.11 or newer; this is {found}")


def check_torch() -> None:
    """Stop early, before pip starts to build, when no torch can be imported."""
    if {"sdist", "egg_info", "--version", "--help"} & set(sys.argv):
        return
    try:
        find_torch()
    except BuildError as error:
        raise SystemExit(f"torch_cpudist: {error}") from None


check_platform()
check_torch()
setup(
    # No sources: CMake builds them. The entries make wheels carry a platform tag.
    ext_modules=[
        Extension("torch_cpudist._core", sources=[]),
        Extension("torch_cpudist._c10d", sources=[]),
    ],
    cmdclass={"build_ext": CMakeBuildExt},
)
