# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Launches of several tests of a module, begun before the tests ask for them.

One after the other: a launch is a process and then as many as it has ranks, and workers
that run other modules launch, too. More at a time end no earlier, but each later, up to
its limit. All are forks of one process that has imported torch: it is command lines
that are tested here, not imports.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

from patience import PATIENCE_S
from programs import Launcher


class Ahead:
    """What the tests of a module launch; each takes its own result when it runs."""

    def __init__(self, futures):
        self._futures = futures

    def result(self, request):
        """Of the test that asks; raises what its launch, which has a limit, raised."""
        return self._futures[request.node.name].result(2 * PATIENCE_S)


@contextlib.contextmanager
def ahead(request, tmp_path_factory, jobs):
    """Starts the jobs of those tests of this module that were selected.

    ``jobs``: by the test's name, what is called with a ``Launcher``.
    """
    names = [i.name for i in request.session.items if i.path == request.path]
    preloaded = request.getfixturevalue("preloaded")
    pool = ThreadPoolExecutor(1)
    launchers = {}
    try:
        started = preloaded.environment()
        launchers = {
            n: Launcher(tmp_path_factory.mktemp("job"), started)
            for n in names
            if n in jobs
        }
        yield Ahead({n: pool.submit(jobs[n], one) for n, one in launchers.items()})
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for launcher in launchers.values():
            launcher.end()
        pool.shutdown()
