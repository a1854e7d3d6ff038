# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs whose snapshots have what has changed: put together they are the whole of it."""

from __future__ import annotations

import dataclasses
import shutil
import threading

import pytest
import torch
from hybrid_snapshots import hybrid_job
from patience import PATIENCE_S
from snapshot_cases import dense_job, settle
from snapshot_parity import Job, ended, net, seeing
from sync_cases import RULES, Batches, assert_same_bits, build, loss_of, run
from turns import SideBySide
from warm_starts import Setup, ranks
from whole_gradients import check_files, expected, model_of, push

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot

STRATEGIES = {
    "async": lambda: cpudist.Async(sharding=cpudist.Sharding(min_block_size=2)),
    "groups": lambda: cpudist.HalfAsync(group=[[0, 1], [2]]),
}
# A snapshot is written within the step behind it, as it waits for the schedule.
STEPS, STOP = 17, 13
OFTEN = {"delta_every_steps": 2, "full_every": 3, "keep": 20}


def members(folder):
    """Of how many snapshots each consists, the oldest first."""
    found = Directory(folder).committed()
    assert all(one.damage is None for one in found)
    return [len(one.members) for one in reversed(found)]


def assert_goes_on(job, folder, then=None):
    """Trains whole, and in two parts, of which the second begins at a chain."""
    whole = ended(job, STEPS)
    first = ended(job, STOP, folder, every=10)
    for _, started, stats in first:
        assert started.name is None
        assert stats["failed"] == stats["skipped"] == 0
    # A chain has 3 at most, and a whole one comes at step 10.
    assert members(folder) == [1, 2, 3, 1, 1, 2]
    assert first[0][2]["saved"] == 6
    assert first[0][2]["deltas"] == 3
    for name in Directory(folder).names():
        assert Snapshot(folder / name).verify() == []
    again = ended(then or job, STEPS, folder, every=None)
    for (found, started, _), (values, _, _) in zip(again, whole, strict=True):
        assert started.step == 12
        assert_same_bits(found, values)
    # Whoever comes back does not know what has changed before.
    assert members(folder)[-2:] == [1, 2]


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
@pytest.mark.parametrize(("trainers", "servers"), [(1, 0), (2, 3)])
def test_sync_goes_on_from_a_chain(trainers, servers, remote, tmp_path):
    job = Job(trainers, servers, remote=remote, options=OFTEN)
    assert_goes_on(job, tmp_path)


@pytest.mark.parametrize("rule", ["adam", "sgd_momentum", "ftrl"])
def test_with_state_averages_and_another_number_of_servers(rule, tmp_path):
    job = Job(2, 3, rule=rule, remote=True, average=0.9, options=OFTEN)
    assert_goes_on(job, tmp_path, dataclasses.replace(job, servers=2))


def test_seconds_count_beside_steps(tmp_path):
    options = {"delta_every_s": 1e-3, "full_every": 3, "keep": 50}
    results = ended(Job(2, 2, options=options), STOP, tmp_path, every=None)
    assert results[0][2]["deltas"] > 1
    assert max(members(tmp_path)) in (2, 3)


def rows_of(folder, name):
    return sum(f.rows for f in Snapshot(folder / name).manifest.files)


def test_a_delta_has_the_rows_that_have_changed(tmp_path):
    batches = Batches(1, steps=4)

    def body(_):
        model = net(remote=False)
        opt = cpudist.DistributedOptimizer(build(RULES["adam"], model), model)
        opt.resume(tmp_path, delta_every_steps=1)
        for step in range(4):
            opt.zero_grad()
            loss_of(model, batches.part(step, 0)).backward()
            opt.step()
            settle(opt)

    run(body, 1, servers=2, variables=seeing(tmp_path))
    whole, *changed = (one.name for one in reversed(Directory(tmp_path).committed()))
    assert rows_of(tmp_path, whole) == 30
    for step, name in enumerate(changed, 1):
        touched = torch.cat([part.flatten() for part in batches.part(step, 0)[:1]])
        assert rows_of(tmp_path, name) == len(touched.unique())


def train(opt, model, batches, steps):
    for step in steps:
        opt.zero_grad()
        loss_of(model, batches.part(step, 0)).backward()
        opt.step()
        settle(opt)


