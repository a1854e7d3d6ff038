# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A model that was exported says what it said in the cluster."""

from __future__ import annotations

import threading

import pytest
import torch
from export_cases import LARGE, evaluated, net, step, trained
from patience import PATIENCE_S
from snapshot_cases import settle

import torch_cpudist as cpudist
from torch_cpudist.errors import (
    InvalidArgumentError,
    ModelChangedError,
    RemoteTableError,
    SnapshotError,
)
from torch_cpudist.exports.reading import Export
from torch_cpudist.snapshot.reading import Snapshot


@pytest.mark.parametrize("servers", [0, 3])
def test_a_remote_model_predicts_as_in_the_cluster(tmp_path, servers) -> None:
    def body(opt, model, rank):
        cpudist.export(model, tmp_path / "out")
        # It goes on with training.
        found = evaluated(model)
        step(opt, model, 6, rank)
        return found

    expected = trained(body, tmp_path / "snapshots", servers=servers)[0]
    model = net(seed=99)
    with cpudist.load_for_inference(model, tmp_path / "out") as reader:
        assert torch.equal(evaluated(model), expected)
        assert reader.loaded.version.round == 6
        with torch.inference_mode():
            assert torch.equal(evaluated(model), expected)
        reader.verify()


def test_trainer_0_exports_while_others_train(tmp_path) -> None:
    exported = threading.Event()

    def body(opt, model, rank):
        if rank == 0:
            try:
                cpudist.export(model, tmp_path / "out")
            finally:
                exported.set()
        number = 6
        while not exported.is_set():
            step(opt, model, number, rank)
            number += 1
        cpudist.barrier()

    trained(body, tmp_path / "snapshots", strategy=cpudist.Async())
    model = net(seed=99)
    with cpudist.load_for_inference(model, tmp_path / "out") as reader:
        name = Export(tmp_path / "out").manifest.snapshot
        rows = Snapshot(tmp_path / "snapshots" / name).rows(
            "users.weight", torch.arange(50).numpy()
        )
        assert rows.found.sum() > 20
        found = reader.look_up("users.weight", torch.arange(50)).numpy()
        assert (found == rows.columns["weight"])[rows.found].all()


def test_a_group_exports_together(tmp_path) -> None:
    def body(opt, model, rank):
        cpudist.export(model, tmp_path / "out")
        return evaluated(model)

    strategy = cpudist.HalfAsync()  # trainers of a host are a group
    expected = trained(body, tmp_path / "snapshots", strategy=strategy)[0]
    model = net(seed=99)
    with cpudist.load_for_inference(model, tmp_path / "out"):
        assert torch.equal(evaluated(model), expected)


@pytest.mark.parametrize("remote", [True, False])
def test_a_plain_model_gets_all_rows(tmp_path, remote) -> None:
    def body(opt, model, rank):
        cpudist.export(model, tmp_path / "out")
        return evaluated(model)

    folder = tmp_path / "snapshots" if remote else None
    expected = trained(body, folder, remote=remote)[0]
    for plain in (net(remote=False, seed=5), net(remote=True, seed=5)):
        with cpudist.load_for_inference(plain, tmp_path / "out"):
            assert torch.equal(evaluated(plain), expected)


STATIC = {
    "geo": cpudist.Geo(push_every=2),
    "allreduce": cpudist.AllReduce(),
    "reduce": cpudist.Reduce(),
    "async": cpudist.Async(),
    "hybrid": cpudist.Hybrid(dense=cpudist.AllReduce(), sparse=cpudist.Async()),
}


@pytest.mark.parametrize("name", list(STATIC))
def test_static_models_of_every_strategy_are_exported(tmp_path, name) -> None:
    def body(opt, model, rank):
        cpudist.barrier()
        cpudist.export(model, tmp_path / "out")
        return evaluated(model)

    # Over a process group there is one trainer in this process.
    alone = name in ("allreduce", "reduce", "hybrid")
    strategy, trainers = STATIC[name], 1 if alone else 2
    expected = trained(body, remote=False, strategy=strategy, trainers=trainers)[0]
    model = net(remote=False, seed=5)
    with cpudist.load_for_inference(model, tmp_path / "out"):
        assert torch.equal(evaluated(model), expected)


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("cache_bytes", [1 << 20, 0])
def test_remote_tables_under_geo_are_exported(tmp_path, trainers, cache_bytes) -> None:
    """Rows that their trainer has updated, and those that it has given up."""
    left, exported = threading.Barrier(trainers), threading.Event()

    def body(opt, model, rank):
        if rank > 0:
            opt.leave()
        left.wait(PATIENCE_S)
        if rank > 0:
            assert exported.wait(PATIENCE_S)
            return None
        try:
            opt.flush()
            cpudist.export(model, tmp_path / "out")
            opt.flush()
            return evaluated(model)
        finally:
            exported.set()

    strategy = cpudist.Geo(push_every=2, cache_bytes=cache_bytes)
    where = tmp_path / "snapshots"
    expected = trained(body, where, strategy=strategy, trainers=trainers)[0]
    model = net(seed=5)
    with cpudist.load_for_inference(model, tmp_path / "out"):
        assert torch.equal(evaluated(model), expected)


