# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Deltas bring a loaded model to a newer state, and nobody sees a part of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from export_cases import DIM, evaluated, net, step, trained
from made_exports import USERS, write
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.errors import InvalidArgumentError, SnapshotError
from torch_cpudist.exports.layers import MOST_DELTAS, layers_of, spec_of
from torch_cpudist.exports.reading import Export


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_delta_makes_of_the_base_what_a_whole_export_is(tmp_path, dtype) -> None:
    def body(opt, model, rank):
        cpudist.export(model, tmp_path / "one", dtype)
        step(opt, model, 6, rank)
        base = tmp_path / "one"
        cpudist.export(model, tmp_path / "two", dtype, base=base)
        step(opt, model, 7, rank)
        step(opt, model, 8, rank)
        base = tmp_path / "two"
        cpudist.export(model, tmp_path / "three", dtype, base=base)
        cpudist.export(model, tmp_path / "whole", dtype)
        return evaluated(model)

    expected = trained(body, tmp_path / "snapshots")[0]
    model = net(seed=9)
    with cpudist.load_for_inference(model, tmp_path / "whole"):
        whole = evaluated(model)
    if dtype == "fp32":
        assert torch.equal(whole, expected)
    rows = [
        sum(file.rows for file in Export(tmp_path / name).manifest.files)
        for name in ("two", "whole")
    ]
    assert 0 < rows[0] < rows[1]
    for remote in (True, False):
        model = net(remote=remote, seed=9)
        with cpudist.load_for_inference(model, tmp_path / "one") as reader:
            assert not torch.equal(evaluated(model), whole)
            assert reader.apply_delta(tmp_path / "two").deltas == 1
            assert reader.loaded.version.round == 7
            reader.apply_delta(tmp_path / "three")
            assert torch.equal(evaluated(model), whole)
        model = net(remote=remote, seed=9)
        with cpudist.load_for_inference(model, tmp_path / "three") as reader:
            assert torch.equal(evaluated(model), whole)
            assert reader.loaded.deltas == 2


def test_static_models_have_deltas_too(tmp_path) -> None:
    model = net(remote=False)
    cpudist.export(model, tmp_path / "one")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    cpudist.export(model, tmp_path / "two", base=tmp_path / "one")
    for remote in (True, False):
        loaded = net(remote=remote, seed=4)
        with cpudist.load_for_inference(loaded, tmp_path / "one") as reader:
            reader.apply_delta(tmp_path / "two")
            assert torch.equal(evaluated(loaded), evaluated(model))
            found = reader.tables
            assert found == ({} if not remote else {
                "users.weight": (len(model.users.weight), DIM),
                "tags.weight": (len(model.tags.weight), DIM),
            })  # fmt: skip