def one_trainer(folder, body):
    """A job of one trainer that saves a delta after each step."""
    batches = Batches(1, steps=12)

    def whole(_):
        model = net(remote=True)
        opt = cpudist.DistributedOptimizer(build(RULES["adagrad"], model), model)
        opt.resume(folder, delta_every_steps=1, keep=50)
        return body(opt, lambda steps: train(opt, model, batches, steps))

    return run(whole, 1, servers=2, variables=seeing(folder))[0]


def test_where_values_were_stored_comes_a_whole_one_at_once(tmp_path):
    def body(opt, go_on):
        go_on(range(2))
        opt.load_state_dict(opt.state_dict())
        go_on(range(2, 4))
        opt.save_snapshot("mine")  # the user's: nothing is put over it
        go_on(range(4, 5))
        opt.load_snapshot("mine")
        go_on(range(4, 6))
        stats = opt.stats()["snapshot"]
        assert stats["failed"] == stats["skipped"] == 0

    one_trainer(tmp_path, body)
    assert members(tmp_path) == [1, 2, 1, 2, 1, 3, 1, 2]


def test_where_the_base_is_gone_comes_a_whole_one(tmp_path):
    def body(opt, go_on):
        go_on(range(2))
        for name in Directory(tmp_path).names():
            shutil.rmtree(tmp_path / name)
        go_on(range(2, 5))
        return opt.stats()["snapshot"]

    stats = one_trainer(tmp_path, body)
    assert (stats["failed"], stats["saved"], stats["deltas"]) == (1, 4, 2)
    assert members(tmp_path) == [1, 2]


def test_a_broken_chain_is_passed_over_for_the_newest_that_is_whole(tmp_path):
    def body(_, go_on):
        go_on(range(6))

    one_trainer(tmp_path, body)
    names = [one.name for one in reversed(Directory(tmp_path).committed())]
    assert members(tmp_path) == [1, 2, 3, 4, 5, 6]
    (tmp_path / names[3] / "manifest.json").unlink()

    def resumed(opt, _):
        return opt.stats()["steps"]

    assert one_trainer(tmp_path, resumed) == 3
    # A file of rows that is damaged is met while it is loaded.
    file = next((tmp_path / names[1]).glob("s*-t000-0000.safetensors"))
    contents = bytearray(file.read_bytes())
    contents[-40] ^= 1
    file.write_bytes(contents)
    assert one_trainer(tmp_path, resumed) == 1
    with pytest.raises(cpudist.SnapshotCorruptError) as raised:
        Snapshot(tmp_path / names[5])
    assert raised.value.file == f"{names[3]}/manifest.json"
    assert names[5] in str(raised.value)


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
def test_async_has_every_gradient_once_over_chains(remote, tmp_path):
    whole_numbers("async", 3, tmp_path, remote)


def test_half_async_asks_for_deltas(tmp_path):
    whole_numbers("groups", 3, tmp_path, remote=False)


def whole_numbers(kind, trainers, folder, remote):
    shares = (0.5, 0.5, 1.0) if kind == "groups" else (1.0, 1.0, 1.0)
    together = 2 if kind == "groups" else 1  # trainers of trainer 0's group

    def job(steps):
        over = threading.Event()
        near = SideBySide(trainers, apart=3)

        def body(context):
            rank = context.trainer_rank
            model = model_of(remote)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            opt = cpudist.DistributedOptimizer(
                inner, model, strategy=STRATEGIES[kind]()
            )
            started = opt.resume(folder, delta_every_steps=4, full_every=3, keep=50)
            step = started.step
            # Others go on for as long as trainer 0 does: who leaves ends snapshots.
            while step < steps if rank < together else not over.is_set():
                push(opt, model, rank, step)
                step += 1
                if rank == 0:
                    settle(opt)
                near.step_over(rank)
            near.ends(rank)
            over.set()
            cpudist.barrier()
            opt.flush()
            with torch.no_grad():
                rows = model.table(torch.arange(12)).clone()
            settle(opt)
            return started, step, rows, opt.stats()["snapshot"]

        return run(body, trainers, servers=2, variables=seeing(folder))

    first = job(50)
    assert all(one[3]["failed"] == 0 for one in first)
    assert first[0][3]["deltas"] > 1
    found = members(folder)
    assert found == [1 + i % 3 for i in range(len(found))]
    check_files(folder, 1.0, shares)
    again = job(70)
    table, _ = expected([step for _, step, _, _ in again], shares)
    for started, _, rows, _ in again:
        assert started.step > 0
        assert torch.equal(rows, table)


