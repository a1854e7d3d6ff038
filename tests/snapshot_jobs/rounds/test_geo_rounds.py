# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo with an outer optimizer: cuts between two outer steps, and what has moved since.

Trainers of these jobs step in turn and answers are awaited, so that a run has no luck
in it: what goes on from a snapshot ends with the bits of a run that was not disturbed.
"""

from __future__ import annotations

import threading

import pytest
import torch
from patience import PATIENCE_S
from snapshot_cases import settle, until
from snapshot_parity import net, seeing
from sync_cases import ROWS, RULES, Batches, assert_same_bits, build, loss_of, run
from whole_gradients import expected, model_of, push, saved_values

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.trainer_files import read_trainer

OUTER = cpudist.Outer(lr=0.7, momentum=0.9, nesterov=True)
SMALL = cpudist.Sharding(min_block_size=8)


def geo(**options):
    chosen = {"push_every": 3, "outer": OUTER, "sharding": SMALL, **options}
    return cpudist.Geo(**chosen)


class InTurn:
    """Trainers make their n-th steps together, and take answers in at the next one."""

    def __init__(self, trainers):
        self.trainers = trainers
        self.barrier = threading.Barrier(trainers)

    def meet(self):
        self.barrier.wait(PATIENCE_S)

    def step_is_over(self, opt):
        """The push of the step, if it has made one, is answered, and so is a mark."""
        self.meet()
        opt.trained.opened.drain()
        settle(opt)
        self.meet()


@torch.no_grad()
def seen(opt, model):
    """All that training goes on from: values and state of rows that are here."""
    found = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if name != "bag.weight"
    }
    found["rows"] = model.bag(torch.arange(ROWS).unsqueeze(1)).clone()
    for table in opt.trained.tables:
        kept = table.trained_rows()
        order = kept["rows"].argsort()
        found |= {f"{k} of rows": kept[k][order] for k in ("rows", "counts", "state")}
    state = opt.state_dict()
    for one in state.get("optimizers", [state]):
        for number, parts in one["state"].items():
            for name, value in parts.items():
                found[f"state {number} {name}"] = torch.as_tensor(value).clone()
    return found


def job(
    folder,
    steps,
    trainers=1,
    servers=1,
    every=None,
    remote=False,
    saves=None,
    back=None,
    **options,
):
    """Trains up to a step, from where the newest snapshot is.

    Args:
        saves: after which step ``"named"`` is saved.
        back: after which step it is gone back to, once.
    """
    turns, batches = InTurn(trainers), Batches(trainers, steps=steps)
    models = [net(remote) for _ in range(trainers)]

    def body(context):
        rank = context.trainer_rank
        model = models[rank]
        inners = build(RULES["adagrad"], model)
        opt = cpudist.DistributedOptimizer(inners, model, strategy=geo(**options))
        started = None
        if folder is not None:
            started = opt.resume(folder, every_steps=every)
        begun, counted, gone_back = seen(opt, model), cpudist.global_step(), False
        step = started.step if started else 0
        while step < steps:
            opt.zero_grad()
            loss_of(model, batches.part(step, rank)).backward()
            opt.step()
            step += 1
            turns.step_is_over(opt)
            if step == saves and not gone_back:
                assert opt.save_snapshot("named") == "named"
            if step == back and not gone_back:
                gone_back, step = True, opt.load_snapshot("named").step
                assert step == saves
        # As the last step has left it: the end hands the rest on.
        ended = seen(opt, model)
        turns.meet()
        return started, begun, ended, counted, opt.stats().get("snapshot")

    return run(body, trainers, servers=servers, variables=seeing(folder))


def trees(folder, name):
    """What every trainer has in its file, of its strategy."""
    directory = Directory(folder)
    return [
        read_trainer(directory.folder(name), one)["driver"]
        for one in directory.manifest(name).trainers
    ]


def killed_before_its_end(folder):
    """Removes snapshots of moments at which all is on servers, as the end's are."""
    for found in Directory(folder).committed():
        moved = [tree["since"]["steps"] for tree in trees(folder, found.name)]
        if all(moved):
            return found.name
        Directory(folder).remove(found.name)
    raise AssertionError(folder)


