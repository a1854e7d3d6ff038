# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``kernels``: every op beside torch's, FBGEMM's and the memory's limit.

The batch is that of the case ``ctr``. Implementations of an op take turns, each on
another batch, on one thread; figures are medians. ``bytes`` is what the op must read
and write at least; its share of the memory's copy bandwidth, measured in the same run,
may exceed 1 where the batch stays in cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from ctr_data import CtrSpec, zipf_cdf
from report import MISSING, Row

from cases.embedding_path import EmbeddingPath
from torch_cpudist import _core, ops
from torch_cpudist.rules.read import read_group

COLUMNS = {
    "name": "name",
    "us": "us",
    "us_min": "min",
    "us_max": "max",
    "ratio_us": "time / ours",
    "gb_per_s": "GB/s",
    "share_of_bandwidth": "of memory",
}
BATCHES = 16
LEAST_TURNS = 10
COPY_BYTES = 256 * 2**20
KEY_BYTES = 8
DENSE_SHAPE = (429, 400)
EPS = 1e-10

Step = Callable[[int], object]


@dataclass
class Op:
    """One op: ``ours`` first, then others, each a function of the batch number."""

    name: str
    size_bytes: float
    steps: dict[str, Step]
    missing: dict[str, str] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


@dataclass
class Workload:
    """Batches of the ctr case, their distinct keys, and rows to work on."""

    keys: list[torch.Tensor]
    unique: list[torch.Tensor]
    grads: torch.Tensor
    table: torch.Tensor
    state: torch.Tensor
    lr: float

    @property
    def dim(self) -> int:
        return self.table.shape[1]

    @property
    def row_bytes(self) -> int:
        return 4 * self.dim

    @property
    def n(self) -> int:
        return self.keys[0].numel()

    @property
    def u(self) -> float:
        return sum(keys.numel() for keys in self.unique) / len(self.unique)


def make_workload(args: argparse.Namespace, spec: CtrSpec) -> Workload:
    """Draws Zipf keys over one table, frequent ones scattered, as hashed ids are."""
    generator = torch.Generator().manual_seed(spec.seed)
    cdf = torch.from_numpy(zipf_cdf(spec.rows, spec.exponent))
    places = torch.randperm(spec.rows, generator=generator)
    n = args.batch * spec.slots
    keys = []
    for _ in range(BATCHES):
        drawn = torch.rand(n, generator=generator, dtype=torch.float64)
        ranks = torch.searchsorted(cdf, drawn).clamp_(max=spec.rows - 1)
        keys.append(places[ranks])
    return Workload(
        keys=keys,
        unique=[ops.dedupe_keys(batch)[0] for batch in keys],
        grads=torch.randn(n, args.dim, generator=generator) / n,
        table=torch.randn(spec.rows, args.dim, generator=generator) * 0.01,
        state=torch.zeros(spec.rows, args.dim),
        lr=args.lr,
    )


def dedupe_op(work: Workload) -> Op:
    return Op(
        "dedupe",
        work.n * 2 * KEY_BYTES + work.u * KEY_BYTES,
        {
            "ours": lambda i: ops.dedupe_keys(work.keys[i]),
            "torch.unique": lambda i: torch.unique(work.keys[i], return_inverse=True),
        },
    )


def sparse_grad(work: Workload, i: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        work.keys[i][None], work.grads, work.table.shape, check_invariants=False
    )


def sum_op(work: Workload) -> Op:
    def unique_index_add(i: int) -> torch.Tensor:
        unique, inverse = torch.unique(work.keys[i], return_inverse=True)
        sums = torch.zeros(unique.numel(), work.dim)
        return sums.index_add_(0, inverse, work.grads)

    return Op(
        "dedupe + segment sum",
        work.n * (KEY_BYTES + work.row_bytes) + work.u * (KEY_BYTES + work.row_bytes),
        {
            "ours": lambda i: ops.dedupe_segment_sum(work.keys[i], work.grads),
            "torch coalesce": lambda i: sparse_grad(work, i).coalesce(),
            "torch.unique + index_add_": unique_index_add,
        },
    )


