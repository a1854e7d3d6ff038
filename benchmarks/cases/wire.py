# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``wire``: bytes per sample of pulls and pushes of rows, and what coding costs.

One trainer looks rows of the data of ``ctr`` up and pushes a gradient for each, under
Sync, to a server in the same process: CPU time is that of both ends and of no socket.
``bound`` is what must travel in the row's dtypes: every distinct row once each way, and
its key once at log2(N/U) + 1.44 bits. ``ns/byte saved`` is the CPU time that coding
takes beside ``fp32, plain``; a link of 1 Gbit/s takes 8 ns for a byte.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from typing import Any

import ctr_data
import numpy as np
import torch
from report import Row
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.testing import run_ranks

COLUMNS = {
    "name": "push / pull",
    "rows_per_step": "rows/step",
    "bytes_per_sample": "bytes/sample",
    "bound": "bound",
    "ratio": "ratio",
    "cpu_us_per_sample": "CPU us/sample",
    "ns_per_byte": "ns/byte saved",
}
STEPS = 30
_ROW_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0}
_SCALE_BYTES = 2
CASES = (
    ("fp32", "fp32", False),
    ("fp32", "fp32", True),
    ("bf16", "bf16", True),
    ("int8", "bf16", True),
    ("int8", "fp16", True),
)


def _batches(args: argparse.Namespace, steps: int) -> list[torch.Tensor]:
    spec = ctr_data.CtrSpec(train_samples=args.batch * steps, test_samples=1)
    drawn = ctr_data.Generator(spec).draw("train", spec.train_samples)[0].ids
    return list(torch.from_numpy(drawn.astype(np.int64)).split(args.batch))


def _bound(rows: float, table: int, dim: int, push: str, pull: str) -> float:
    """Bytes of a step in which ``rows`` of ``table`` travel both ways."""
    values = dim * (_ROW_BYTES[push] + _ROW_BYTES[pull])
    scale = _SCALE_BYTES if push == "int8" else 0
    return rows * (values + scale + (math.log2(table / rows) + 1.44) / 8)


def _measure(
    args: argparse.Namespace, batches: list[torch.Tensor], case: tuple[str, str, bool]
) -> dict[str, float]:
    push, pull, coded = case
    rows = ctr_data.CtrSpec().rows
    communicator = {"wire_dtype": push, "pull_dtype": pull}
    gradient = torch.randn(args.batch * 26, args.dim)

    def train(context: cpudist.Context) -> dict[str, float]:
        table = nn.Embedding(rows, args.dim, sparse=True)
        optimizer = cpudist.DistributedOptimizer(
            torch.optim.Adagrad(table.parameters(), lr=0.01),
            table,
            strategy=cpudist.Sync(communicator=communicator),
        )
        client = context.trainer_client()
        seen = 0
        for step, ids in enumerate(batches):
            if step == args.warmup_steps:
                before, began = client.stats(), time.process_time()
            table(ids.flatten())
            table.weight.grad = torch.sparse_coo_tensor(
                ids.view(1, -1), gradient, table.weight.shape, check_invariants=False
            )
            optimizer.step()
            if step >= args.warmup_steps:
                seen += len(ids.unique())
        took, after = time.process_time() - began, client.stats()
        moved = sum(after[k] - before[k] for k in ("bytes_sent", "bytes_received"))
        steps = len(batches) - args.warmup_steps
        optimizer.close()
        return {"bytes": moved / steps, "cpu_s": took / steps, "rows": seen / steps}

    # Float32 is coded where bytes cross a network, which a plan of faults stands for;
    # this one has none to show.
    plan = _core.FaultPlan(delay=1e-12, delay_ms_max=1, seed=1)
    alone = coded and push == pull == "fp32"
    network = _core.InprocNetwork(plan) if alone else _core.InprocNetwork()
    variables = {"CPUDIST_THREADS": "1"}
    found: Any = run_ranks(train, 1, servers=1, variables=variables, network=network)
    return dict(found[0])


def run(args: argparse.Namespace) -> Iterable[Row]:
    """Yields a row per pair of dtypes."""
    table = ctr_data.CtrSpec().rows
    batches = _batches(args, args.warmup_steps + (args.steps or STEPS))
    plain: dict[str, float] = {}
    for case in CASES:
        found = _measure(args, batches, case)
        plain = plain or found
        push, pull, coded = case
        bound = _bound(found["rows"], table, args.dim, push, pull)
        saved = plain["bytes"] - found["bytes"]
        yield {
            "case": "wire",
            "name": f"{push} / {pull}" + ("" if coded else ", plain"),
            "rows_per_step": found["rows"],
            "bytes_per_sample": found["bytes"] / args.batch,
            "bound": bound / args.batch,
            "ratio": found["bytes"] / bound,
            "cpu_us_per_sample": 1e6 * found["cpu_s"] / args.batch,
            "ns_per_byte": 1e9 * (found["cpu_s"] - plain["cpu_s"]) / saved
            if saved > 0
            else None,
        }
