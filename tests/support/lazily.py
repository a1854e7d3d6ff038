# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Slow imports when a test needs them: workers collect all files, and run a few."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


class Lazily:
    """A module that is imported with the first look at a name of it.

    ``load``: imports it; by default a test is skipped where it is not installed.
    """

    def __init__(
        self, name: str, load: Callable[[str], Any] = pytest.importorskip
    ) -> None:
        self._name, self._load = name, load

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks whether this is a test
            raise AttributeError(name)
        self._load(self._name)
        module: ModuleType = importlib.import_module(self._name)
        return getattr(module, name)
