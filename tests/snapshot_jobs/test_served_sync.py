# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sync resumed from servers' snapshots ends bit for bit where it would have ended."""

from __future__ import annotations

import dataclasses
import errno
import os

import pytest
import torch
from snapshot_parity import Job, ended, net, rows_of, seeing
from sync_cases import RULES, Batches, assert_same_bits, build, loss_of, run

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.reading import Snapshot

STEPS, STOP = 14, 10


def assert_goes_on(job, folder, then=None):
    """Trains whole, and in two parts; the second may be another job."""
    whole = ended(job, STEPS)
    first = ended(job, STOP, folder)
    assert all(started.name is None for _, started, _ in first)
    assert all(stats["failed"] == 0 for _, _, stats in first)
    again = ended(then or job, STEPS, folder)
    for (found, started, _), (expected, _, _) in zip(again, whole, strict=True):
        assert started.step == 8
        assert_same_bits(found, expected)
    return again


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
@pytest.mark.parametrize(
    ("trainers", "servers"), [(1, 0), (1, 2), (2, 0), (2, 3), (3, 1), (3, 0)]
)
def test_every_layout(trainers, servers, remote, tmp_path):
    assert_goes_on(Job(trainers, servers, remote=remote), tmp_path)


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
@pytest.mark.parametrize("rule", ["adam", "sgd_momentum", "row_wise_adagrad", "ftrl"])
def test_every_kind_of_state(rule, remote, tmp_path):
    assert_goes_on(Job(2, 2, rule=rule, remote=remote), tmp_path)


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
def test_averages(remote, tmp_path):
    assert_goes_on(Job(2, 2, average=0.8, remote=remote), tmp_path)


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
@pytest.mark.parametrize("wire", ["int8", "bf16"])
def test_what_a_lossy_wire_holds_back(wire, remote, tmp_path):
    assert_goes_on(Job(2, 2, remote=remote, wire=wire), tmp_path)


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
def test_with_batches_read_ahead(remote, tmp_path):
    assert_goes_on(Job(2, 0, prefetch=3, remote=remote), tmp_path)


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 2), (2, 5)])
def test_another_number_of_servers(before, after, remote, tmp_path):
    job = Job(2, before, rule="adam", remote=remote, average=0.9)
    assert_goes_on(job, tmp_path, dataclasses.replace(job, servers=after))


@pytest.mark.parametrize("remote", [False, True], ids=["to static", "to remote"])
def test_static_and_remote_tables_load_each_other(remote, tmp_path):
    """Rows that nobody has trained are zeros in both."""
    job = Job(2, 2, remote=not remote)
    whole = ended(job, STEPS)
    ended(job, STOP, tmp_path)
    again = ended(dataclasses.replace(job, remote=remote), STEPS, tmp_path)
    for (found, started, _), (expected, _, _) in zip(again, whole, strict=True):
        assert started.step == 8
        names = [n for n in expected if not n.startswith("state")]
        for name in names:
            assert torch.equal(found[name], expected[name]), name


def trained(model, opt, batches, rank, steps):
    for step in steps:
        opt.zero_grad()
        loss_of(model, batches.part(step, rank)).backward()
        opt.step()


def test_save_and_load_by_name_while_a_run_goes_on(tmp_path):
    batches = Batches(2, steps=12)

    def body(context):
        rank = context.trainer_rank
        model = net(remote=False)
        opt = cpudist.DistributedOptimizer(build(RULES["adam"], model), model)
        opt.resume(tmp_path)
        trained(model, opt, batches, rank, range(5))
        assert opt.save_snapshot("five") == "five"
        trained(model, opt, batches, rank, range(5, 12))
        first = rows_of(model), model.last.weight.detach().clone()
        assert opt.load_snapshot("five").step == 5
        trained(model, opt, batches, rank, range(5, 12))
        assert torch.equal(rows_of(model), first[0])
        assert torch.equal(model.last.weight, first[1])
        return opt.stats()["steps"]

    assert run(body, 2, servers=2, variables=seeing(tmp_path)) == [12, 12]
    assert Snapshot(tmp_path / "five").verify() == []


