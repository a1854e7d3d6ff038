# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One process of the case ``reader``: reads a file and prints what it took."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "criteo"), str(ROOT / "benchmarks")]

from usage import peak_rss_mb, rss_mb  # noqa: E402

CHUNK_ROWS = 50_000
HASH_RANGE = 100_000


def prepare(folder: Path, rows: int) -> None:
    """Writes the Criteo file and the same records as MultiSlot lines."""
    import criteo_data

    folder.mkdir(parents=True, exist_ok=True)
    criteo, multislot = files(folder, rows)
    if not criteo.is_file():
        criteo_data.write(criteo, rows, seed=3)
    if multislot.is_file():
        return
    partial = multislot.with_suffix(".partial")
    with criteo.open() as lines, partial.open("w") as out:
        for line in lines:
            label, *cells = line.rstrip("\n").split("\t")
            numbers = " ".join(cell or "0" for cell in cells[:13])
            ids = " ".join(f"1 {int(cell, 16)}" if cell else "0" for cell in cells[13:])
            out.write(f"1 {label} 13 {numbers} {ids}\n")
    partial.replace(multislot)


def files(folder: Path, rows: int) -> tuple[Path, Path]:
    """The Criteo file and the MultiSlot file."""
    return folder / f"criteo-{rows}.tsv", folder / f"multislot-{rows}.txt"


def ours(path: Path, batch: int, threads: int, kind: str) -> Iterator[int]:
    """Rows of batch after batch of our readers."""
    from torch_cpudist.data import InMemoryDataset, QueueDataset, Slot, criteo_slots

    slots, format_name = criteo_slots(HASH_RANGE), "criteo"
    if kind == "multislot":
        format_name = "multislot"
        slots = [Slot("label", "dense"), Slot("dense", "dense", dim=13)]
        slots += [Slot(f"C{number}") for number in range(1, 27)]
    options = {"format": format_name, "batch_size": batch, "threads": threads}
    if kind == "in memory":
        memory = InMemoryDataset([path], slots, **options)
        memory.load()
        memory.local_shuffle(seed=1)
        yield from (len(found["label"]) for found in memory)
        return
    dataset = QueueDataset([path], slots, **options)
    yield from (len(found["label"]) for found in dataset)


def polars(path: Path, batch: int) -> Iterator[int]:
    import polars as pl
    import torch

    names = [f"c{number}" for number in range(40)]
    frame = pl.read_csv(
        path,
        separator="\t",
        has_header=False,
        new_columns=names,
        schema_overrides=[pl.Float32] * 14 + [pl.Utf8] * 26,
    ).select(
        pl.col(names[0]).cast(pl.Float32),
        *(pl.col(name).fill_null(0).cast(pl.Float32) for name in names[1:14]),
        *(
            pl.col(name).str.to_integer(base=16, strict=False).fill_null(0)
            for name in names[14:]
        ),
    )
    dense = torch.from_numpy(frame.select(names[:14]).to_numpy())
    ids = torch.from_numpy(frame.select(names[14:]).to_numpy())
    for part, _ in zip(dense.split(batch), ids.split(batch), strict=True):
        yield len(part)


def pandas(path: Path, batch: int) -> Iterator[int]:
    import pandas as pd
    import torch

    kinds = {column: "float32" for column in range(14)}
    kinds |= {column: str for column in range(14, 40)}
    chunks = pd.read_csv(
        path,
        sep="\t",
        header=None,
        dtype=kinds,
        keep_default_na=False,
        na_values={column: [""] for column in range(14)},
        chunksize=CHUNK_ROWS,
    )
    for chunk in chunks:
        dense = torch.from_numpy(chunk[list(range(14))].fillna(0).to_numpy())
        ids = torch.tensor(
            [
                [int(text, 16) if text else 0 for text in chunk[column]]
                for column in range(14, 40)
            ]
        ).T
        for part, _ in zip(dense.split(batch), ids.split(batch), strict=True):
            yield len(part)


def pyarrow(path: Path, batch: int) -> Iterator[int]:
    import pyarrow as pa
    from pyarrow import csv

    names = [f"f{number}" for number in range(40)]
    kinds = {name: pa.float32() for name in names[:14]}
    kinds |= {name: pa.string() for name in names[14:]}
    reader = csv.open_csv(
        path,
        read_options=csv.ReadOptions(column_names=names, use_threads=False),
        parse_options=csv.ParseOptions(delimiter="\t"),
        convert_options=csv.ConvertOptions(column_types=kinds),
    )
    for found in reader:
        yield found.num_rows


def measure(
    rows: Callable[[], Iterator[int]], path: Path, times: int
) -> dict[str, Any]:
    """Reads all rows `times` times over; the first time is not measured."""
    for _ in rows():
        pass
    before_mb = rss_mb()
    count, cpu_s, begin = 0, time.process_time(), time.perf_counter()
    for _ in range(times):
        count += sum(rows())
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_s
    return {
        "rows_per_s": count / wall_s,
        "rows_per_cpu_s": count / cpu_s,
        "mb_per_cpu_s": path.stat().st_size * times / 1e6 / cpu_s,
        "rss_mb": peak_rss_mb(),
        "grown_mb": rss_mb() - before_mb,
    }


def main() -> int:
    """Runs one row and prints its figures as JSON."""
    name, folder, rows, batch, epochs = (
        sys.argv[1],
        Path(sys.argv[2]),
        *map(int, sys.argv[3:6]),
    )
    if name == "prepare":
        prepare(folder, rows)
        print("{}")
        return 0
    criteo, multislot = files(folder, rows)
    path = multislot if name == "multislot" else criteo
    peers = {"polars": polars, "pandas": pandas, "pyarrow": pyarrow}
    try:
        if name in peers:
            found = measure(lambda: peers[name](path, batch), path, 1)
        else:
            threads = 2 if name == "two threads" else 1
            times = epochs if name == "epochs" else 2
            found = measure(lambda: ours(path, batch, threads, name), path, times)
    except ImportError as error:
        print(f"not installed: {error.name}", file=sys.stderr)
        return 3
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
