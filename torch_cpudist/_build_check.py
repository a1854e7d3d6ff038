# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Says in one sentence why this package cannot run here, before it is imported."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_BUILD = "pip install --no-build-isolation ."
# The core uses torch's stable ABI, so that one build serves all of these.
SERVED = (("2", "11"), ("2", "12"), ("2", "13"))


def release(version: str) -> tuple[str, ...]:
    """Major and minor of a version: ``("2", "13")`` of ``"2.13.0+cpu"``."""
    return tuple(version.split(".")[:2])


def check_platform(platform: str, version: tuple[int, ...]) -> None:
    """Raises ImportError where the package cannot work.

    Args:
        platform: ``sys.platform``.
        version: ``sys.version_info``.
    """
    if not platform.startswith("linux"):
        raise ImportError(f"torch_cpudist runs on Linux only; this is {platform}.")
    if version[:2] < (3, 11):
        found = ".".join(map(str, version[:3]))
        raise ImportError(f"torch_cpudist needs Python 3.11 or newer; this is {found}.")


def check_torch(running: str, built: str) -> None:
    """Raises ImportError where the core does not serve the torch that runs.

    Args:
        running: the version that is installed.
        built: the one that the core was built against.
    """
    if release(running) not in SERVED:
        served = " or ".join(".".join(one) for one in SERVED)
        raise ImportError(
            f"torch_cpudist serves torch {served}, but torch {running} is installed "
            f"(it was built against torch {built}). Install one of those, or a later "
            "torch_cpudist."
        )


def _import(name: str, remedy: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"torch_cpudist cannot import {name} ({error}). {remedy}"
        ) from error


def check() -> None:
    """Checks platform, Python, torch and the compiled core.

    Raises:
        ImportError: one of them does not fit; the message says what to do.
    """
    check_platform(sys.platform, sys.version_info[:3])
    torch = _import("torch", "Install it: pip install torch")
    info = _import("torch_cpudist._build_info", f"Build the extension: {_BUILD}")
    check_torch(torch.__version__, info.TORCH_VERSION)
    _import("torch_cpudist._core", f"Build the extension: {_BUILD}")
