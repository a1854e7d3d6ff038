# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small snapshots laid out as servers and trainers lay theirs out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from torch_cpudist import _core
from torch_cpudist.settings.open_table import OpenTable
from torch_cpudist.snapshot import names, parts
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import Files, reported, write_durably
from torch_cpudist.snapshot.manifest import (
    CHUNK_BYTES,
    Base,
    Block,
    Dense,
    DenseState,
    File,
    Manifest,
    Rule,
    StateSlice,
    Table,
    Version,
)
from torch_cpudist.snapshot.tensors import NUMPY, make_header
from torch_cpudist.snapshot.trainer_files import write_trainer
from torch_cpudist.snapshot.trees import pack

NAME = "snap-000000000012-5f3a"
ADAGRAD = Rule("adagrad", {"lr": 0.1, "eps": 1e-10, "nesterov": False})
ADAM = Rule("adam", {"lr": 0.01, "beta1": 0.9, "beta2": 0.999})
NUMPY_NAMES = {dtype: name for name, dtype in NUMPY.items()}


def table(name="users.weight", dim=4, rows=2**40, state=None) -> Table:
    """A remote table with Adagrad's state."""
    return Table(
        name=name,
        rows=rows,
        dim=dim,
        remote=True,
        salt=names.table_salt(name),
        seed=2**63 + 5,
        initial=(("normal", 0.0, 0.01),),
        overrides=((0, 1, 0.0),),
        rule=ADAGRAD,
        state=(StateSlice("sum", 0, dim),) if state is None else state,
        step=12,
    )


def row_values(keys: np.ndarray, width: int, salt: float) -> np.ndarray:
    """Values that tell of which key, element and column they are."""
    base = (keys % 1000).astype(np.float32)[:, None]
    return base + salt + np.arange(width, dtype=np.float32) / 16


def columns_of(
    keys: np.ndarray, of: Table, average: bool, more: float = 0.0
) -> dict[str, np.ndarray]:
    """The columns of rows that have these keys, in a part's order.

    ``more``: of every weight, so that one says which snapshot it is of.
    """
    keys = np.asarray(keys, dtype=np.int64)
    buckets = names.buckets_of(keys, of.salt).astype(np.int64)
    keys = keys[np.lexsort((keys, buckets))]
    buckets.sort()
    begins = np.searchsorted(buckets, np.arange(names.BUCKETS + 1))
    columns = {
        "keys": keys,
        "weight": row_values(keys, of.dim, 0.5 + more),
        "state": row_values(keys, of.state_elements, 0.25),
        "count": (keys % 7).astype(np.uint32),
        "last_seen": (keys % 11).astype(np.uint32),
        "average": row_values(keys, of.dim, 0.125),
        "bucket_begin": begins.astype(np.int32),
    }
    if not of.state_elements:
        del columns["state"]
    if not average:
        del columns["average"]
    return columns


def write_tensors(
    files: Files, path: Path, tensors: Mapping[str, np.ndarray], kind: str
) -> bytes:
    """Writes a safetensors file, its tensors in the order that is given."""
    shapes = {name: (NUMPY_NAMES[a.dtype], a.shape) for name, a in tensors.items()}
    head, _ = make_header(shapes, {"format": kind, "version": "1"})
    contents = head + b"".join(array.tobytes() for array in tensors.values())
    with reported("a server cannot write", "It gives up."):
        write_durably(files, path, [contents])
    return contents


def entry(name: str, contents: bytes, table: int | None, rows: int) -> File:
    """What a server says of a file that it wrote."""
    chunks = range(0, len(contents), CHUNK_BYTES)
    crcs = tuple(_core.crc32c(contents[at : at + CHUNK_BYTES]) for at in chunks)
    return File(name, len(contents), table, rows, crcs)


def write_parts(
    files: Files,
    folder: Path,
    of: Table,
    index: int,
    keys: Iterable[int],
    servers: int,
    part_rows: int,
    average: bool,
    more: float = 0.0,
) -> list[File]:
    """Writes rows as servers do: each its own, in parts."""
    wanted = np.array(sorted(keys), dtype=np.int64)
    owners = names.buckets_of(wanted, of.salt).astype(np.int64) * servers // 4096
    written = []
    for server in range(servers):
        own = wanted[owners == server]
        for number, begin in enumerate(range(0, len(own), part_rows)):
            name = str(names.PartName(server, index, number))
            tensors = columns_of(own[begin : begin + part_rows], of, average, more)
            contents = write_tensors(files, folder / name, tensors, parts.FORMAT)
            rows = len(tensors["keys"])
            written.append(entry(name, contents, index, rows))
    return written