def test_tables_that_come_and_go_are_reported(tmp_path):
    class Two(torch.nn.Module):
        def __init__(self, names):
            super().__init__()
            for name in names:
                table = torch.nn.Embedding(8, 2, sparse=True)
                torch.nn.init.ones_(table.weight)
                self.add_module(name, table)
            self.dense = torch.nn.Linear(2, 1)

        def forward(self, ids):
            tables = [m for n, m in self.named_children() if n != "dense"]
            return self.dense(sum(table(ids) for table in tables)).sum()

    def body(names, save):
        def train(_):
            model = Two(names)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            opt = cpudist.DistributedOptimizer(inner, model)
            started = opt.resume(tmp_path)
            if save:
                model(torch.tensor([1, 2])).backward()
                opt.step()
                opt.save_snapshot(save)
            opt.flush()
            return started, model.state_dict()

        return run(train, 1, servers=1, variables=seeing(tmp_path))[0]

    _, first = body(["kept", "gone"], "one")
    started, found = body(["kept", "new"], None)
    told = " | ".join(started.report)
    assert "table 'new.weight' is not in the snapshot" in told
    assert "'gone.weight' of the snapshot is not in the model" in told
    assert torch.equal(found["kept.weight"], first["kept.weight"])
    assert torch.equal(found["new.weight"], torch.ones(8, 2))

    def other(_):
        model = torch.nn.Sequential(torch.nn.Linear(3, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(inner, model)
        with pytest.raises(cpudist.SnapshotError, match="nothing of this model"):
            opt.resume(tmp_path)

    run(other, 1, servers=1, variables=seeing(tmp_path))


def test_two_optimizers_have_snapshots_of_their_own(tmp_path):
    def body(steps):
        def train(_):
            models = [torch.nn.Linear(2, 1) for _ in range(2)]
            opts = []
            for model in models:
                torch.nn.init.ones_(model.weight)
                inner = torch.optim.SGD(model.parameters(), lr=0.1)
                opts.append(cpudist.DistributedOptimizer(inner, model))
            started = [opt.resume(tmp_path) for opt in opts]
            for model, opt, count in zip(models, opts, (1, 3), strict=True):
                for _ in range(count * steps):
                    opt.zero_grad()
                    model(torch.ones(1, 2)).sum().backward()
                    opt.step()
                if steps:
                    opt.save_snapshot()
            return [one.step for one in started], [m.weight.clone() for m in models]

        return run(train, 1, servers=1, variables=seeing(tmp_path))[0]

    _, first = body(2)
    steps, again = body(0)
    assert steps == [2, 6]
    assert all(map(torch.equal, first, again))
    suffixes = sorted(name.split("-")[3:] for name in Directory(tmp_path).names())
    assert suffixes == [[], ["s1"]]


class Unsynchronised(Files):
    """A disk that keeps nothing that is committed."""

    def rename(self, old, new):
        if new.name == "manifest.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().rename(old, new)


def test_what_fails_on_trainer_0_is_raised_on_all(tmp_path):
    def body(context):
        model = net(remote=False)
        opt = cpudist.DistributedOptimizer(build(RULES["adam"], model), model)
        opt.resume(tmp_path)
        if context.trainer_rank == 0:
            opt.snapshots.directory.files = Unsynchronised()
        with pytest.raises(cpudist.SnapshotError, match=r"trainer 0|Input/output"):
            opt.save_snapshot("here")

    run(body, 2, variables=seeing(tmp_path))
    assert Directory(tmp_path).names() == []


def test_a_damaged_row_file_is_passed_over(tmp_path):
    job = Job(1, 1, options={"keep": 5})
    ended(job, 9, tmp_path)
    newest, before = (one.name for one in Directory(tmp_path).committed())
    [file] = (tmp_path / newest).glob("s000-t000-*.safetensors")
    contents = bytearray(file.read_bytes())
    contents[-40] ^= 1
    file.write_bytes(contents)
    whole = ended(job, STEPS)
    [(found, started, _)] = ended(job, STEPS, tmp_path)
    assert started.name == before
    assert_same_bits(found, whole[0][0])

    def body(_):
        model = net(remote=False)
        opt = cpudist.DistributedOptimizer(build(RULES["adagrad"], model), model)
        opt.resume(tmp_path)
        with pytest.raises(cpudist.SnapshotCorruptError, match=file.name):
            opt.load_snapshot(newest)

    run(body, 1, servers=1, variables=seeing(tmp_path))


def test_servers_of_their_own_must_see_the_directory(tmp_path):
    def body(_):
        model = net(remote=False)
        opt = cpudist.DistributedOptimizer(build(RULES["sgd"], model), model)
        with pytest.raises(cpudist.ConfigMismatchError, match="server 0"):
            opt.resume(tmp_path)

    run(body, 1, servers=1)
