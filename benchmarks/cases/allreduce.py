# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``allreduce``: backend shm beside gloo, oneCCL, DeepSpeed and the limit.

All implementations run in the same processes, in turns, one core for each rank where
there are enough; a call's time is that of the slowest rank. ``limit`` rows are copies
and sums over shared memory alone: of a user's tensor, in one piece or in chunks, and of
tensors that are in shared memory. ``--trainers`` beyond the cores shows what happens
when ranks must share them. Figures are over all launches.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Iterable
from multiprocessing.connection import wait
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from statistics import median
from typing import Any

from peers import deepspeed_shm
from report import MISSING, Row

from cases import allreduce_worker
from cases.allreduce_worker import HEAD_BYTES, LARGEST_BYTES, Plan
from torch_cpudist.backends import ccl
from torch_cpudist.errors import BackendUnavailableError

COLUMNS = {
    "name": "name",
    "us": "median us",
    "us_min": "min us",
    "ratio": "gloo / it",
    "ratio_min": "by minima",
    "limit_ratio": "it / limit, minima",
}
COLLECTIVES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all")
SIZES = (4 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20)
USER_LIMITS = ("limit: one copy", "limit: chunks")

Times = dict[tuple[str, str, int], dict[str, list[float]]]


def missing_backends(ranks: int) -> dict[str, str]:
    """Peers that cannot run here, and why."""
    found = {}
    try:
        ccl.check()
    except BackendUnavailableError as error:
        found["ccl"] = str(error).splitlines()[0]
    if reason := deepspeed_shm.missing(ranks):
        found["deepspeed"] = reason
    return found


def launch(plan: Plan, deadline_s: float) -> Times:
    """Runs the ranks once; by case and name the time of every call's slowest rank.

    Raises:
        ValueError: a rank failed, or did not end in time.
    """
    memory = SharedMemory(create=True, size=HEAD_BYTES + plan.ranks * LARGEST_BYTES)
    try:
        with tempfile.TemporaryDirectory(prefix="cpudist-bench-") as folder:
            plan.memory, plan.path = memory.name, str(Path(folder) / "store")
            return join(run_ranks(plan, deadline_s))
    finally:
        memory.close()
        memory.unlink()
        deepspeed_shm.remove_memory(memory.name)


def run_ranks(plan: Plan, deadline_s: float) -> list[Times]:
    """What every rank measured; when it returns, all have ended."""
    method = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    try:
        for rank in range(plan.ranks):
            ours, theirs = method.Pipe(duplex=False)
            process = method.Process(
                target=allreduce_worker.run_rank, args=(plan, rank, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return receive(pipes, deadline_s)
    finally:
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()


def receive(pipes: list[Any], deadline_s: float) -> list[Times]:
    found = []
    for rank, pipe in enumerate(pipes):
        if not wait([pipe], deadline_s):
            raise ValueError(f"allreduce: rank {rank} did not end in {deadline_s:g} s")
        try:
            found.append(pipe.recv())
        except EOFError:
            raise ValueError(f"allreduce: rank {rank} failed, see above") from None
    return found


def join(of_ranks: list[Times]) -> Times:
    return {
        case: {
            name: [max(calls) for calls in zip(*(r[case][name] for r in of_ranks))]  # noqa: B905
            for name in names
        }
        for case, names in of_ranks[0].items()
    }


def rows_of(case: tuple[str, str, int], times: dict[str, list[float]]) -> Iterable[Row]:
    collective, dtype, size = case
    gloo = times["gloo"]
    user = [min(times[name]) for name in USER_LIMITS if name in times]
    shared = times.get("limit: shared tensors")
    for name, taken in times.items():
        limit = min(user) if user else None
        if "shared tensors" in name:
            limit = min(shared) if shared else None
        yield {
            "case": "allreduce",
            "name": f"{collective} {dtype} {size >> 10} KB: {name}",
            "collective": collective,
            "dtype": dtype,
            "size_bytes": size,
            "implementation": name,
            "us": median(taken),
            "us_min": min(taken),
            "calls": len(taken),
            "ratio": median(gloo) / median(taken),
            "ratio_min": min(gloo) / min(taken),
            "limit_ratio": min(taken) / limit if limit else None,
        }


def run(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Measures for ``args.seconds`` in each of ``args.launches`` launches."""
    missing = missing_backends(args.trainers)
    plan = Plan(
        ranks=args.trainers,
        collectives=args.collectives or list(COLLECTIVES[:1]),
        sizes=[int(size) for size in args.sizes] or list(SIZES),
        dtypes=["f32", "bf16"],
        backends=["gloo", "shm", *(["ccl"] if "ccl" not in missing else [])],
        deepspeed="deepspeed" not in missing,
        seconds=args.seconds,
        path="",
        memory="",
    )
    unknown = set(plan.collectives) - set(COLLECTIVES)
    if unknown or max(plan.sizes) > LARGEST_BYTES:
        raise ValueError(
            f"allreduce: expected --collectives of {', '.join(COLLECTIVES)} and sizes "
            f"up to {LARGEST_BYTES} bytes, found {sorted(unknown)}, {plan.sizes}"
        )
    all_times: Times = {}
    for _ in range(args.launches):
        for case, times in launch(plan, args.seconds + args.deadline_s).items():
            known = all_times.setdefault(case, {name: [] for name in times})
            for name, taken in times.items():
                known[name] += taken
    for case, times in all_times.items():
        yield from rows_of(case, times)
    for name, reason in missing.items():
        yield {"case": "allreduce", "name": name, MISSING: reason}
