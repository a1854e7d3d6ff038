# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranks of backend shm as processes, and the values that they exchange."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from patience import PATIENCE, PATIENCE_S

Tell = Callable[[Any], None]
TIMEOUT = PATIENCE
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
# One of each way that a message takes: copied, copied in one piece, in several.
COUNTS = (1, 333, 40_001)
LARGE = 600_003


def segments() -> list[str]:
    """Shared memory of the backend that this process has mapped or open."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = [line.split(maxsplit=5)[-1] for line in lines]
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of this listing
            names.append(os.readlink(f"/proc/self/fd/{entry}"))
    return [name for name in names if name.startswith("/memfd:cpudist")]


def _body(
    fn: Callable[[int, int, Tell], Any],
    rank: int,
    size: int,
    path: str,
    pipe: Connection,
) -> None:
    def tell(kind: str, value: Any) -> None:
        told = {"kind": kind, "value": value, "time_s": time.monotonic()}
        pipe.send_bytes(json.dumps(told).encode())

    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "shm",
            store=dist.FileStore(path, size),
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
        )
        assert segments(), "memory of the group is not where it is looked for"
        value = fn(rank, size, lambda value: tell("report", value))
        dist.destroy_process_group()
        tell("result", value)
    except BaseException as error:
        text = f"{error}\n{traceback.format_exc()}"
        tell("error", {"type": type(error).__name__, "text": text})
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # modules that are wrapped refer to themselves, and to a group
    tell("left", segments())


class Ranks:
    """Ranks as processes; whoever still runs is ended with the block."""

    def __init__(self, fn: Callable[..., Any], size: int, folder: Path) -> None:
        method = multiprocessing.get_context("forkserver")
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = method.Pipe(duplex=False)
            arguments = (fn, rank, size, str(folder / "store"), theirs)
            process = method.Process(target=_body, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def expect(self, rank: int, kind: str, timeout_s: float = 60.0) -> dict[str, Any]:
        assert self.pipes[rank].poll(timeout_s), f"rank {rank}: no {kind}"
        told = json.loads(self.pipes[rank].recv_bytes())
        assert told["kind"] == kind, f"rank {rank}: {told}"
        return told

    def results(self) -> list[Any]:
        """Those of all ranks, once nobody has anything of the backend any more."""
        found = [self.expect(r, "result")["value"] for r in range(len(self.pipes))]
        for rank in range(len(self.pipes)):
            self.check_left(rank)
        return found

    def check_left(self, rank: int) -> None:
        """After its result or error a rank has no shared memory of its groups."""
        assert self.expect(rank, "left")["value"] == [], f"rank {rank}"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()  # nothing to a process that has ended
            process.join(PATIENCE_S)


# -- values ------------------------------------------------------------------------


@functools.cache
def values_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Not to be written."""
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(dtype)
    low = 0 if dtype == torch.uint8 else -100
    return torch.randint(low, 100, (count,), generator=generator).to(dtype)


def reduced(op: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks, and rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
        wide = torch.int64  # averages of integers do not wrap
    total = parts[0].to(wide)
    for part in (part.to(wide) for part in parts[1:]):
        total = {
            dist.ReduceOp.SUM: torch.add,
            dist.ReduceOp.AVG: torch.add,
            dist.ReduceOp.PRODUCT: torch.mul,
            dist.ReduceOp.MIN: torch.minimum,
            dist.ReduceOp.MAX: torch.maximum,
            dist.ReduceOp.BAND: torch.bitwise_and,
            dist.ReduceOp.BOR: torch.bitwise_or,
            dist.ReduceOp.BXOR: torch.bitwise_xor,
        }[op](total, part)
    if op == dist.ReduceOp.AVG:
        whole = not dtype.is_floating_point
        total = total.div(len(parts), rounding_mode="trunc" if whole else None)
    return total.to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        raise AssertionError(f"{what}: found {found}, expected {expected}")


def ops_of(dtype: torch.dtype) -> list[Any]:
    op = dist.ReduceOp
    plain = [op.SUM, op.PRODUCT, op.MIN, op.MAX]
    if dtype.is_floating_point:
        return [*plain, op.AVG]
    return [*plain, op.AVG, op.BAND, op.BOR, op.BXOR]
