# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots among trainers that average by themselves: resumed bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from snapshot_cases import Drawing, batch_of, dense_job, dense_ranks, digest
from sync_cases import ONE_THREAD, run
from whole_gradients import model_of

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.testing import ProcessRanks

START_S = 90.0
OUTER = cpudist.Outer(lr=0.7, momentum=0.9)
STRATEGIES = {
    "allreduce": cpudist.AllReduce(),
    "local_sgd": cpudist.LocalSGD(every=3),
    "outer": cpudist.LocalSGD(every=3, outer=OUTER),
    "reduce": cpudist.Reduce(),
}


def alone(strategy, steps, options=None):
    """One trainer, as a thread of this process."""

    def body(_):
        opt, model, started = dense_job(strategy, 0, steps, options)
        found = digest(model)
        opt.close()
        return found, started, opt

    return run(body, 1)[0]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_one_trainer_goes_on_bit_for_bit(kind, tmp_path):
    strategy = STRATEGIES[kind]
    whole, _, _ = alone(strategy, 20)
    options = {"path": tmp_path, "every_steps": 4, "keep": 2}
    _, started, _ = alone(strategy, 14, options)
    assert (started.step, started.name) == (0, None)
    again, started, _ = alone(strategy, 20, options)
    # Of LocalSGD at the average after step 12, as that of 8 is at 9.
    assert started.step == 12
    assert started.report == ()
    assert again == whole
    assert len(Directory(tmp_path).names()) == 2


def test_it_begins_anew_where_it_is_said_so(tmp_path):
    strategy, options = STRATEGIES["allreduce"], {"path": tmp_path, "every_steps": 4}
    first, _, _ = alone(strategy, 6, options)
    again, started, _ = alone(strategy, 6, {**options, "load": False})
    assert (started.step, started.name) == (0, None)
    assert again == first
    assert len(Directory(tmp_path).names()) == 2


def ranks(trainers, tmp_path, **case):
    variables = {
        **ONE_THREAD,
        "CASE": json.dumps(case),
        "CPUDIST_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
    }
    with ProcessRanks(dense_ranks, trainers, variables=variables) as started:
        return started.results(START_S)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["allreduce", "local_sgd", "reduce"])
def test_two_trainers_go_on_bit_for_bit(strategy, tmp_path):
    every = {"with": {"every": 3}} if strategy == "local_sgd" else {}
    if strategy == "reduce":  # parts of each parameter on both trainers
        every = {"with": {"sharding": {"min_block_size": 2}}}
    whole = ranks(2, tmp_path, strategy=strategy, steps=16, **every)
    first = ranks(
        2, tmp_path, strategy=strategy, steps=10, save="here", resume={}, **every
    )
    assert [one["name"] for one in first] == ["here", "here"]
    assert [one["stats"]["failed"] for one in first] == [0, 0]
    again = ranks(2, tmp_path, strategy=strategy, steps=16, resume={}, **every)
    assert [one["step"] for one in again] == [10, 10]
    assert [one["report"] for one in again] == [[], []]
    if strategy != "local_sgd":
        assert [one["state"] for one in again] == [one["state"] for one in whole]
        assert [one["model"] for one in again] == [one["model"] for one in whole]
    else:
        # save_snapshot averaged in mid interval, as leave() does.
        for name, values in again[0]["model"].items():
            found = torch.tensor(again[1]["model"][name])
            trained = "running" not in name and "num_batches" not in name
            assert not trained or torch.equal(torch.tensor(values), found)


@pytest.mark.processes
def test_more_trainers_than_saved_begin_their_own_anew(tmp_path):
    ranks(2, tmp_path, strategy="allreduce", steps=4, save="two", resume={})
    found = ranks(3, tmp_path, strategy="allreduce", steps=4, resume={})
    assert [one["step"] for one in found] == [4, 4, 4]
    assert [one["report"] for one in found[:2]] == [[], []]
    assert "random generators" in found[2]["report"][0]
    weights = [one["model"]["first.weight"] for one in found]
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.processes
@pytest.mark.parametrize("trainers", [1, 3])
def test_state_of_parts_goes_to_other_owners(trainers, tmp_path):
    case = {"strategy": "reduce", "with": {"sharding": {"min_block_size": 2}}}
    saved = ranks(2, tmp_path, **case, steps=4, save="two", resume={})
    found = ranks(trainers, tmp_path, **case, steps=4, resume={})
    for one in found:
        assert one["step"] == 4
        assert one["state"] == saved[0]["state"]
        for name, values in one["model"].items():
            trained = "running" not in name and "num_batches" not in name
            assert not trained or values == saved[0]["model"][name]
    assert found[0]["report"] == []


