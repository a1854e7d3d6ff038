# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Programs that use the compiled core without torch's Python, which takes seconds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from programs import clean_environment

from torch_cpudist import _core

_LOAD = """
import importlib.util, sys
_spec = importlib.util.spec_from_file_location("torch_cpudist._core", sys.argv.pop(1))
core = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(core)
"""


def command(code: str, *arguments: str) -> list[str]:
    """Runs ``code``, which finds the core as ``core`` and the rest in ``sys.argv``."""
    return [sys.executable, "-c", _LOAD + code, _core.__file__, *arguments]


def environment(**variables: str) -> dict[str, str]:
    """A clean one in which the core's shared libraries are found."""
    libraries = [str(Path(torch.__file__).parent / "lib")]
    libraries += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    return clean_environment() | {"LD_LIBRARY_PATH": ":".join(libraries)} | variables