def test_outer_steps_are_exported_by_all_trainers(tmp_path) -> None:
    """As of a barrier: what each has moved is in it, by one outer step more."""

    def body(opt, model, rank):
        cpudist.export(model, tmp_path / "out")
        return evaluated(model)  # buffers are trainer 0's there

    outer = cpudist.Outer(lr=0.7, momentum=0.9)
    strategy = cpudist.Geo(push_every=3, outer=outer)
    where = tmp_path / "snapshots"
    expected, _ = trained(body, where, strategy=strategy, trainers=2)
    model = net(seed=5)
    with cpudist.load_for_inference(model, tmp_path / "out"):
        assert torch.equal(evaluated(model), expected)


def test_tables_are_fetched_once_and_together(tmp_path, caplog) -> None:
    def body(opt, model, rank):
        step(opt, model, 6, rank)
        cpudist.export(model, tmp_path / "out")

    trained(body, remote=False, strategy=cpudist.Sync(), trainers=1)
    assert Export(tmp_path / "out").manifest.version.round == 7
    assert "read, copied or saved as a whole" not in caplog.text


def test_a_hybrid_with_remote_tables_is_exported(tmp_path) -> None:
    def body(opt, model, rank):
        cpudist.export(model, tmp_path / "out")
        opt.flush()
        return evaluated(model)

    strategy = STATIC["hybrid"]
    where = tmp_path / "snapshots"
    expected = trained(body, where, strategy=strategy, trainers=1)[0]
    model = net(seed=5)
    with cpudist.load_for_inference(model, tmp_path / "out"):
        assert torch.equal(evaluated(model), expected)


def test_trainer_0_exports_when_the_others_are_done(tmp_path) -> None:
    def body(opt, model, rank):
        cpudist.barrier()
        if rank == 0:
            cpudist.export(model, tmp_path / "out")
        opt.flush()
        found = evaluated(model)
        cpudist.barrier()
        return found

    where = tmp_path / "snapshots"
    expected = trained(body, where, strategy=cpudist.Async())[0]
    model = net(seed=5)
    with cpudist.load_for_inference(model, tmp_path / "out"):
        assert torch.equal(evaluated(model), expected)


@pytest.mark.parametrize("remote", [True, False])
def test_averages_are_exported(tmp_path, remote) -> None:
    def body(opt, model, rank):
        cpudist.export(model, tmp_path / "out", averaged=True)
        cpudist.barrier()
        with opt.averaged():
            return evaluated(model)

    folder = tmp_path / "snapshots" if remote else None
    expected = trained(body, folder, remote=remote, average=0.9)[0]
    model = net(seed=99)
    with cpudist.load_for_inference(model, tmp_path / "out") as reader:
        torch.testing.assert_close(evaluated(model), expected, rtol=1e-6, atol=1e-7)
        assert reader.loaded.averaged


def test_a_snapshot_is_exported_without_a_cluster(tmp_path) -> None:
    def body(opt, model, rank):
        name = opt.save_snapshot("before")
        found = evaluated(model)
        step(opt, model, 6, rank)
        if rank == 0:
            cpudist.export(model, tmp_path / "within", snapshot=name)
        cpudist.barrier()
        return found, model.norm.running_mean.clone()

    expected, mean = trained(body, tmp_path / "snapshots")[0]
    other = net(seed=3)
    where = tmp_path / "snapshots" / "before"
    cpudist.export(other, tmp_path / "without", snapshot=where)
    for name in ("within", "without"):
        model = net(seed=99)
        with cpudist.load_for_inference(model, tmp_path / name):
            assert torch.equal(evaluated(model), expected)
            assert not torch.equal(model.norm.running_mean, mean)
        assert Export(tmp_path / name).manifest.snapshot == "before"


@pytest.mark.parametrize("averaged", [False, True])
def test_a_snapshot_of_changes_is_exported_with_those_below_it(
    tmp_path, averaged
) -> None:
    def body(opt, model, rank):
        where = tmp_path / "snapshots"
        opt.resume(where, every_steps=100, delta_every_steps=2)
        opt.save_snapshot()
        torch.manual_seed(rank)
        for number in range(4):
            step(opt, model, number, rank)
            settle(opt)
        newest = opt.stats()["snapshot"]["last"]
        cpudist.barrier()
        assert Snapshot(where / newest).manifest.base is not None
        if rank == 0:
            out = tmp_path / "out"
            cpudist.export(model, out, snapshot=newest, averaged=averaged)
        cpudist.barrier()
        if not averaged:
            return evaluated(model)
        with opt.averaged():
            return evaluated(model)

    expected = trained(body, steps=0, average=0.8)[0]
    model = net(seed=99)
    with cpudist.load_for_inference(model, tmp_path / "out"):
        torch.testing.assert_close(evaluated(model), expected, rtol=1e-6, atol=1e-7)


