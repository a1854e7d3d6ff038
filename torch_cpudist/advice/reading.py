# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads what a trainer, its process and its servers know, as ``Figures``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_cpudist.advice.figures import Figures
from torch_cpudist.launch.context import Context
from torch_cpudist.launch.loads import loads_of
from torch_cpudist.launch.moment import Moment, moment_of
from torch_cpudist.machine.busy import Busy
from torch_cpudist.optimizer.distributed import DistributedOptimizer

_NONE = Busy(0.0, 0.0)


def figures_of(opt: DistributedOptimizer, run: Context, then: Moment) -> Figures:
    """What has come since a moment.

    Cost: ``stats()``, some 20 us for each thread of this process, and two requests to
    the store per dedicated server. Waits for no trainer and no server.
    """
    now = moment_of(opt.stats(), run.loops.totals())
    seconds = now.at_s - then.at_s
    replicas, threads = opt.baseline.replicas or (0, torch.get_num_threads())
    loads = loads_of(run)
    own, before = _Counted(now.stats), _Counted(then.stats)
    waits = own.of("wait_s") - before.of("wait_s")
    collective = own.of("collective", "wait_s") - before.of("collective", "wait_s")
    alone = threads == 1 and replicas == 0
    tables = opt.strategy.of_tables
    communicator = getattr(tables, "communicator", None)
    apart = run.environment.apart is not None
    return Figures(
        seconds=seconds,
        steps=int(own.of("steps") - before.of("steps")),
        strategy=type(opt.strategy).__name__,
        trainers=run.trainer_count,
        servers=run.server_count,
        one_host=not apart and run.layout.one_host,
        colocated=not apart and run.layout.colocated,
        cores=run.cores,
        threads=threads,
        replicas=replicas,
        replicas_set=run.environment.replicas or 0,
        cores_busy=_sum(now, then).ran_s / seconds,
        queued=_sum(now, then).queued_s,
        data_s=_data_s(now, then),
        asleep_s=_asleep_s(now, then, waits + collective) if alone else None,
        wait_s=waits,
        round_wait_s=own.of("round_wait_s") - before.of("round_wait_s"),
        collective_s=collective,
        in_rounds=run.trainer_count > 1 and opt.driver.in_rounds,
        bounded=getattr(tables, "max_staleness", None) is not None,
        load=max(loads, default=None),
        requests=int(own.of("requests") - before.of("requests")),
        bytes=int(own.moved - before.moved),
        rows_pulled=int(own.of("rows_pulled") - before.of("rows_pulled")),
        rows_prefetched=int(own.of("rows_prefetched") - before.of("rows_prefetched")),
        together=int(own.of("lookups", "together") - before.of("lookups", "together")),
        alone=int(own.of("lookups", "alone") - before.of("lookups", "alone")),
        wire_dtype="" if communicator is None else communicator.wire_dtype,
    )


class _Counted:
    """Counters by name, those of a strategy by two."""

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def of(self, name: str, inner: str = "") -> float:
        """One of them; 0 where the strategy has none."""
        found = self._stats.get(name, 0)
        if inner:
            found = found.get(inner, 0) if isinstance(found, Mapping) else 0
        return float(found)

    @property
    def moved(self) -> float:
        """Bytes to and from servers."""
        return self.of("bytes_sent") + self.of("bytes_received")


def _sum(now: Moment, then: Moment) -> Busy:
    """Of all threads that there are now, since then."""
    spent = [
        (one.ran_s - before.ran_s, one.queued_s - before.queued_s)
        for number, one in now.threads.items()
        for before in (then.threads.get(number, _NONE),)
    ]
    return Busy(sum(ran for ran, _ in spent), sum(queued for _, queued in spent))


def _data_s(now: Moment, then: Moment) -> float | None:
    """Waiting in loops over datasets; ``None`` if no batch has come from one."""
    if now.loops.get("batches", 0) <= then.loops.get("batches", 0):
        return None
    return now.loops["waiting"] - then.loops.get("waiting", 0.0)


def _asleep_s(now: Moment, then: Moment, waited_s: float) -> float | None:
    """Seconds that this thread has slept for nobody of the run."""
    if now.own is None or then.own is None or now.thread != then.thread:
        return None
    wanted_s = now.own.wanted_s - then.own.wanted_s
    return max(now.at_s - then.at_s - wanted_s - waited_s, 0.0)
