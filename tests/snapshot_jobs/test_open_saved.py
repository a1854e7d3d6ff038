# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables of any key are saved, go on, and come from other tables."""

from __future__ import annotations

import pytest
import torch
from open_cases import (
    DIM,
    KEYS,
    begun,
    counted,
    dictionary_of,
    read,
    step,
    wrap,
)
from open_jobs import assert_goes_on, module_of
from snapshot_parity import seeing
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist


@pytest.mark.parametrize(("trainers", "servers", "then"), [(1, 1, 3), (2, 3, 2)])
def test_a_run_goes_on_to_the_bit(tmp_path, trainers, servers, then):
    assert_goes_on(tmp_path, trainers, servers, then)


class Kinds(nn.Module):
    """One table, of any key or of so many rows, on servers only or not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        rows = 50
        if kind == "open":
            self.table = module_of(seed=3)
        elif kind == "remote":
            with cpudist.remote_tables(min_rows=1):
                self.table = nn.Embedding(rows, DIM)
        else:
            self.table = nn.Embedding(rows, DIM, sparse=True)


@pytest.mark.parametrize("kind", ["static", "remote"])
def test_other_tables_become_ones_of_any_key(tmp_path, kind):
    trained = ([1, 4, 40], [12.0, 24.0, -12.0])

    def save(context):
        model = Kinds(kind)
        opt = wrap(model)
        opt.resume(tmp_path)
        step(opt, model.table, trained)
        opt.save_snapshot("before")
        return read(model.table, range(50))

    def load(context):
        model = Kinds("open")
        opt = wrap(model)
        before = read(model.table, KEYS)
        started = opt.resume(tmp_path)
        assert started.taken == {"table.weight": "table.weight"}
        after = read(model.table, KEYS)
        found = read(model.table, range(50))
        step(opt, model.table, ([-1], [12.0]))
        return found, counted("table.weight")["rows"], before, after

    (expected,) = run(save, 1, 1, variables=seeing(tmp_path))
    ((found, rows, before, after),) = run(load, 1, 2, variables=seeing(tmp_path))
    there = torch.tensor(trained[0]) if kind == "remote" else torch.arange(50)
    assert torch.equal(found[there], expected[there])
    assert rows == len(there) + 1
    # Keys that are no rows of the other begin as this model says.
    outside = [at for at, key in enumerate(KEYS) if not 0 <= key < 50]
    assert torch.equal(before[outside], after[outside])


def test_a_table_of_any_key_becomes_no_other(tmp_path, caplog):
    def save(context):
        model = Kinds("open")
        opt = wrap(model)
        opt.resume(tmp_path)
        step(opt, model.table, ([1, -1], [12.0, 12.0]))
        opt.save_snapshot("before")

    def load(context):
        model = Kinds("remote")
        opt = wrap(model)
        opt.resume(tmp_path / "other")
        for chosen in ({}, {"only": ["table.weight"]}):
            with pytest.raises(
                cpudist.SnapshotError, match=r"was of any key of|nothing"
            ):
                opt.load_snapshot(tmp_path / "before", **chosen)

    run(save, 1, 1, variables=seeing(tmp_path))
    run(load, 1, 1, variables=seeing(tmp_path / "other"))


def test_what_is_counted_begins_anew(tmp_path):
    """Pushes that were counted before a snapshot are not in it, rows are."""
    made = cpudist.CountFilter(2, sketch_bytes=1 << 12)
    first, second = KEYS[3], KEYS[4]

    def save(context):
        module = module_of(admission=made)
        opt = wrap(module)
        opt.resume(tmp_path)
        step(opt, module, ([first], [12.0]))
        step(opt, module, ([first, second], [12.0, 12.0]))
        opt.save_snapshot("before")
        return read(module)

    def load(context):
        module = module_of(admission=made, seed=9)
        opt = wrap(module)
        opt.resume(tmp_path)
        found = [read(module)]
        for _ in range(2):
            step(opt, module, ([second], [12.0]))
            found.append(read(module))
        return found, counted()

    (expected,) = run(save, 1, 1, variables=seeing(tmp_path))
    (((same, once, twice), stats),) = run(load, 1, 2, variables=seeing(tmp_path))
    assert torch.equal(same, expected)
    assert torch.equal(once, expected)
    assert not torch.equal(twice, expected)
    assert (stats["rows"], stats["filtered"]) == (2, 1)


def test_rows_begin_as_in_the_snapshot_also_under_another_name(tmp_path):
    def save(context):
        model = nn.ModuleDict({"old": module_of(seed=1)})
        opt = wrap(model)
        opt.resume(tmp_path)
        step(opt, model["old"], ([-1], [12.0]))
        opt.save_snapshot("before")
        return read(model["old"])

    def load(context):
        model = nn.ModuleDict({"new": module_of(seed=2)})
        opt = wrap(model)
        opt.resume(tmp_path / "other")
        opt.load_snapshot(tmp_path / "before", map={"old.": "new."})
        return read(model["new"])

    (expected,) = run(save, 1, 1, variables=seeing(tmp_path))
    (found,) = run(load, 1, 2, variables=seeing(tmp_path / "other"))
    assert torch.equal(found, expected)


def test_the_dictionary_of_these_tests_is_none_of_the_servers():
    module = module_of()
    expected = dictionary_of(module)
    assert torch.equal(expected.read(), torch.from_numpy(begun(module.weight, KEYS)))
