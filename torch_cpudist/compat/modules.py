# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``import`` finds under the names of the two packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from torch_cpudist import backends
from torch_cpudist._version import __version__
from torch_cpudist.compat import ipex
from torch_cpudist.log import logger

_IPEX = "intel_extension_for_pytorch"
_ONECCL = "oneccl_bindings_for_pytorch"


@dataclass(frozen=True)
class Installed:
    """What ``install`` did.

    Attributes:
        modules: names that are found here from now on.
        notes: one sentence for each name.
    """

    modules: tuple[str, ...]
    notes: tuple[str, ...]


def _refusing(name: str, has: str) -> Callable[[str], Any]:
    """What a module says that is asked for something which it has not."""

    def __getattr__(attribute: str) -> Any:
        raise AttributeError(
            f"{name}.{attribute} is not there: torch_cpudist.compat has {has} of it. "
            "docs/migrating.md says what takes the place of the rest."
        )

    return __getattr__


def _made(name: str, contents: Mapping[str, Any], has: str) -> ModuleType:
    module = ModuleType(name, f"The part of {name} that torch_cpudist.compat has.")
    spec = ModuleSpec(name, loader=None, origin="torch_cpudist.compat")
    module.__spec__ = spec
    module.__dict__["__version__"] = f"0+torch_cpudist.{__version__}"
    module.__dict__.update(contents)
    module.__dict__["__getattr__"] = _refusing(name, has)
    return module


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _real(name: str) -> str | None:
    """Why the real package of that name cannot be used; ``None``: it can."""
    version = _version_of(name)
    if version is None:
        return "it is not installed"
    if _minor(version) != _minor(torch.__version__):
        return f"the one installed, {version}, is for another torch"
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever a compiled package fails with
        return f"the one installed, {version}, cannot be imported ({error})"
    return None


def install() -> Installed:
    """Has ``import`` find the two packages here, in this process. Idempotent.

    ``oneccl_bindings_for_pytorch``: the import does nothing more, as the backend
    ``ccl`` of torch.distributed is this package's own, also where another one is
    installed, which could not register that name a second time; one that was imported
    before this package stays. ``intel_extension_for_pytorch``
    has ``optimize``, which ``cpudist.optimize`` does, and ``__version__``; the real one
    is left where it is installed, fits the torch in use and can be imported. Every
    other attribute of either is an ``AttributeError`` that says so. What was done is
    logged as a warning. Call it before anything imports them. No messages.

    Returns:
        What was done.
    """
    if _is_ours(_ONECCL) or _is_ours(_IPEX):
        ours = tuple(name for name in (_ONECCL, _IPEX) if _is_ours(name))
        return Installed(ours, tuple(f"{name} is found here already." for name in ours))
    backends.register()
    names, notes = [], []
    if _ONECCL in sys.modules:
        notes.append(f"{_ONECCL} was imported before, and stays.")
    else:
        has = "the backend 'ccl', and no function,"
        sys.modules[_ONECCL] = _made(_ONECCL, {}, has)
        names.append(_ONECCL)
        notes.append(
            f"import {_ONECCL} is torch_cpudist's own backend 'ccl' over the runtime "
            "of oneCCL (pip install 'torch-cpudist[ccl]')."
        )
    why = _real(_IPEX)
    if why is None:
        notes.append(f"import {_IPEX} is the one installed.")
    else:
        sys.modules.pop(_IPEX, None)  # what an import that failed may have left
        contents = {"optimize": ipex.optimize}
        sys.modules[_IPEX] = _made(_IPEX, contents, "optimize()")
        names.append(_IPEX)
        notes.append(f"{_IPEX}.optimize is cpudist.optimize: {why}.")
    logger.warning("compat: %s", " ".join(notes))
    return Installed(tuple(names), tuple(notes))


def _is_ours(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and spec.origin == "torch_cpudist.compat"
