# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures: servers and trainers in jobs of their own."""

from __future__ import annotations

import contextlib
import functools
import json
import time

import pytest
from meeting_points import store_at
from patience import PATIENCE_S
from ports import free_port
from train_groups import MANY, train

from torch_cpudist.testing import ProcessRanks


@pytest.fixture
def groups(tmp_path):
    """Starts jobs that meet at one port and end with the test."""
    port = free_port()

    class Groups:
        def addresses(self, key=None):
            """What is found at that port: the run, and where servers listen."""
            word = store_at(port, key).get("run")
            run = json.loads(word[word.index("{") :])
            return run["run_id"], run["servers"]

        def variables(self, role, **others):
            where = f"127.0.0.1:{port}"
            own = {"CPUDIST_ROLE": role, "CPUDIST_RENDEZVOUS": where}
            return own | {"CPUDIST_THREADS": "1"} | others

        def start(self, role, body, ranks=1, **others):
            variables = self.variables(role, **others)
            job = ProcessRanks(body, ranks, variables=variables)
            return ended.enter_context(job)

        def servers(self, ranks=2, **others):
            return self.start("server", train, ranks, CPUDIST_TRAINERS="2", **others)

        def trainer(self, name, steps=MANY, pause_s=0.02, **others):
            body = functools.partial(train, tmp_path, name, steps, pause_s)
            return self.start("trainer", body, **others)

    with contextlib.ExitStack() as ended:
        yield Groups()


@pytest.fixture
def steps_of(tmp_path):
    """How many steps a trainer has written down; waits until there are enough."""

    def wait(name, least=0):
        path = tmp_path / f"{name}.steps"
        until = time.monotonic() + PATIENCE_S
        while not (path.exists() and len(path.read_text()) >= least):
            assert time.monotonic() < until, f"{name} did not come to {least} steps"
            time.sleep(0.01)
        return len(path.read_text())

    return wait