CASES = [
    {},
    {"push_every": 1},
    {"push_every": 4, "remote": True},
    {"trainers": 2, "servers": 2},
    {"trainers": 2, "servers": 0, "push_every": 1, "remote": True},
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda one: " ".join(map(str, one.values()))
)
def test_goes_on_bit_for_bit(case, tmp_path):
    """Values, optimizers here and the outer one on servers, and what has moved."""
    undisturbed = job(tmp_path / "whole", 31, every=5, **case)
    first = job(tmp_path / "two", 18, every=5, **case)
    newest = killed_before_its_end(tmp_path / "two")
    handed_on = Directory(tmp_path / "two").manifest(newest).version.steps
    trained = trees(tmp_path / "two", newest)
    assert [tree["since"]["steps"] for tree in trained] == [1] * len(trained)
    again = job(tmp_path / "two", 31, every=5, **case)
    for (_, _, whole, *_), (*_, stats), (started, _, ended, counted, more) in zip(
        undisturbed, first, again, strict=True
    ):
        assert (started.name, stats["failed"], more["failed"]) == (newest, 0, 0)
        assert 5 <= started.step < 18
        assert_same_bits(ended, whole)
        assert counted == handed_on + 1
    assert again[0][4]["saved"] > 0


def test_with_another_number_of_servers(tmp_path):
    undisturbed = job(tmp_path / "whole", 31, trainers=2, servers=3, every=5)
    job(tmp_path / "two", 18, trainers=2, servers=3, every=5)
    killed_before_its_end(tmp_path / "two")
    again = job(tmp_path / "two", 31, trainers=2, servers=1, every=5)
    for (_, _, whole, *_), (_, _, ended, *_) in zip(undisturbed, again, strict=True):
        assert_same_bits(ended, whole)


def test_snapshots_change_nothing(tmp_path):
    """But where an exchange is always due: then each of them keeps one back a step."""
    saving = job(tmp_path, 30, trainers=2, every=4)
    without = job(None, 30, trainers=2)
    for (_, _, one, *_, stats), (_, _, other, *_) in zip(saving, without, strict=True):
        assert stats["saved"] > 1
        assert_same_bits(one, other)


def test_the_script_saves_at_a_barrier_and_goes_back(tmp_path):
    """To values that all trainers have, with nothing moved since."""
    ended = job(tmp_path, 20, trainers=2, saves=8, back=13)
    other = job(tmp_path / "other", 20, trainers=2, saves=8)
    for (_, _, one, *_), (_, _, two, *_) in zip(ended, other, strict=True):
        assert_same_bits(one, two)
    for tree in trees(tmp_path, "named"):
        assert tree["since"]["steps"] == 0
        assert not tree["moved"]["dense"]
        assert all(len(one["rows"]) == 0 for one in tree["moved"]["tables"].values())
    snapshot = Snapshot(tmp_path / "named")
    assert snapshot.verify() == []
    [first, second] = job(tmp_path, 8, trainers=2)
    for _, begun, *_ in (first, second):
        weight = snapshot.rows("bag.weight", torch.arange(ROWS).numpy())
        rows = torch.from_numpy(weight.columns["weight"].copy())
        assert torch.equal(begun["rows"], rows)
        bias = torch.from_numpy(snapshot.dense("last.bias").copy())
        assert torch.equal(begun["last.bias"], bias)


def test_who_takes_values_alone_begins_without_movement(tmp_path):
    """A warm start; and trainers that the snapshot has not had."""
    job(tmp_path, 18, trainers=2, every=5)
    newest = killed_before_its_end(tmp_path)
    bias = torch.from_numpy(Snapshot(tmp_path / newest).dense("last.bias").copy())
    steps = Directory(tmp_path).manifest(newest).trainers[0].steps
    [first, second, third] = job(tmp_path, steps, trainers=3)
    assert not torch.equal(first[1]["last.bias"], bias)
    assert not torch.equal(second[1]["last.bias"], bias)
    assert torch.equal(third[1]["last.bias"], bias)

    def body(_):
        model = net(remote=False)
        inners = build(RULES["adagrad"], model)
        opt = cpudist.DistributedOptimizer(inners, model, strategy=geo())
        opt.resume(tmp_path / "new")
        opt.load_snapshot(tmp_path / newest, only=["last.*"])
        assert torch.equal(model.last.bias, bias)
        assert opt.trained.exchange.moved_count(0) == 0

    run(body, 1)


