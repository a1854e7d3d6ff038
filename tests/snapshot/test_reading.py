# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A snapshot gives back what was saved: rows, dense parameters, states, load plans."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from small_snapshots import (
    NAME,
    columns_of,
    commit,
    dense_parameters,
    entry,
    row_values,
    table,
    write,
    write_dense,
    write_tensors,
)

from torch_cpudist import _core
from torch_cpudist.errors import (
    InvalidArgumentError,
    SnapshotCorruptError,
    SnapshotError,
)
from torch_cpudist.snapshot import names, parts
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.manifest import Block
from torch_cpudist.snapshot.reading import Snapshot


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path / "snapshots")


def test_rows_are_found_by_key(directory) -> None:
    kept = {"users.weight": range(0, 3000, 3), "items.weight": [7, 2**39]}
    commit(directory, tables=kept, servers=3, part_rows=100)
    snapshot = Snapshot(directory.folder(NAME))
    wanted = np.array([3, 4, 2997, 3000, 0], dtype=np.int64)
    rows = snapshot.rows("users.weight", wanted)
    assert rows.found.tolist() == [True, False, True, False, True]
    here = wanted[rows.found]
    np.testing.assert_array_equal(
        rows.columns["weight"][rows.found], row_values(here, 4, 0.5)
    )
    np.testing.assert_array_equal(
        rows.columns["state"][rows.found], row_values(here, 4, 0.25)
    )
    np.testing.assert_array_equal(
        rows.columns["average"][rows.found], row_values(here, 4, 0.125)
    )
    assert rows.columns["count"].tolist() == [3, 0, 2997 % 7, 0, 0]
    assert rows.columns["last_seen"].tolist() == [3, 0, 2997 % 11, 0, 0]
    assert not rows.columns["weight"][~rows.found].any()
    assert snapshot.rows("items.weight", [2**39, 8]).found.tolist() == [True, False]
    assert snapshot.verify() == []


def test_every_part_is_read_as_a_whole(directory) -> None:
    commit(directory, tables={"users.weight": range(500)}, part_rows=100)
    keys = [
        part.column("keys")
        for part in Snapshot(directory.folder(NAME)).parts("users.weight")
    ]
    assert sorted(np.concatenate(keys).tolist()) == list(range(500))
    assert len(keys) == 6


def test_dense_parameters_are_put_together(directory) -> None:
    commit(directory)
    snapshot = Snapshot(directory.folder(NAME))
    weight = np.arange(12, dtype=np.float32).reshape(3, 4) / 64
    np.testing.assert_array_equal(snapshot.dense("top.weight"), weight)
    np.testing.assert_array_equal(snapshot.dense_average("top.weight"), weight / 2)
    state = snapshot.dense_state("top.weight")
    assert list(state) == ["exp_avg", "exp_avg_sq"]
    np.testing.assert_array_equal(state["exp_avg"], weight + 1)
    np.testing.assert_array_equal(state["exp_avg_sq"], weight + 2)
    bias = snapshot.dense("top.bias")
    assert bias.dtype == np.float64
    np.testing.assert_array_equal(bias, 1 + np.arange(3) / 64)
    assert snapshot.dense_state("top.bias") == {}


def test_state_per_row_of_a_dense_parameter(tmp_path, directory) -> None:
    manifest = write(directory, average=False)
    first, bias = manifest.dense
    per_row = dataclasses.replace(
        first, state=tuple(dataclasses.replace(s, per_row=True) for s in first.state)
    )
    tensors = {}
    files = []
    for server in (0, 1):
        tensors = {
            f"{block.name}.weight": np.zeros(block.elements, np.float32)
            for block in first.blocks
            if block.server == server
        }
        state = {0: [1, 2, 11, 12], 1: [3, 13]}[server]
        name = f"top.weight.block{server}.state"
        tensors[name] = np.array(state, dtype=np.float32)
        if server == 1:
            tensors["top.bias.weight"] = np.zeros(3)
        path = directory.folder(NAME) / str(names.PartName(server, None))
        contents = write_tensors(directory.files, path, tensors, "torch_cpudist.dense")
        files.append(entry(path.name, contents, None, 0))
    kept = [file for file in manifest.files if file.table is not None]
    directory.commit(
        dataclasses.replace(manifest, dense=(per_row, bias), files=(*kept, *files))
    )
    snapshot = Snapshot(directory.folder(NAME))
    state = snapshot.dense_state("top.weight")
    assert {name: part.tolist() for name, part in state.items()} == {
        "exp_avg": [1, 2, 3],
        "exp_avg_sq": [11, 12, 13],
    }
    assert snapshot.verify() == []


