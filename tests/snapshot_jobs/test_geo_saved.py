# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo: servers' values have all that trainers moved up to their marks, once."""

from __future__ import annotations

import random
import time

import pytest
import torch
from snapshot_cases import settle
from snapshot_parity import seeing
from sync_cases import assert_same_bits, run
from turns import Turns
from whole_gradients import (
    ROWS,
    check_files,
    expected,
    model_of,
    push,
    saved_values,
)

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot


@torch.no_grad()
def seen(opt, model):
    """All rows, dense values, and what this trainer has of optimizer state."""
    found = {"rows": model.table(torch.arange(ROWS)).clone()}
    for table in opt.trained.tables:
        if table.placed.found.remote:
            kept = table.trained_rows()
            order = kept["rows"].argsort()
            found |= {f"slots' {k}": kept[k][order] for k in ("rows", "counts")}
            found["slots' sums"] = kept["state"][order]
    found["dense"] = model.dense.detach().clone()
    for number, parts in opt.state_dict()["state"].items():
        for name, value in parts.items():
            found[f"{number} {name}"] = torch.as_tensor(value).clone()
    return found


def geo_job(
    folder,
    steps,
    every=None,
    rule="sgd",
    leaving=0.0,
    servers=2,
    remote=False,
    **options,
):
    """Where each trainer began, what it had then, and what it ends with."""
    turns = Turns()
    models = [model_of(remote) for _ in steps]
    rules = {
        "sgd": lambda p: torch.optim.SGD(p, lr=1.0),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    }

    def body(context):
        rank = context.trainer_rank
        drawn = random.Random(17 * rank + steps[0])
        model = models[rank]
        inner = rules[rule](model.parameters())
        strategy = cpudist.Geo(push_every=4, **options)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
        started = None
        if folder is not None:
            started = opt.resume(folder, every_steps=every)
        begun = seen(opt, model)
        cpudist.barrier()  # nobody has moved anything when the last one resumes
        for step in range(started.step if started else 0, steps[rank]):
            push(opt, model, rank, step)
            if drawn.random() < leaving:
                opt.leave()
                time.sleep(0.01 * drawn.random())
        if every is not None:
            settle(opt)
            turns.have_one(opt, rank, len(steps), folder)
        cpudist.barrier()
        opt.flush()
        return started, begun, seen(opt, model), opt.stats().get("snapshot")

    return run(body, len(steps), servers=servers, variables=seeing(folder))


@pytest.mark.parametrize("remote", [False, True])
def test_one_trainer_goes_on_bit_for_bit(remote, tmp_path):
    options = {"rule": "adagrad", "remote": remote}
    [(_, _, whole, _)] = geo_job(None, [30], **options)
    [(*_, stats)] = geo_job(tmp_path, [17], 5, **options)
    assert stats["failed"] == 0
    [(started, _, again, _)] = geo_job(tmp_path, [30], **options)
    assert started.step > 0
    [told] = started.report
    # Of a remote one those that were updated by then.
    rows = range(4, 13) if remote else [12]
    assert told in [f"table 'table.weight': {count} rows" for count in rows]
    assert_same_bits(again, whole)


@pytest.mark.parametrize("leaving", [0.0, 0.1], ids=["staying", "leaving"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exchange_budget": 1.0},
        {"remote": True},
        {"remote": True, "exchange_budget": 1.0, "cache_bytes": 300},
    ],
    ids=["pace", "soon", "remote", "remote within a budget"],
)
def test_servers_have_all_movement_once(options, leaving, tmp_path):
    first = [40, 47]  # halves are exact
    for *_, stats in geo_job(tmp_path, first, 6, leaving=leaving, **options):
        assert stats["failed"] == 0
    assert check_files(tmp_path, 1.0) > 0
    newest = Directory(tmp_path).committed()[0].name
    weight, values = saved_values(Snapshot(tmp_path / newest))
    last = [60, 66]
    table, dense = expected(last)
    for started, begun, ended, _ in geo_job(tmp_path, last, 7, **options):
        assert started.name == newest
        assert torch.equal(begun["rows"], weight)
        assert torch.equal(begun["dense"], values)
        assert torch.equal(ended["rows"], table)
        assert torch.equal(ended["dense"], dense)
    check_files(tmp_path, 1.0)


@pytest.mark.parametrize("remote", [False, True])
def test_each_trainer_keeps_its_own_optimizer_state(remote, tmp_path):
    kept = {}
    models = [model_of(remote) for _ in range(4)]

    def body(context):
        rank = context.trainer_rank
        model = models.pop()
        inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
        strategy = cpudist.Geo(push_every=3)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
        started = opt.resume(tmp_path)
        if started.name is None:
            for step in range(8 + rank):
                push(opt, model, rank, step)
            kept[rank] = seen(opt, model)
            cpudist.barrier()
            opt.leave()
            if rank == 0:
                opt.save_snapshot("here")
            cpudist.barrier()
            return
        assert started.step == 8 + rank
        found = seen(opt, model)
        for name, value in kept[rank].items():
            if name not in ("rows", "dense"):
                assert torch.equal(found[name], value), name

    run(body, 2)
    run(body, 2)
    sums = "slots' sums" if remote else "0 sum"
    assert not torch.equal(kept[0][sums], kept[1][sums])


@pytest.mark.parametrize("first", [False, True], ids=["static first", "remote first"])
def test_a_table_goes_on_as_one_of_the_other_kind(first, tmp_path):
    """With each row's optimizer state, as far as the trainer had any."""
    [(_, _, whole, _)] = geo_job(None, [30], rule="adagrad")
    geo_job(tmp_path, [17], 5, rule="adagrad", remote=first)
    [(started, _, ended, _)] = geo_job(tmp_path, [30], rule="adagrad", remote=not first)
    assert started.step > 0
    assert torch.equal(ended["rows"], whole["rows"])
    assert torch.equal(ended["dense"], whole["dense"])
