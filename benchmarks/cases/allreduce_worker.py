# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One rank of the case ``allreduce``: every implementation in turn, in one process.

Before each call the ranks meet at a counter in shared memory, so that a call's time is
its own and not the others' delay.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import torch
import torch.distributed as dist
from peers import deepspeed_shm

from torch_cpudist.backends import shm

TIMEOUT = timedelta(seconds=120)
LARGEST_BYTES = 64 << 20
# Bytes between the counters of two ranks, and in front of their data.
COUNTER_BYTES, HEAD_BYTES = 128, 4096
CHUNK_BYTES = 256 << 10
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

Step = Callable[[], object]


@dataclass
class Plan:
    """What one launch measures."""

    ranks: int
    collectives: list[str]
    sizes: list[int]
    dtypes: list[str]
    backends: list[str]
    seconds: float
    deepspeed: bool
    path: str
    memory: str


class Meeting:
    """Counters and buffers of the limits, in shared memory made by the parent."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank, self.ranks = rank, plan.ranks
        self._memory = SharedMemory(plan.memory)
        self.bytes = np.frombuffer(self._memory.buf, dtype=np.uint8)
        self._counters = [
            self.bytes[r * COUNTER_BYTES : r * COUNTER_BYTES + 8].view(np.int64)
            for r in range(plan.ranks)
        ]
        self._count = 0
        self._spins = plan.ranks <= len(os.sched_getaffinity(0)) or plan.ranks <= (
            os.cpu_count() or 1
        )

    def meet(self) -> None:
        self._count += 1
        self._counters[self.rank][0] = self._count
        for counter in self._counters:
            while counter[0] < self._count:
                if not self._spins:
                    os.sched_yield()

    def buffer(self, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that all ranks see, one for each rank."""
        begin = HEAD_BYTES + rank * LARGEST_BYTES
        part = self.bytes[begin : begin + numel * dtype.itemsize]
        return torch.from_numpy(part).view(dtype)

    def close(self) -> None:
        self._counters, self.bytes = [], np.zeros(0)


def limits(meeting: Meeting, own: torch.Tensor) -> dict[str, Step]:
    """All-reduce of two ranks with nothing but copies, sums and counters."""
    rank, numel, dtype = meeting.rank, own.numel(), own.dtype
    mine = meeting.buffer(rank, numel, dtype)
    theirs = meeting.buffer(1 - rank, numel, dtype)
    chunk = CHUNK_BYTES // dtype.itemsize

    def one_shot() -> None:
        mine.copy_(own)
        meeting.meet()
        own.add_(theirs)

    parts = [
        (
            own[a : a + chunk],
            slice(i % 2 * chunk, i % 2 * chunk + min(chunk, numel - a)),
        )
        for i, a in enumerate(range(0, numel, chunk))
    ]

    def chunked() -> None:
        for part, place in parts:
            mine[place].copy_(part)
            meeting.meet()
            part.add_(theirs[place])

    half = slice(0, numel // 2) if rank == 0 else slice(numel // 2, numel)

    def zero_copy() -> None:
        mine[half].add_(theirs[half])
        theirs[half].copy_(mine[half])
        meeting.meet()

    found = {"limit: one copy": one_shot, "limit: shared tensors": zero_copy}
    if numel > 2 * chunk:
        found["limit: chunks"] = chunked
    return found


def call_of(
    collective: str, group: dist.ProcessGroup, numel: int, dtype: torch.dtype, n: int
) -> Step:
    """A call of ``numel`` elements on each rank, as the largest side has them."""
    whole = torch.ones(numel, dtype=dtype)
    part = torch.ones(numel // n, dtype=dtype)
    out = torch.empty(numel // n * n, dtype=dtype)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, out, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(out, part, group=group),
        "all_to_all": lambda: dist.all_to_all_single(
            out, whole[: out.numel()], group=group
        ),
    }[collective]


def steps_of(
    plan: Plan,
    meeting: Meeting,
    groups: dict[str, dist.ProcessGroup],
    collective: str,
    numel: int,
    dtype: torch.dtype,
) -> dict[str, Step]:
    steps = {
        name: call_of(collective, group, numel, dtype, plan.ranks)
        for name, group in groups.items()
    }
    if collective == "all_reduce":
        shared = shm.empty(groups["shm"], numel, dtype)
        steps["shm, shared tensors"] = lambda: dist.all_reduce(
            shared, group=groups["shm"]
        )
        if plan.deepspeed:
            theirs = torch.ones(numel, dtype=dtype)
            steps["deepspeed"] = lambda: deepspeed_shm.all_reduce(theirs)
        if plan.ranks == 2:
            steps.update(limits(meeting, torch.ones(numel, dtype=dtype)))
    return steps


def measure(
    meeting: Meeting, steps: dict[str, Step], turns: int, orders: random.Random
) -> dict[str, list[float]]:
    """Microseconds per call of each implementation, taken in turns.

    Every turn has an order of its own, which ``orders`` draws, the same on all ranks: a
    call after one whose threads sleep or whose tensors fill the caches is slower.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for turn in range(turns + 2):
        orders.shuffle(order)
        for name in order:
            meeting.meet()
            begin = time.perf_counter()
            steps[name]()
            if turn >= 2:
                times[name].append(1e6 * (time.perf_counter() - begin))
    return times


def cases_of(plan: Plan) -> Iterator[tuple[str, str, int]]:
    for collective in plan.collectives:
        for dtype in plan.dtypes:
            for size in plan.sizes:
                yield collective, dtype, size


def turns_of(size_bytes: int, seconds: float) -> int:
    """So many turns as fit, if all implementations together move 1 GB/s."""
    return max(5, min(400, int(seconds * 1e9 / (8 * size_bytes + 4_000_000))))


def run_rank(plan: Plan, rank: int, pipe: Connection) -> None:
    """What one rank's process runs; sends ``{case: {name: times}}`` or a text."""
    cores = sorted(os.sched_getaffinity(0))
    meeting = Meeting(plan, rank)
    if plan.ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    store = dist.FileStore(plan.path, plan.ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=plan.ranks, timeout=TIMEOUT
    )
    groups = {
        name: dist.new_group(backend=name, timeout=TIMEOUT) for name in plan.backends
    }
    if plan.deepspeed:
        deepspeed_shm.join(rank, plan.ranks, plan.memory)
        dist.barrier()
        deepspeed_shm.check(plan.ranks)
    cases = list(cases_of(plan))
    found = {}
    for case in cases:
        collective, name, size = case
        dtype = DTYPES[name]
        numel = size // dtype.itemsize
        steps = steps_of(plan, meeting, groups, collective, numel, dtype)
        turns = turns_of(size, plan.seconds / len(cases))
        # The name of the memory is another in every launch.
        orders = random.Random(f"{plan.memory} {case}")
        found[case] = measure(meeting, steps, turns, orders)
    pipe.send(found)
    meeting.close()
    dist.barrier()
    dist.destroy_process_group()
