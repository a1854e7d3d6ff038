# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks made at import: platform, Python, and the torch the core was built against.

A core that was compiled against another torch fails late and obscurely, so a difference is said
here, in one sentence, with the command that mends it.
"""

from __future__ import annotations

import sys

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps torch_cpudist"


def minor_version(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as ``2.13.0+cpu``."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def check_platform() -> None:
    """Check the operating system and the Python version.

    Raises:
        ImportError: this is not Linux, or Python is older than 3.11.
    """
    if not sys.platform.startswith("linux"):
        raise ImportError(f"torch_cpudist runs on Linux only; this is {sys.platform}")
    if sys.version_info < (3, 11):
        found = ".".join(str(part) for part in sys.version_info[:3])
        raise ImportError(f"torch_cpudist needs Python 3.11 or newer; this is {found}")


def check_torch(running: str, built: str) -> None:
    """Compare the torch that runs with the one the core was built against.

    Patch releases and build tags (``+cpu``) may differ: the core uses torch's stable ABI.

    Args:
        running: ``torch.__version__``.
        built: the version recorded by the build.

    Raises:
        ImportError: major or minor version differ.
    """
    if minor_version(running) != minor_version(built):
        raise ImportError(
            f"torch_cpudist was built against torch {built}, but torch {running} is "
            f"running; build it again where that torch is installed: {REBUILD} (in a "
            "checkout: pip install --no-build-isolation -e .)"
        )


def check_build() -> None:
    """Run every check; called before the compiled core is imported.

    Raises:
        ImportError: the platform is not supported, the core was not built, or it was built
            against another torch.
    """
    check_platform()
    import torch

    try:
        from torch_cpudist._build_info import TORCH_VERSION
    except ModuleNotFoundError:
        raise ImportError(
            "torch_cpudist is not built: run pip install --no-build-isolation -e . in "
            "the checkout"
        ) from None
    check_torch(str(torch.__version__), TORCH_VERSION)