def test_states_of_trainers(directory) -> None:
    commit(directory)
    snapshot = Snapshot(directory.folder(NAME))
    tree = snapshot.trainer(1)
    assert tree["rank"] == 1
    assert tree["position"] == (3, [1.5, None])
    assert tree["buffers"]["mean"].dtype is torch.bfloat16
    assert tree["buffers"]["mean"].tolist() == [1.0, -0.5]
    assert tree["numpy"].tolist() == [1, 2**63]
    assert snapshot.trainer(2) is None
    assert [one.steps for one in snapshot.manifest.trainers] == [10, 11]


@pytest.mark.parametrize("servers", [1, 2, 3, 7, 20, 4096])
def test_owners_are_those_of_the_core(servers) -> None:
    runs = [names.server_buckets(server, servers) for server in range(servers)]
    assert runs[0][0] == 0
    assert runs[-1][1] == names.BUCKETS
    assert all(a[1] == b[0] for a, b in itertools.pairwise(runs))
    generator = np.random.default_rng(servers)
    keys = generator.integers(0, 2**62, 3000)
    salt = names.table_salt("some table")
    buckets = names.buckets_of(keys, salt)
    owners = _core.owner_of_keys(keys.tolist(), "some table", servers)
    for owner, bucket in zip(owners, buckets, strict=True):
        first, last = runs[owner]
        assert first <= bucket < last


def test_buckets_are_those_of_the_core() -> None:
    # With as many servers as buckets the owner is the bucket.
    keys = np.array([0, 1, 12345, 2**62 - 1, -1], dtype=np.int64)
    for name in ("", "emb.weight", "größe"):
        owners = _core.owner_of_keys(keys.tolist(), name, names.BUCKETS)
        assert names.buckets_of(keys, names.table_salt(name)).tolist() == owners


@pytest.mark.parametrize(("saved", "now"), [(1, 1), (3, 1), (1, 3), (2, 7), (7, 3)])
def test_load_plans_give_each_row_to_its_owner_once(directory, saved, now) -> None:
    keys = list(range(0, 4000, 7))
    commit(directory, tables={"users.weight": keys}, servers=saved, part_rows=150)
    folder = directory.folder(NAME)
    snapshot = Snapshot(folder)
    loaded = {}
    for server in range(now):
        for run in snapshot.load_plan("users.weight", server, now):
            contents = (folder / run.file).read_bytes()
            assert len(contents) == run.file_bytes
            assert run.crc32c == snapshot.manifest.file(run.file).crc32c
            count = run.row_end - run.row_begin
            at = {
                name: np.frombuffer(
                    contents,
                    dtype,
                    count * width,
                    run.offsets[column] + run.row_begin * width * dtype.itemsize,
                )
                for column, (name, dtype, width) in enumerate(
                    [
                        ("keys", np.dtype("<i8"), 1),
                        ("weight", np.dtype("<f4"), 4),
                        ("state", np.dtype("<f4"), 4),
                        ("count", np.dtype("<u4"), 1),
                        ("last_seen", np.dtype("<u4"), 1),
                        ("average", np.dtype("<f4"), 4),
                    ]
                )
            }
            own = at["keys"]
            owners = _core.owner_of_keys(own.tolist(), "users.weight", now)
            assert set(owners) == {server}
            for name, salt in (("weight", 0.5), ("state", 0.25), ("average", 0.125)):
                expected = row_values(own, 4, salt).reshape(-1)
                np.testing.assert_array_equal(at[name], expected)
            assert at["count"].tolist() == (own % 7).tolist()
            assert at["last_seen"].tolist() == (own % 11).tolist()
            for key in own.tolist():
                loaded[key] = loaded.get(key, 0) + 1
    assert loaded == dict.fromkeys(keys, 1)


def test_columns_that_are_not_there_have_no_offset(directory) -> None:
    manifest = write(directory, servers=1, average=False)
    bare = table(state=())
    path = directory.folder(NAME) / str(names.PartName(0, 0))
    columns = columns_of(np.arange(5), bare, average=False)
    contents = write_tensors(directory.files, path, columns, parts.FORMAT)
    files = [file for file in manifest.files if file.table is None]
    directory.commit(
        dataclasses.replace(
            manifest, tables=(bare,), files=(*files, entry(path.name, contents, 0, 5))
        )
    )
    (run,) = Snapshot(directory.folder(NAME)).load_plan("users.weight", 0, 1)
    assert [bool(offset) for offset in run.offsets] == [
        *(True, True, False, True, True, False)
    ]
    assert Snapshot(directory.folder(NAME)).verify() == []


def test_a_server_without_rows_has_nothing_to_load(directory) -> None:
    commit(directory, tables={"users.weight": [1]})
    snapshot = Snapshot(directory.folder(NAME))
    runs = [snapshot.load_plan("users.weight", server, 5) for server in range(5)]
    assert sorted(len(one) for one in runs) == [0, 0, 0, 0, 1]
    with pytest.raises(InvalidArgumentError, match="server 5 of 5"):
        snapshot.load_plan("users.weight", 5, 5)