def dense_parameters(servers: int) -> tuple[Dense, ...]:
    """One with Adam in float32, cut in two, and one in float64 without state."""
    last = servers - 1
    cut = (
        Block("top.weight.block0", 0, 8, 0, 12),
        Block("top.weight.block1", 8, 4, last, 12),
    )
    state = (DenseState("exp_avg"), DenseState("exp_avg_sq"))
    whole = (Block("top.bias", 0, 3, last, 12),)
    return (
        Dense("top.weight", (3, 4), "F32", 4, ADAM, state, cut),
        Dense("top.bias", (3,), "F64", 1, Rule("sgd", {"lr": 1.0}), (), whole),
    )


def write_dense(
    files: Files, folder: Path, dense: tuple[Dense, ...], servers: int, average: bool
) -> list[File]:
    """Writes the dense blocks of every server; element i of parameter p is p + i/64."""
    written = []
    for server in range(servers):
        tensors = {}
        for number, one in enumerate(dense):
            for block in one.blocks:
                if block.server == server:
                    places = np.arange(block.offset, block.offset + block.elements)
                    weight = (number + places / 64).astype(NUMPY[one.dtype])
                    tensors[f"{block.name}.weight"] = weight
                    if one.state:
                        state = [weight + k + 1 for k in range(len(one.state))]
                        tensors[f"{block.name}.state"] = np.concatenate(state)
                    if average:
                        tensors[f"{block.name}.average"] = weight / 2
        name = str(names.PartName(server, None))
        kind = "torch_cpudist.dense"
        contents = write_tensors(files, folder / name, tensors, kind)
        written.append(entry(name, contents, None, 0))
    return written


def write_gone(
    files: Files,
    folder: Path,
    tables: tuple[Table, ...],
    gone: Mapping[str, Iterable[int]],
    servers: int,
) -> list[File]:
    """Writes keys that have gone as a server would write those that were its own."""
    written = []
    for server in range(servers):
        tensors = {}
        for index, of in enumerate(tables):
            keys = np.array(sorted(gone.get(of.name, ())), dtype=np.int64)
            owners = names.buckets_of(keys, of.salt).astype(np.int64) * servers // 4096
            if (owners == server).any():
                tensors[names.gone_keys(index)] = keys[owners == server]
        if tensors:
            name = str(names.PartName(server, None, gone=True))
            kind = "torch_cpudist.gone"
            contents = write_tensors(files, folder / name, tensors, kind)
            count = sum(map(len, tensors.values()))
            written.append(entry(name, contents, None, count))
    return written


def trainer_tree(rank: int) -> dict[str, object]:
    """A small state of a trainer."""
    return {
        "rank": rank,
        "position": (3, [1.5, None]),
        "generator": torch.arange(40, dtype=torch.uint8),
        "buffers": {"mean": torch.tensor([1.0, -0.5], dtype=torch.bfloat16)},
        "numpy": np.array([1, 2**63], dtype=np.uint64),
    }


def write(
    directory: Directory,
    name: str = NAME,
    *,
    tables: Mapping[str, Iterable[int]] | None = None,
    servers: int = 2,
    trainers: int = 2,
    part_rows: int = 1000,
    average: bool = True,
    number: int = 12,
    prepare: bool = True,
    base: Manifest | None = None,
    gone: Mapping[str, Iterable[int]] | None = None,
    more: float = 0.0,
    opened: OpenTable | None = None,
) -> Manifest:
    """Writes all files of a snapshot but the manifest, which is returned.

    With ``base`` it has what has changed since that one, and which keys have gone; with
    ``opened`` tables are of any key.
    """
    files = directory.files
    folder = directory.prepare(name) if prepare else directory.folder(name)
    if not prepare:
        files.make_directory(folder)  # as who comes first does
    keyed = {"users.weight": range(0, 40, 3)} if tables is None else tables
    described = tuple(table(one) for one in keyed)
    if opened is not None:
        described = tuple(replace(t, rows=2**54, open=opened) for t in described)
    written: list[File] = []
    for index, (of, keys) in enumerate(zip(described, keyed.values(), strict=True)):
        written += write_parts(
            files, folder, of, index, keys, servers, part_rows, average, more
        )
    written += write_gone(files, folder, described, gone or {}, servers)
    dense = dense_parameters(servers)
    written += write_dense(files, folder, dense, servers, average)
    entries = [
        write_trainer(folder, rank, pack(trainer_tree(rank)), 10 + rank, files, number)
        for rank in range(trainers)
    ]
    return Manifest(
        name=name,
        number=number,
        strategy="Sync",
        options={"average": "samples"},
        version=Version(number, 2**60, 24),
        servers=servers,
        trainers=tuple(entries),
        tables=described,
        dense=dense,
        average_decay=0.5 if average else 0.0,
        param_groups=({"lr": 0.1, "betas": [0.9, 0.999]},),
        files=tuple(written),
        base=None if base is None else Base(base.name, base.crc32c),
    )


def commit(directory: Directory, name: str = NAME, **how) -> Manifest:
    """Writes a whole snapshot."""
    return directory.commit(write(directory, name, **how))
