# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``inference``: lookups in exported tables beside ``nn.Embedding``.

An export of ``--table-rows`` rows of hashed keys is made in ``--folder`` for each dtype
of rows (``--rows``), loaded into a remote ``nn.Embedding`` and looked up by batches of
Zipf ids and of uniform ones, beside an ``nn.Embedding`` of as many rows in memory, on
one thread and in turns. ``open`` is what ``load_for_inference`` takes; ``first`` a pass
over all chunks of the files, which checks them. One process; files are removed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from cases.rows import zipf_batches
from report import Row
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.exports.encoding import DTYPES
from torch_cpudist.exports.manifest import Manifest, Table
from torch_cpudist.exports.pieces import by_bucket
from torch_cpudist.exports.writing import PART_BYTES, Writer, new_id
from torch_cpudist.snapshot.merging import Run
from torch_cpudist.snapshot.names import BUCKETS, server_buckets

COLUMNS = {
    "name": "name",
    "rows": "rows",
    "bytes": "bytes",
    "open_s": "open s",
    "first_s": "first s",
    "zipf_ns": "Zipf ns/id",
    "uniform_ns": "uniform ns/id",
    "missing_ns": "no row ns/id",
}
BATCHES = 16
# Keys are drawn out of as many times the rows, as hashed ones are.
SPREAD = 64


def keys_of(numbers: torch.Tensor, rows: int) -> torch.Tensor:
    """A key of its own for each of 0 to rows - 1, spread over the table."""
    return numbers * SPREAD + numbers * 37 % SPREAD


def _runs(table: Table, rows: int) -> Iterator[Run]:
    numbers = torch.arange(rows)
    keys, buckets = by_bucket(keys_of(numbers, rows).numpy(), table.salt)
    steps = max(1, rows * (8 + 4 * table.dim) // PART_BYTES)
    steps = min(steps, BUCKETS)
    generator = np.random.default_rng(1)
    for step in range(steps):
        first, last = server_buckets(step, steps)
        begin, end = np.searchsorted(buckets, [first, last])
        weight = generator.standard_normal((end - begin, table.dim), np.float32)
        layers = np.zeros(end - begin, np.int64)
        columns = {"weight": weight}
        yield Run(first, last, keys[begin:end], buckets[begin:end], layers, columns)


def _export(folder: Path, rows: int, dim: int, dtype: str) -> int:
    """Writes one; returns its bytes."""
    initial = (("normal", 0.0, 0.01),)
    table = Table("weight", rows * SPREAD, dim, 1, initial, ())
    writer = Writer(folder, Manifest(new_id(), dtype, tables=(table,)))
    writer.add_table(0, _runs(table, rows))
    writer.add_model({})
    return sum(file.bytes for file in writer.commit().files)


def _ns(
    look_up: Callable[[torch.Tensor], torch.Tensor], ids: list[torch.Tensor]
) -> float:
    """Nanoseconds of an id, of this thread's own time: the median over batches."""
    took = []
    with torch.inference_mode():
        for batch in ids:
            look_up(batch[: len(batch) // 8])
            began = time.thread_time()
            look_up(batch)
            took.append((time.thread_time() - began) / len(batch))
    return 1e9 * statistics.median(took)


def _uniform(rows: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(rows, (size,), generator=generator) for _ in range(BATCHES)]


def _embedding(rows: int, dim: int) -> Row:
    table = nn.Embedding.from_pretrained(torch.randn(rows, dim))
    zipf = zipf_batches(rows, BATCHES, seed=1)
    return {
        "case": "inference",
        "name": "nn.Embedding",
        "rows": rows,
        "bytes": 4 * rows * dim,
        "zipf_ns": _ns(table, zipf),
        "uniform_ns": _ns(table, _uniform(rows, len(zipf[0]))),
    }


def _exported(folder: Path, rows: int, dim: int, dtype: str) -> Row:
    size = _export(folder, rows, dim, dtype)
    with cpudist.remote_tables(min_rows=1):
        table = nn.Embedding(rows * SPREAD, dim)
    began = time.perf_counter()
    with cpudist.load_for_inference(table, folder) as reader:
        opened = time.perf_counter()
        reader.verify()
        first = time.perf_counter()
        zipf = zipf_batches(rows, BATCHES, seed=1)
        uniform = _uniform(rows, len(zipf[0]))
        known = [keys_of(batch, rows) for batch in zipf]
        others = [keys_of(batch, rows) for batch in uniform]
        generator = torch.Generator().manual_seed(3)
        space = (rows * SPREAD,)
        absent = [
            torch.randint(*space, (len(zipf[0]),), generator=generator)
            for _ in range(BATCHES)
        ]
        return {
            "case": "inference",
            "name": f"exported {dtype}",
            "rows": rows,
            "bytes": size,
            "open_s": opened - began,
            "first_s": first - opened,
            "zipf_ns": _ns(table, known),
            "uniform_ns": _ns(table, others),
            "missing_ns": _ns(table, absent),
        }


def run(args: argparse.Namespace) -> Iterable[Row]:
    """Yields a row per way to look up."""
    torch.set_num_threads(1)
    wanted = args.rows or ["embedding", *DTYPES]
    unknown = sorted(set(wanted) - {"embedding", *DTYPES})
    if unknown:
        known = ", ".join(["embedding", *DTYPES])
        raise ValueError(f"--rows: expected some of {known}, found {unknown}")
    parent = Path(args.folder or "build")
    parent.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        if name == "embedding":
            yield _embedding(args.table_rows, args.dim)
            continue
        folder = Path(tempfile.mkdtemp(prefix="inference-", dir=parent))
        try:
            yield _exported(folder, args.table_rows, args.dim, name)
        finally:
            shutil.rmtree(folder)
