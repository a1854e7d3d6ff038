# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Puts a page of metrics beside a rank, where ``CPUDIST_METRICS`` asks for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.run import Run
from torch_cpudist.log import logger
from torch_cpudist.monitor.endpoint import Endpoint
from torch_cpudist.monitor.families import Family
from torch_cpudist.monitor.reading import families_of

RunT = TypeVar("RunT", bound=Run)


def opened(made: Environment, join: Callable[[], RunT]) -> RunT:
    """The run that ``join`` opens; its page is there until it ends.

    Listens before the other ranks are met: a port that is taken is an error here and at
    once.

    Args:
        made: settings of this rank.
        join: meets the other ranks.

    Raises:
        AddressError: the port is taken, or the address is none of this host.
        BackendUnavailableError: prometheus-client is not installed.
    """
    if made.metrics is None:
        return join()
    endpoint = Endpoint(made.metrics, made.local_rank)
    try:
        run = join()
    except BaseException:
        endpoint.close()
        raise
    # A run that nobody has any more is not kept by its page.
    reference = weakref.ref(run)

    def read() -> list[Family]:
        run = reference()
        return [] if run is None else families_of(run)

    run.owned("metrics", lambda: endpoint.serve(read))
    logger.info("metrics: %s", endpoint.url)
    return run