def partition_op(work: Workload) -> Op:
    parts = 4
    owner = torch.arange(ops.BUCKET_COUNT) % parts

    def sort(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Without the hash, which torch has no op for.
        owners = owner[work.unique[i] % ops.BUCKET_COUNT]
        return torch.argsort(owners, stable=True), torch.bincount(owners).cumsum(0)

    return Op(
        "partition by bucket",
        work.u * 2 * KEY_BYTES,
        {
            "ours": lambda i: ops.partition_keys(work.unique[i], owner, 1, parts),
            "torch.argsort": sort,
        },
    )


def gather_op(work: Workload) -> Op:
    return Op(
        "gather rows",
        work.u * (KEY_BYTES + 2 * work.row_bytes),
        {
            "ours": lambda i: ops.gather_rows(work.table, work.unique[i]),
            "torch.index_select": lambda i: work.table.index_select(0, work.unique[i]),
        },
    )


def scatter_op(work: Workload) -> Op:
    target = torch.zeros_like(work.table)
    rows = [work.grads[: keys.numel()] for keys in work.unique]
    return Op(
        "scatter rows",
        work.u * (KEY_BYTES + 2 * work.row_bytes),
        {
            "ours": lambda i: ops.scatter_rows(target, work.unique[i], rows[i]),
            "torch.index_copy_": lambda i: target.index_copy_(
                0, work.unique[i], rows[i]
            ),
        },
    )


def adagrad(work: Workload, weight: torch.Tensor) -> torch.optim.Adagrad:
    return torch.optim.Adagrad([weight], lr=work.lr, eps=EPS)


def read_config(optimizer: torch.optim.Optimizer) -> _core.OptimizerConfig:
    return read_group(optimizer, optimizer.param_groups[0])


def update_op(work: Workload) -> Op:
    """Gradient of a batch, duplicates included, into table and Adagrad state."""
    theirs = torch.nn.Parameter(work.table.clone())
    optimizer = adagrad(work, theirs)
    config = read_config(optimizer)

    def ours(i: int) -> None:
        unique, sums = ops.dedupe_segment_sum(work.keys[i], work.grads)
        ops.update_rows(work.table, work.state, unique, sums, config, step=1)

    def torch_step(i: int) -> None:
        theirs.grad = sparse_grad(work, i)
        optimizer.step()

    op = Op(
        "sum + Adagrad on rows",
        work.n * (KEY_BYTES + work.row_bytes) + work.u * 4 * work.row_bytes,
        {"ours": ours, "torch.optim.Adagrad": torch_step},
    )
    try:
        op.steps["FBGEMM backward"] = fbgemm_step(work)
    except ImportError as error:
        op.missing["FBGEMM backward"] = f"not importable: {error}"
    return op


def fbgemm_step(work: Workload) -> Step:
    """Returns the backward of FBGEMM's embedding, which applies Adagrad at once.

    Raises:
        ImportError: FBGEMM is not installed.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(*work.table.shape, *place)],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=work.lr,
        eps=EPS,
        weights_precision=SparseType.FP32,
    )
    offsets = torch.arange(work.n + 1)
    outputs = [tables(keys, offsets) for keys in work.keys]
    return lambda i: outputs[i].backward(work.grads, retain_graph=True)


def dense_op() -> Op:
    """Adam on the ctr case's first layer; torch without and with its fused kernel."""
    grad = torch.randn(DENSE_SHAPE) / 100

    def torch_step(fused: bool) -> Step:
        weight = torch.nn.Parameter(torch.randn(DENSE_SHAPE))
        weight.grad = grad.clone()
        optimizer = torch.optim.Adam([weight], fused=fused)
        return lambda i: optimizer.step()

    weight = torch.randn(DENSE_SHAPE)
    config = read_config(torch.optim.Adam([torch.nn.Parameter(weight)]))
    state = torch.zeros(_core.state_elements(config, weight.numel(), DENSE_SHAPE[1]))
    return Op(
        "Adam on a dense layer",
        7 * 4 * weight.numel(),
        {
            "ours": lambda i: ops.update_dense(weight, state, grad, config, step=i + 1),
            "torch.optim.Adam": torch_step(fused=False),
            "torch.optim.Adam(fused)": torch_step(fused=True),
        },
    )


def path_op(work: Workload) -> Op:
    """A whole step of a table: rows to the trainer, gradients to the server."""
    optimizer = adagrad(work, torch.nn.Parameter(work.table))
    path = EmbeddingPath(work.table, read_config(optimizer))
    others = update_op(work)

    def ours(i: int) -> None:
        path.pull(work.keys[i])
        path.push(work.keys[i], work.grads)

    def torch_step(i: int) -> None:
        work.table.index_select(0, work.keys[i])
        others.steps["torch.optim.Adagrad"](i)

    return Op(
        "pull + push without transport",
        work.n * (KEY_BYTES + work.row_bytes) + work.u * 6 * work.row_bytes,
        {"ours": ours, "torch lookup + Adagrad": torch_step},
        close=path.close,
    )


def measure(op: Op, seconds: float, warmup: int) -> dict[str, list[float]]:
    """Returns microseconds per call of each implementation, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in op.steps}
    steps = list(op.steps.items())
    turn, end = 0, float("inf")
    while turn < warmup + LEAST_TURNS or time.perf_counter() < end:
        if turn == warmup:
            end = time.perf_counter() + seconds
        # Nobody finds in cache the rows that the one before it has just touched.
        for place in range(len(steps)):
            at = (turn + place) % len(steps)
            name, step = steps[at]
            begin = time.perf_counter()
            step((turn + BATCHES // len(steps) * at) % BATCHES)
            if turn >= warmup:
                times[name].append(1e6 * (time.perf_counter() - begin))
        turn += 1
    return times


def copy_gb_per_s(seconds: float) -> float:
    """Returns the bandwidth of a large copy on one thread, reads plus writes."""
    source, target = torch.ones(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)
    op = Op("copy", 0, {"copy": lambda i: target.copy_(source)})
    return 2 * COPY_BYTES / 1e3 / min(measure(op, seconds, warmup=2)["copy"])


def rows_of(op: Op, times: dict[str, list[float]], limit: float) -> Iterable[Row]:
    """Yields one row per implementation of an op."""
    ours = median(times["ours"])
    for name, taken in times.items():
        us = median(taken)
        rate = op.size_bytes / us / 1e3
        yield {
            "case": "kernels",
            "name": f"{op.name}: {name}",
            "op": op.name,
            "implementation": name,
            "us": us,
            "us_min": min(taken),
            "us_max": max(taken),
            "turns": len(taken),
            "ratio_us": us / ours,
            "bytes": op.size_bytes,
            "gb_per_s": rate,
            "share_of_bandwidth": rate / limit,
            "simd": _core.simd_level(),
        }
    for name, reason in op.missing.items():
        yield {"case": "kernels", "name": f"{op.name}: {name}", MISSING: reason}


def run(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Measures every op for its share of ``args.seconds``, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # torch's sparse Adagrad warns unless the check is switched off by name.
    torch.sparse.check_sparse_tensor_invariants.disable()
    try:
        work = make_workload(args, CtrSpec())
        makers: list[Callable[[], Op]] = [
            *(lambda f=f: f(work) for f in (dedupe_op, sum_op, partition_op)),
            *(lambda f=f: f(work) for f in (gather_op, scatter_op, update_op)),
            dense_op,
            lambda: path_op(work),
        ]
        share = args.seconds / (len(makers) + 1)
        limit = copy_gb_per_s(share)
        yield {
            "case": "kernels",
            "name": "memory: copy",
            "gb_per_s": limit,
            "share_of_bandwidth": 1.0,
        }
        for make in makers:
            op = make()
            try:
                times = measure(op, share, args.warmup_steps)
            finally:
                op.close()
            yield from rows_of(op, times, limit)
    finally:
        torch.set_num_threads(threads)
