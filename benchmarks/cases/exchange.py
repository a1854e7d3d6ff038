# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``exchange``: how much longer a step takes while deltas are exchanged (Geo).

Two trainers with colocated servers train the model of ``ctr``. Every step of trainer 0
is timed, and counts as one of an exchange if one was under way when it began or ended.
In the first row trainer 1 rests between steps, so that a core is free; in the second
it trains as well. ``p99 ratio`` is that of the exchange's steps to that of the others.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ctr_data
import numpy as np
from launch import run_folder
from peers import strategy_row
from report import Row

import torch_cpudist as cpudist
from cases.ctr import CACHE, make_job
from torch_cpudist.testing import ProcessRanks

COLUMNS = {
    "name": "other trainer",
    "exchanges": "exchanges",
    "steps": "steps",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "steps_exchanging": "exchanging",
    "p50_exchanging_ms": "p50 ms ",
    "p99_exchanging_ms": "p99 ms ",
    "ratio_p50": "p50 ratio",
    "ratio_p99": "p99 ratio",
}
PUSH_EVERY = 100
REST_S = 0.5
_JOB, _REST = "EXCHANGE_BENCHMARK_JOB", "EXCHANGE_BENCHMARK_REST"


def _timed(
    loop: Any, optimizer: cpudist.DistributedOptimizer, until: float
) -> Iterator[tuple[float, bool]]:
    """Yields seconds of each step and whether an exchange was under way."""
    exchanges = 0
    busy_s = 0.0
    while time.perf_counter() < until:
        began = time.perf_counter()
        loop.run_step()
        seconds = time.perf_counter() - began
        found = optimizer.stats()["exchange"]
        # A slice takes time in each step of an exchange, and in no other.
        under_way = found["busy_s"] > busy_s or found["exchanges"] > exchanges
        exchanges, busy_s = found["exchanges"], found["busy_s"]
        yield seconds, under_way


def _train(context: cpudist.Context, report: Any) -> dict[str, Any]:
    from job import Job
    from peers.common import CtrModel, Loop, TorchTrainee, adagrad, batches

    job = Job.load(Path(os.environ[_JOB]))
    rests = bool(int(os.environ[_REST])) and context.trainer_rank == 1
    model = CtrModel(job)
    optimizer = cpudist.DistributedOptimizer(
        adagrad(job, model.parameters()),
        model,
        strategy=cpudist.Geo(push_every=1 if rests else PUSH_EVERY),
    )
    samples = ctr_data.load(Path(job.data_dir), "train")
    part = samples.part(context.trainer_rank, context.trainer_count)
    loop = Loop(TorchTrainee(job, model, optimizer), batches(part, job.batch))
    for _ in range(job.warmup_steps):
        loop.run_step()
    context.barrier()
    until = time.perf_counter() + job.seconds
    times: list[tuple[float, bool]] = []
    while rests and time.perf_counter() < until:
        loop.run_step()
        time.sleep(REST_S)
    if not rests:
        times = list(_timed(loop, optimizer, until))
    optimizer.leave()
    return {
        "exchanges": optimizer.stats()["exchange"]["exchanges"],
        "plain": [seconds for seconds, under_way in times if not under_way],
        "exchanging": [seconds for seconds, under_way in times if under_way],
    }


def _row(rests: bool, args: argparse.Namespace, data: Path) -> Row:
    with run_folder() as folder:
        job = make_job("exchange", strategy_row("geo"), args, folder, data)
        job = replace(job, trainers=2)
        variables = {
            _JOB: str(job.save()),
            _REST: str(int(rests)),
            "CPUDIST_THREADS": "1",
        }
        with ProcessRanks(_train, 2, variables=variables) as ranks:
            found = ranks.results(args.seconds + args.deadline_s)[0]
    plain, exchanging = (np.array(found[name]) for name in ("plain", "exchanging"))
    if not len(plain) or not len(exchanging):
        raise SystemExit("exchange: no step of either kind; expected more --seconds")
    quantiles = {
        f"p{q}{suffix}_ms": float(np.percentile(times, q)) * 1e3
        for suffix, times in (("", plain), ("_exchanging", exchanging))
        for q in (50, 99)
    }
    return {
        "case": "exchange",
        "name": "rests" if rests else "trains",
        "exchanges": found["exchanges"],
        "steps": len(plain),
        "steps_exchanging": len(exchanging),
        **quantiles,
        "ratio_p50": quantiles["p50_exchanging_ms"] / quantiles["p50_ms"],
        "ratio_p99": quantiles["p99_exchanging_ms"] / quantiles["p99_ms"],
    }


def run(args: argparse.Namespace) -> Iterable[Row]:
    """Yields a row beside a resting trainer, and one beside a training one."""
    data = ctr_data.prepare(ctr_data.CtrSpec(), CACHE)
    for rests in (True, False):
        yield _row(rests, args, data)
