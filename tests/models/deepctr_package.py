# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Imports deepctr-torch without the question to a package index that it starts with."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
from patience import PATIENCE_S


def import_deepctr(name: str = "deepctr_torch") -> None:
    """Skips the test where the package is not installed.

    On import the package asks for its newest version, in a thread that the end of the
    process waits for, however long the network takes.
    """
    requests = pytest.importorskip("requests")
    with mock.patch.object(requests, "get", side_effect=OSError("not from tests")):
        before = set(threading.enumerate())
        pytest.importorskip(name)
        for thread in set(threading.enumerate()) - before:
            thread.join(PATIENCE_S)