def test_a_strategy_without_snapshots_refuses_by_name(tmp_path):
    def body(_):
        model = model_of(remote=False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = cpudist.Hybrid(sparse=cpudist.Geo(outer=cpudist.Outer()))
        opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
        with pytest.raises(cpudist.SnapshotError, match="has no snapshots"):
            opt.resume(tmp_path)
        with pytest.raises(cpudist.InvalidArgumentError, match="resume"):
            opt.save_snapshot()

    run(body, 1)


def test_wrong_arguments_are_refused_before_anything_is_touched(tmp_path):
    def body(_):
        model = Drawing()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(inner, model, strategy="allreduce")
        with pytest.raises(cpudist.ConfigurationError, match="CPUDIST_SNAPSHOT_DIR"):
            opt.resume()
        for options in (
            {"every_steps": 0},
            {"every_steps": 2.5},
            {"every_s": 0},
            {"keep": 0},
            {"state": [model]},
            {"state": {"data": object()}},
        ):
            with pytest.raises(cpudist.InvalidArgumentError):
                opt.resume(tmp_path / "new", **options)
        assert not (tmp_path / "new").exists()
        opt.resume(tmp_path / "new")
        with pytest.raises(cpudist.InvalidArgumentError, match="once"):
            opt.resume(tmp_path / "new")

    run(body, 1)


def parts(kind):
    """A dense job among trainers that average by themselves."""
    model = Drawing()
    inner = torch.optim.NAdam(model.parameters(), lr=0.05)
    opt = cpudist.DistributedOptimizer(inner, model, strategy=kind)

    def train(first, last):
        for step in range(first, last):
            opt.zero_grad()
            model(batch_of(step, 0)).square().mean().backward()
            opt.step()

    return model, inner, opt, train


@pytest.mark.parametrize(
    "kind", [cpudist.AllReduce, lambda: cpudist.LocalSGD(every=2)], ids=["all", "local"]
)
def test_some_of_what_trainers_have_themselves(kind, tmp_path):
    def first(_):
        model, inner, opt, train = parts(kind())
        opt.resume(tmp_path / "old")
        train(0, 4)
        opt.save_snapshot("here")
        state = inner.state[model.first.weight]["exp_avg"].clone()
        return {n: v.clone() for n, v in model.state_dict().items()}, state

    values, state = run(first, 1)[0]

    def then(_):
        model, inner, opt, train = parts(kind())
        opt.resume(tmp_path / "new")
        train(10, 14)
        before = {n: v.clone() for n, v in model.state_dict().items()}
        was = inner.state[model.last.weight]["exp_avg"].clone()
        started = opt.load_snapshot(
            tmp_path / "old" / "here", only=["first.*", "norm.*"]
        )
        assert started.step == 4
        assert set(started.taken) == {
            *("first.weight", "first.bias", "norm.weight", "norm.bias")
        }
        for name, found in model.state_dict().items():
            taken = name.startswith(("first.", "norm."))
            # Buffers of the same name come with them.
            assert torch.equal(found, (values if taken else before)[name]), name
        assert torch.equal(inner.state[model.first.weight]["exp_avg"], state)
        assert torch.equal(inner.state[model.last.weight]["exp_avg"], was)
        with pytest.raises(cpudist.SnapshotError, match=r"there are 'first\.bias'"):
            opt.load_snapshot(tmp_path / "old" / "here", only=["first.bia"])
        started = opt.load_snapshot(
            tmp_path / "old" / "here",
            map={"first.bias": "norm.bias", "norm.bias": "first.bias"},
        )
        assert torch.equal(model.norm.bias, values["first.bias"])
        assert torch.equal(model.first.bias, values["norm.bias"])
        assert (started.step, opt.stats()["steps"]) == (4, 4)
        train(14, 16)

    run(then, 1)
