# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures: programs that end with the test, and a clean environment."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import ranks_ahead
from preloaded import Preloaded
from programs import LAUNCHER_VARIABLES, Launcher, clean_environment

pytest_plugins = ["allowed_skips"]

# A background job of a shell ignores interrupts, and tests and their children with it.
signal.signal(signal.SIGINT, signal.default_int_handler)


# These wait for processes, or train and compile for long. A file's tests stay together
# on one worker: what is begun last must not be what takes longest.
LONG = (
    *(
        "snapshot_jobs",
        "multiprocess",
        "faults",
        "examples",
        "models",
        "backends",
        "collective",
    ),
    *("scripts", "tables", "settings", "benchmarks", "replicas", "drivers"),
    *("snapshot", "launch"),
)
PROGRAMS = {"launch", "launch_forks", "launched", "demo", "groups"}
# Folders whose tests all need what other projects have made.
INTEGRATIONS = {"models"}


def pytest_collection_modifyitems(items):
    """Marks tests by their fixtures and folders, too; long folders first."""
    for item in items:
        if PROGRAMS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.processes)
        if item.path.parent.name in INTEGRATIONS:
            item.add_marker(pytest.mark.integrations)
    order = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(LONG)))


@pytest.fixture(autouse=True)
def _no_inherited_launch(monkeypatch):
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith("CPUDIST_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _ranks_ahead(request, _no_inherited_launch):
    """What ranks are forks of imports while the first test that may have any begins."""
    if request.node.get_closest_marker("processes"):
        ranks_ahead.start(dict(os.environ))


@pytest.fixture(autouse=True)
def _signals_given_back():
    """A handler of SIGTERM that one test leaves behind would be the next one's."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    after = signal.signal(signal.SIGTERM, before)
    if after is not before:
        from torch_cpudist.machine.termination import is_free

        assert is_free(after), "this test leaves a handler of SIGTERM behind"


@pytest.fixture(autouse=True)
def _no_closed_context():
    """What an earlier test of the same worker has closed is not this test's context."""
    contexts = sys.modules.get("torch_cpudist.launch.context")
    if contexts is not None and (last := contexts.last()) and last.closed:
        contexts.set_last(None)


@pytest.fixture
def launch(tmp_path):
    """Starts command lines in tmp_path; whatever still runs is ended after the test."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end()


@pytest.fixture(scope="session")
def preloaded():
    """One process that has imported torch, for all the launches that fork it."""
    one = Preloaded(clean_environment())
    yield one
    one.end()


@pytest.fixture
def launch_forks(preloaded, tmp_path):
    """As ``launch``, of programs that begin as forks of one that has imported torch."""
    launcher = Launcher(tmp_path, preloaded.environment())
    yield launcher
    launcher.end()


@pytest.fixture
def eventually():
    """Waits until a condition holds, or fails with what it was."""

    def wait(condition, timeout_s, what):
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout_s} s: {what}")
            time.sleep(0.01)

    return wait