def test_unknown_names_say_which_there_are(directory) -> None:
    commit(directory, average=False)
    snapshot = Snapshot(directory.folder(NAME))
    with pytest.raises(SnapshotError, match=r"no table 'user'.*users\.weight"):
        list(snapshot.parts("user"))
    with pytest.raises(SnapshotError, match=r"no dense parameter 'top'.*top\.bias"):
        snapshot.dense("top")
    with pytest.raises(SnapshotError, match="saved without average"):
        snapshot.dense_average("top.weight")
    with pytest.raises(SnapshotError, match=rf"no snapshot 'other'.*{NAME}"):
        Snapshot(directory.path / "other")


def replaced(directory, manifest, columns, name=None):
    """Commits with other rows in the first part, whose checksums fit them."""
    name = name or str(names.PartName(0, 0))
    path = directory.folder(NAME) / name
    contents = write_tensors(directory.files, path, columns, parts.FORMAT)
    rest = [file for file in manifest.files if file.name != name]
    changed = entry(name, contents, 0, len(columns["keys"]))
    directory.commit(dataclasses.replace(manifest, files=(changed, *rest)))
    return Snapshot(directory.folder(NAME)).verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["keys"].__setitem__(0, 2**41), "keys outside of 0 to"),
        (lambda c: c["keys"].__setitem__(slice(None), c["keys"][::-1].copy()), "by bu"),
        (lambda c: c["bucket_begin"].__setitem__(0, 1), "do not divide"),
        (lambda c: c["bucket_begin"].__setitem__(-1, 4), "do not divide"),
        (lambda c: c.pop("count"), "expected the tensors"),
        (lambda c: c.update(more=np.zeros(1, np.float32)), "expected the tensors"),
        (lambda c: c.update(weight=c["weight"][:, :3].copy()), "expected the tensors"),
    ],
)
def test_rows_that_are_not_where_they_belong(directory, change, message) -> None:
    manifest = write(directory, servers=1)
    columns = columns_of(np.arange(0, 40, 3), manifest.tables[0], average=True)
    change(columns)
    (damage,) = replaced(directory, manifest, columns)
    assert isinstance(damage, SnapshotCorruptError)
    assert (damage.file, damage.table) == ("s000-t000-0000.safetensors", "users.weight")
    assert message in str(damage)


def test_rows_of_another_server(directory) -> None:
    manifest = write(directory)
    columns = columns_of(np.arange(100), manifest.tables[0], average=True)
    (damage,) = replaced(directory, manifest, columns)
    assert "of another server" in str(damage)


def test_a_key_in_two_parts(directory) -> None:
    manifest = write(directory, servers=1)
    columns = columns_of(np.array([1, 2, 3]), manifest.tables[0], average=True)
    (damage,) = replaced(directory, manifest, columns, "s000-t000-0001.safetensors")
    assert "more than one row of key 3" in str(damage)
    assert damage.table == "users.weight"


def test_a_dense_block_of_another_shape(directory) -> None:
    manifest = write(directory, servers=1)
    first, bias = dense_parameters(1)
    wider = dataclasses.replace(
        first,
        shape=(4, 4),
        blocks=(first.blocks[0], dataclasses.replace(first.blocks[1], elements=8)),
    )
    directory.commit(dataclasses.replace(manifest, dense=(wider, bias)))
    (damage,) = Snapshot(directory.folder(NAME)).verify()
    assert "'top.weight.block1.weight'" in str(damage)
    assert damage.file == "s000-dense.safetensors"


def test_parts_and_parameters_of_nothing(directory) -> None:
    """All rows of some slabs may be gone, and a parameter may have no elements."""
    manifest = write(directory, servers=1)
    path = directory.folder(NAME) / "s000-t000-0001.safetensors"
    columns = columns_of(np.arange(0), manifest.tables[0], average=True)
    part = write_tensors(directory.files, path, columns, parts.FORMAT)
    nothing = dataclasses.replace(
        manifest.dense[0], name="no", shape=(0, 4), blocks=(Block("no", 0, 0, 0, 3),)
    )
    dense = (*manifest.dense, nothing)
    kept = [file for file in manifest.files if file.table is not None]
    files = (
        *(*kept, entry(path.name, part, 0, 0)),
        *write_dense(directory.files, directory.folder(NAME), dense, 1, True),
    )
    directory.commit(dataclasses.replace(manifest, files=files, dense=dense))
    snapshot = Snapshot(directory.folder(NAME))
    assert snapshot.verify() == []
    assert snapshot.rows("users.weight", [3]).found.all()
    assert len(snapshot.load_plan("users.weight", 0, 1)) == 1
    assert snapshot.dense("no").shape == (0, 4)
    state = snapshot.dense_state("no")
    assert {name: part.shape for name, part in state.items()} == {
        **{"exp_avg": (0, 4), "exp_avg_sq": (0, 4)}
    }