def test_keep_leaves_what_chains_need(tmp_path):
    options = {"delta_every_steps": 2, "full_every": 3, "keep": 2}
    ended(Job(1, 2, options=options), 9, tmp_path, every=None)
    # Of step 8 one with all rows, and that of step 6 with the two below it.
    assert members(tmp_path) == [1, 2, 3, 1]
    ended(Job(1, 2, options=options), 11, tmp_path, every=None)
    assert members(tmp_path) == [1, 1]  # the chain went with its end


@pytest.mark.parametrize("sparse", ["sync", "async"])
def test_tables_of_hybrid_have_deltas(sparse, tmp_path):
    case = {"sparse": sparse, "dense": "allreduce", "remote": True, "rule": "adagrad"}
    resume = {"delta_every_steps": 2, "full_every": 3, "keep": 20}

    def job(folder, steps, **more):
        def body(_):
            return hybrid_job(0, {**case, "steps": steps, **more})

        return run(body, 1, servers=2, variables=seeing(folder))[0]

    whole = job(None, 14)
    first = job(tmp_path, 11, resume=resume)
    assert first["stats"]["failed"] == 0
    assert first["stats"]["deltas"] > 0
    assert max(members(tmp_path)) > 1
    for name in Directory(tmp_path).names():
        assert Snapshot(tmp_path / name).verify() == []
    again = job(tmp_path, 14, resume=resume)
    assert again["step"] > 0
    if sparse == "sync":
        assert_same_bits(again["values"], whole["values"])


def test_tables_of_geo_are_always_whole(tmp_path):
    case = {"sparse": "geo", "dense": "allreduce", "rule": "sgd", "steps": 1}
    case["resume"] = {"path": str(tmp_path), "delta_every_s": 5}
    with pytest.raises(cpudist.SnapshotError, match="snapshots of hybrid are always"):
        run(lambda _: hybrid_job(0, case), 1, variables=seeing(tmp_path))


def test_strategies_without_servers_refuse_deltas_by_name(tmp_path):
    with pytest.raises(cpudist.SnapshotError, match="snapshots of allreduce are"):
        run(
            lambda _: dense_job(
                cpudist.AllReduce(), 0, 1, {"path": tmp_path, "delta_every_s": 5}
            ),
            1,
        )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"delta_every_steps": 0}, "delta_every_steps=0, expected a whole number from"),
        ({"delta_every_steps": 1.5}, "delta_every_steps=1.5"),
        ({"delta_every_s": 0}, "delta_every_s=0, expected seconds above 0"),
        ({"delta_every_s": "5"}, "delta_every_s='5'"),
        ({"full_every": 1}, "full_every=1, expected a whole number from 2 up"),
        ({"full_every": None}, "full_every=None"),
        ({"full_every": 30, "every_steps": 5}, "full_every=30 .*delta_every_steps nor"),
    ],
)
def test_arguments_that_cannot_be(wrong, said, tmp_path):
    def body(_):
        model = net(remote=False)
        opt = cpudist.DistributedOptimizer(build(RULES["sgd"], model), model)
        with pytest.raises(cpudist.InvalidArgumentError, match=said):
            opt.resume(tmp_path, **wrong)

    run(body, 1, variables=seeing(tmp_path))


def test_what_the_next_one_is_put_over_stays_until_it_is_there(tmp_path, monkeypatch):
    """Also where one with all rows is committed between the two."""
    known = Directory.commit
    written, marked = threading.Event(), threading.Event()

    def late(self, manifest, place=None):
        if manifest.number == 2:
            written.set()
            assert marked.wait(PATIENCE_S)
        return known(self, manifest, place)

    monkeypatch.setattr(Directory, "commit", late)

    def body(job):
        job.opt.resume(tmp_path, every_steps=2, delta_every_steps=1, keep=1)
        job.train(0, 1)
        settle(job.opt)
        job.train(1, 2)
        assert written.wait(PATIENCE_S)
        job.train(2, 3)
        marked.set()
        settle(job.opt)
        found = job.opt.stats()["snapshot"]
        assert (found["saved"], found["deltas"], found["failed"]) == (3, 1, 0)

    ranks(Setup(trainers=1), tmp_path, body)
    bases = {
        one.manifest.number: one.manifest.base
        for one in Directory(tmp_path).committed()
    }
    assert sorted(bases) == [1, 3]
    assert bases[1] is None
    assert bases[3] is not None
