# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows of a snapshot's file, loaded by a server through _core."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from core_cluster import DIM, HIDDEN, ROWS, Cluster, address

from torch_cpudist import _core
from torch_cpudist.errors import (
    InvalidArgumentError,
    SnapshotCorruptError,
    SnapshotError,
)

PIECE = 256 * 1024


def write_rows(folder, keys, weight):
    """A file of rows as servers write it, and what a server is told of it."""
    columns = {"keys": ("I64", keys), "weight": ("F32", weight)}
    head, data, places = {}, b"", {}
    for name, (dtype, values) in columns.items():
        places[name] = len(data)
        data += values.tobytes()
        head[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [places[name], len(data)],
        }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    whole = struct.pack("<Q", len(text)) + text + data
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.safetensors").write_bytes(whole)
    begin = 8 + len(text)
    return {
        "snapshot": folder.name,
        "file": "rows.safetensors",
        "file_bytes": len(whole),
        "row_begin": 0,
        "row_end": len(keys),
        "offsets": [begin, begin + places["weight"], 0, 0, 0, 0],
        "crcs": [
            _core.crc32c(whole[at : at + PIECE]) for at in range(0, len(whole), PIECE)
        ],
    }


@pytest.fixture
def cluster():
    with Cluster(1, 1) as made:
        yield made.start()


def test_rows_and_version_are_loaded(cluster, tmp_path):
    trainer = cluster.trainers[0]
    weight = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    told = write_rows(tmp_path / "snap-1", np.arange(ROWS), weight)
    with pytest.raises(SnapshotError, match="CPUDIST_SNAPSHOT_DIR"):
        trainer.set.load_rows(0, 0, clear=True, seed=0, round=0, table_step=7, **told)
    cluster.servers[0].set_snapshot_directory(str(tmp_path))
    trainer.set.load_rows(0, 0, clear=True, seed=0, round=0, table_step=7, **told)
    trainer.set.load_version(0, 12, 34, 56)
    assert np.array_equal(trainer.fetch()[0], weight)
    trainer.pull(np.array([3, 5]))
    assert np.array_equal(trainer.table[3], weight[3])
    # The next round is the one after those that were loaded.
    trainer.client.barrier()
    trainer.pull(np.array([3]))
    assert trainer.push([3], np.ones((1, DIM))) == 12


def test_damage_is_named_and_changes_nothing(cluster, tmp_path):
    trainer = cluster.trainers[0]
    cluster.servers[0].set_snapshot_directory(str(tmp_path))
    before = trainer.fetch()[0]
    weight = np.zeros((ROWS, DIM), np.float32)
    told = write_rows(tmp_path / "snap-1", np.arange(ROWS), weight)
    path = tmp_path / "snap-1" / told["file"]
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(SnapshotCorruptError, match=r"rows\.safetensors: bytes 0 \.\. "):
        trainer.set.load_rows(0, 0, clear=True, seed=0, round=0, table_step=0, **told)
    path.unlink()
    with pytest.raises(SnapshotCorruptError, match="is missing"):
        trainer.set.load_rows(0, 0, clear=True, seed=0, round=0, table_step=0, **told)
    assert np.array_equal(trainer.fetch()[0], before)
    with pytest.raises(InvalidArgumentError, match="server 3"):
        trainer.set.load_rows(3, 0, clear=True, seed=0, round=0, table_step=0, **told)


def test_a_stored_average_is_what_is_read():
    with Cluster(1, 1) as cluster:
        cluster.layout = _core.ParamSetLayout(
            configs=[cluster.config],
            tables=[_core.TableSpec("words", ROWS, DIM)],
            blocks=[_core.BlockSpec("dense", HIDDEN)],
            average_decay=0.5,
        )
        cluster.start()
        trainer = cluster.trainers[0]
        weight = np.arange(HIDDEN, dtype=np.float32)
        average = weight + 100
        trainer.set.store_parameter(
            0, address(weight), step=3, average=address(average)
        )
        trainer.set.load_version(0, 4, 4, 4)
        trainer.client.barrier()
        trainer.set.read_averages(True)
        trainer.pull_dense()
        assert np.array_equal(trainer.dense, average)