class Users(nn.Module):
    """Only a table."""

    def __init__(self, remote: bool) -> None:
        super().__init__()
        if remote:
            with cpudist.remote_tables(min_rows=1):
                self.users = nn.Embedding(USERS.rows, USERS.dim)
        else:
            self.users = nn.Embedding(USERS.rows, USERS.dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.users(ids)


def made(keys: np.ndarray) -> np.ndarray:
    """What the initialiser makes of keys."""
    out = np.empty((len(keys), USERS.dim), np.float32)
    _core.initial_rows(spec_of(USERS), keys.ctypes.data, len(keys), out.ctypes.data)
    return out


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_any_number_of_deltas_says_what_the_newest_says(tmp_path, dtype) -> None:
    draw = np.random.default_rng(3)
    keys = np.unique(draw.integers(0, USERS.rows, 120))
    keys[0] = 0
    rows = {int(key): [1.0, 2.0, 3.0] for key in keys[::2]}
    write(tmp_path / "000", rows, {}, dtype=dtype)
    model = Users(remote=True)
    with cpudist.load_for_inference(model, tmp_path / "000") as reader, torch.no_grad():
        for number in range(1, 2 * MOST_DELTAS + 4):
            for key in draw.choice(keys, 12):
                rows.pop(int(key), None)
            for key in draw.choice(keys, 12):
                rows[int(key)] = [float(number), -float(number), 0.5]
            path, base = tmp_path / f"{number:03}", tmp_path / f"{number - 1:03}"
            assert write(path, rows, {}, base, dtype) <= 12
            reader.apply_delta(path)
            expected = made(keys)
            for i, key in enumerate(keys):
                if int(key) in rows:
                    expected[i] = rows[int(key)]
            found = model(torch.from_numpy(keys)).numpy()
            error = {"fp32": 0.0, "bf16": 0.01, "int8": 0.01}[dtype]
            assert np.abs(found - expected).max() <= error * 2 * MOST_DELTAS
            gone = [key for key in keys if int(key) not in rows]
            assert gone
            missing = model(torch.tensor(gone)).numpy()
            assert (missing == made(np.array(gone))).all()


def test_what_was_checked_is_not_checked_again_after_a_delta(tmp_path) -> None:
    write(tmp_path / "a", {1: [1, 1, 1]}, {})
    write(tmp_path / "b", {2: [2, 2, 2], 1: [1, 1, 1]}, {}, tmp_path / "a")
    before = layers_of([Export(tmp_path / "a")], USERS.name)
    after = before.with_delta(Export(tmp_path / "b").rows_files(0))
    assert after.base[0].native() is before.base[0].native()
    assert len(after.deltas) == 1


def test_what_is_no_delta_of_what_is_loaded_is_refused(tmp_path) -> None:
    write(tmp_path / "a", {1: [1, 1, 1]}, {})
    write(tmp_path / "b", {1: [2, 2, 2]}, {}, tmp_path / "a")
    write(tmp_path / "c", {1: [3, 3, 3]}, {}, tmp_path / "b")
    write(tmp_path / "other", {1: [9, 9, 9]}, {})
    model = Users(remote=True)
    ids = torch.tensor([1])
    with cpudist.load_for_inference(model, tmp_path / "a") as reader, torch.no_grad():
        for name, why in (
            ("c", "in the order"),
            ("other", "whole one"),
            ("a", "whole one"),
            ("none", "no export"),
        ):
            with pytest.raises(SnapshotError, match=why):
                reader.apply_delta(tmp_path / name)
        with reader.reading(), pytest.raises(InvalidArgumentError, match="inside"):
            reader.apply_delta(tmp_path / "b")
        assert model(ids).tolist() == [[1, 1, 1]]
        reader.apply_delta(tmp_path / "b")
        with pytest.raises(SnapshotError, match="in the order"):
            reader.apply_delta(tmp_path / "b")
        assert model(ids).tolist() == [[2, 2, 2]]
    with pytest.raises(cpudist.ClosedError):
        reader.apply_delta(tmp_path / "c")
    # One that was made anew is another base.
    (tmp_path / "a").rename(tmp_path / "old")
    write(tmp_path / "a", {1: [1, 1, 1]}, {})
    with pytest.raises(SnapshotError, match="made anew"):
        cpudist.load_for_inference(Users(remote=True), tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "older")
    with pytest.raises(SnapshotError, match="beside it"):
        cpudist.load_for_inference(Users(remote=True), tmp_path / "b")
    with pytest.raises(InvalidArgumentError, match="beside"):
        write(tmp_path / "sub" / "d", {}, {}, tmp_path / "other")


class Even(nn.Module):
    """All of whose values are the number of a version."""

    def __init__(self) -> None:
        super().__init__()
        with cpudist.remote_tables(min_rows=1000):
            self.users = nn.Embedding(USERS.rows, USERS.dim)
        self.days = nn.Embedding(50, 2, sparse=True)
        self.bias = nn.Parameter(torch.zeros(1000))
        self.fails = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        users = self.users(ids).flatten()
        if self.fails:
            raise ValueError("within a forward")
        found = torch.cat([users, self.days(ids % 50).flatten(), self.bias])
        return torch.stack([found.min(), found.max()])


def version(number: int) -> tuple[dict[int, list[float]], dict[str, torch.Tensor]]:
    """The values of a version."""
    value = float(number)
    rows = {key * 7: [value] * USERS.dim for key in range(40)}
    days, bias = torch.full((50, 2), value), torch.full((1000,), value)
    return rows, {"days.weight": days, "bias": bias}


def test_no_forward_sees_a_part_of_a_delta(tmp_path) -> None:
    versions = 60
    for number in range(versions + 1):
        base = tmp_path / f"{number - 1}" if number else None
        write(tmp_path / f"{number}", *version(number), base)
    model = Even()
    done = threading.Event()
    seen: list[set[float]] = [set() for _ in range(3)]
    problems: list[str] = []
    reader = cpudist.load_for_inference(model, tmp_path / "0")

    def forwards(mine: set[float]) -> None:
        ids = torch.arange(40) * 7
        while not done.is_set():
            with torch.inference_mode():
                low, high = model(ids).tolist()
            if low != high:
                problems.append(f"{low} and {high} in one forward")
            mine.add(low)

    def several(mine: set[float]) -> None:
        ids = torch.arange(40) * 7
        while not done.is_set():
            with reader.reading() as loaded, torch.inference_mode():
                first = model(ids).tolist()
                rows = reader.look_up("users.weight", ids)
                second = model(ids).tolist()
            name = float(loaded.name)
            if {*first, *second, rows.min().item(), rows.max().item()} != {name}:
                problems.append(f"{first}, {second} of version {name}")
            mine.add(name)

    calls = (forwards, forwards, several)
    pool = ThreadPoolExecutor(len(calls))
    running = [pool.submit(call, mine) for call, mine in zip(calls, seen, strict=True)]
    try:
        for number in range(1, versions + 1):
            reader.apply_delta(tmp_path / f"{number}")
    finally:
        done.set()
        pool.shutdown()
    for one in running:
        one.result()  # what has ended a thread fails the test
    assert not problems
    assert all(mine <= set(map(float, range(versions + 1))) for mine in seen)
    assert len(set.union(*seen)) > 3
    reader.close()


def test_a_forward_that_raises_holds_nobody_up(tmp_path) -> None:
    write(tmp_path / "0", *version(0))
    write(tmp_path / "1", *version(1), tmp_path / "0")
    model = Even()
    with cpudist.load_for_inference(model, tmp_path / "0") as reader:
        model.fails = True
        with pytest.raises(ValueError, match="within"):
            model(torch.tensor([7]))
        model.fails = False
        with pytest.raises(cpudist.RowOutOfRangeError):
            model(torch.tensor([-1]))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(reader.apply_delta, tmp_path / "1").result()
        assert model(torch.tensor([7])).tolist() == [1.0, 1.0]
