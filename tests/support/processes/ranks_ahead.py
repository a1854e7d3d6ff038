# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The process that ranks of tests are forks of: it imports what they all would import.

multiprocessing starts one for each process that runs tests, when the first rank is
started, and no later wish of what it should have imported has an effect. It finds
modules as its environment says, not as ``sys.path`` of this process.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

# Ranks are functions of test files, which import pytest. The last one freezes them all.
IMPORTED = (
    "pytest",
    "torch_cpudist.testing",
    "torch._dynamo",
    "torch.distributed.fsdp",
)
LAST = "frozen"


def start(environment: dict[str, str]) -> None:
    """Starts it, if there is none, and does not wait for its imports."""
    multiprocessing.set_forkserver_preload([*IMPORTED, LAST])
    beside = str(Path(__file__).resolve().parent)
    before = dict(os.environ)
    path = os.pathsep.join(filter(None, [beside, environment.get("PYTHONPATH")]))
    try:
        os.environ.clear()
        os.environ.update(environment | {"PYTHONPATH": path})
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