def test_a_model_without_an_optimizer_is_exported(tmp_path) -> None:
    model = net(remote=False)
    cpudist.export(model, tmp_path / "out")
    loaded = net(remote=False, seed=9)
    with cpudist.load_for_inference(loaded, tmp_path / "out"):
        assert torch.equal(evaluated(loaded), evaluated(model))
    for (name, one), two in zip(
        model.state_dict().items(), loaded.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
def test_fewer_bits_are_as_close_as_they_say(tmp_path, dtype) -> None:
    def body(opt, model, rank):
        cpudist.export(model, tmp_path / "out", dtype)
        with torch.no_grad():
            ids = torch.arange(200)
            return model.users(ids).clone(), model.days(ids[:40]).clone()

    users, days = trained(body, tmp_path / "snapshots")[0]
    model = net(seed=99)
    with (
        cpudist.load_for_inference(model, tmp_path / "out") as reader,
        torch.no_grad(),
    ):
        ids = torch.arange(200)
        for found, exact in ((model.users(ids), users), (model.days(ids[:40]), days)):
            largest = exact.abs().amax(1, keepdim=True)
            limit = {
                "fp16": exact.abs() * 2**-11 + 2**-25,
                "bf16": exact.abs() * 2**-8,
                "int8": largest / 127 / 2 * (1 + 2**-8),
            }[dtype]
            assert ((found - exact).abs() <= limit).all()
            assert not torch.equal(found, exact)
        assert torch.equal(reader.look_up("users.weight", ids), model.users(ids))
        assert reader.loaded.dtype == dtype


def test_what_cannot_be_exported_is_refused(tmp_path) -> None:
    def body(opt, model, rank):
        with pytest.raises(SnapshotError, match="resume"):
            cpudist.export(model, tmp_path / "out")
        with pytest.raises(ModelChangedError, match="close"):
            cpudist.load_for_inference(model, tmp_path / "out")
        with pytest.raises(InvalidArgumentError, match="dtype='fp8'"):
            cpudist.export(model, tmp_path / "out", "fp8")
        return None

    trained(body, steps=1)
    with pytest.raises(RemoteTableError, match=r"users\.weight"):
        cpudist.export(net(), tmp_path / "out")
    with pytest.raises(SnapshotError, match="no export"):
        cpudist.load_for_inference(net(), tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    with pytest.raises(SnapshotError, match=r"notes\.txt"):
        cpudist.export(net(remote=False), tmp_path / "full")
    cpudist.export(net(remote=False), tmp_path / "done")
    with pytest.raises(SnapshotError, match="already"):
        cpudist.export(net(remote=False), tmp_path / "done")
    other = torch.nn.Linear(2, 2)
    with pytest.raises(SnapshotError, match="of another model"):
        cpudist.load_for_inference(other, tmp_path / "done")
    model = net()
    with cpudist.load_for_inference(model, tmp_path / "done"):
        with pytest.raises(ModelChangedError, match="close"):
            cpudist.load_for_inference(model, tmp_path / "done")
        with pytest.raises(cpudist.RowOutOfRangeError):
            model.users(torch.tensor([LARGE]))
    with pytest.raises(RemoteTableError):
        model.users(torch.tensor([1]))


@pytest.mark.parametrize("what", ["there", "base", "dtype", "elsewhere", "tables"])
def test_what_is_wrong_is_said_before_a_snapshot_is_saved(tmp_path, what) -> None:
    def body(opt, model, rank):
        cpudist.export(model, tmp_path / "one", "fp16")
        cpudist.export(net(remote=False), tmp_path / f"static-{rank}", "fp16")
        path, dtype, base = tmp_path / "two", "fp16", tmp_path / "one"
        if what == "there":
            path, base = tmp_path / "one", None
        elif what == "base":
            base = tmp_path / "none"
        elif what == "dtype":
            dtype = "fp32"
        elif what == "elsewhere":
            path = tmp_path / "sub" / "two"
        else:
            base = tmp_path / "static-0"
        if rank:  # where trainer 0's files are not
            base = None if base is None else tmp_path / "not-on-this-host"
        expected = (SnapshotError, InvalidArgumentError)
        with pytest.raises(expected) as caught:
            cpudist.export(model, path, dtype, base=base)
        assert rank == 0 or str(caught.value).startswith("trainer 0: ")
        step(opt, model, 6, rank)
        return opt.stats()["snapshot"]["saved"]

    assert trained(body, tmp_path / "snapshots") == [1, 1]


def test_only_trainer_0_looks_at_the_base(tmp_path) -> None:
    def body(opt, model, rank):
        cpudist.export(model, tmp_path / "one")
        step(opt, model, 6, rank)
        base = tmp_path / ("not-on-this-host" if rank else "one")
        cpudist.export(model, tmp_path / "two", base=base)

    trained(body, tmp_path / "snapshots")
    assert Export(tmp_path / "two").manifest.base is not None