def test_another_strategy_says_what_it_does_not_take(tmp_path):
    job(tmp_path, 18, every=5)
    killed_before_its_end(tmp_path)

    def body(_):
        model = net(remote=False)
        inners = build(RULES["adagrad"], model)
        strategy = cpudist.Geo(push_every=3, sharding=SMALL)
        opt = cpudist.DistributedOptimizer(inners, model, strategy=strategy)
        started = opt.resume(tmp_path)
        assert any("had moved since its last exchange" in o for o in started.report)

    run(body, 1)


# -- trainers that nobody keeps together -----------------------------------------------


def played(folder, steps, every):
    """Two trainers at their own pace; the outer step is the mean of what they moved."""
    models = [model_of(remote=False) for _ in range(2)]

    def body(context):
        rank = context.trainer_rank
        model = models[rank]
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        strategy = geo(push_every=3, outer=cpudist.Outer(lr=1.0))
        opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
        started = opt.resume(folder, every_steps=every)
        begun = model.dense.detach().clone()
        for step in range(started.step, steps[rank]):
            push(opt, model, rank, step)
        settle(opt)
        return started, begun, opt.stats()["snapshot"]

    return run(body, 2, servers=2, variables=seeing(folder))


def check_movement(folder):
    """Means of what was handed on and what has moved since are all steps, once."""
    names = Directory(folder).names()
    for name in names:
        snapshot = Snapshot(folder / name)
        assert snapshot.verify() == []
        weight, dense = saved_values(snapshot)
        weight, dense = 2 * weight, 2 * dense
        for tree in trees(folder, name):
            rows = tree["moved"]["tables"]["table.weight"]
            weight[rows["rows"]] += rows["values"] - rows["agreed"]
            for one in tree["moved"]["dense"].values():
                dense += one["values"] - one["agreed"]
        steps = [one.steps for one in snapshot.manifest.trainers]
        table, rest = expected(steps)
        assert torch.equal(weight, table), (name, steps)
        assert torch.equal(dense, rest), (name, steps)
    return len(names)


def test_all_movement_is_in_them_once(tmp_path):
    """But for the last outer steps, which may be of one that ends later alone."""
    for *_, stats in played(tmp_path, [61, 61], 7):
        assert stats["failed"] == 0
    newest = killed_before_its_end(tmp_path)
    assert check_movement(tmp_path) > 0
    for started, _, stats in played(tmp_path, [130, 130], 9):
        assert (started.name, stats["failed"]) == (newest, 0)
    assert killed_before_its_end(tmp_path) != newest
    assert check_movement(tmp_path) > 0


def test_a_barrier_beside_a_save_that_was_asked_for_ends(tmp_path):
    """Each barrier comes when trainer 0 has just asked, and is the end of a round."""
    models = [model_of(remote=False) for _ in range(2)]

    def body(context):
        rank = context.trainer_rank
        inner = torch.optim.SGD(models[rank].parameters(), lr=1.0)
        strategy = geo(push_every=1000, outer=cpudist.Outer(lr=1.0))
        opt = cpudist.DistributedOptimizer(inner, models[rank], strategy=strategy)
        opt.resume(tmp_path, every_steps=4)
        for step in range(16):
            push(opt, models[rank], rank, step)
            if step % 4 == 3:
                cpudist.barrier()
        settle(opt)
        cpudist.barrier()
        until(lambda: opt.stats()["snapshot"]["saved"] > 0)

    run(body, 2, servers=1, variables=seeing(tmp_path))
    # Each is of a barrier: all is on servers.
    for name in Directory(tmp_path).names():
        assert [tree["since"]["steps"] for tree in trees(tmp_path, name)] == [0, 0]
    assert check_movement(tmp_path) > 0


def test_beside_trainers_that_average_in_step_it_is_refused_by_name(tmp_path):
    def body(_):
        model = net(remote=False)
        inners = build(RULES["adagrad"], model)
        rounds = cpudist.Geo(push_every=3, outer=OUTER)
        strategy = cpudist.Hybrid(dense=cpudist.AllReduce(), sparse=rounds)
        opt = cpudist.DistributedOptimizer(inners, model, strategy=strategy)
        with pytest.raises(cpudist.SnapshotError, match=r"Hybrid.*Geo\(outer="):
            opt.resume(tmp_path)

    run(body, 1)
