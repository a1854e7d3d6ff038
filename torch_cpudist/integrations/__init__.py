# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plug-ins for the training loops of other projects, each imported at its first use.

``cpudist.integrations.lightning`` needs the extra ``lightning``; without a use of it
nothing of that project is imported. Its ranks are those of ``lightning_world``, and its
checkpoints have ``checkpoint_snapshots``.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_PLUG_INS = ("lightning",)


def __getattr__(name: str) -> ModuleType:
    """Imports a plug-in.

    Raises:
        BackendUnavailableError: what it is for is not installed.
        AttributeError: there is no such plug-in.
    """
    if name not in _PLUG_INS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """The plug-ins."""
    return list(_PLUG_INS)
