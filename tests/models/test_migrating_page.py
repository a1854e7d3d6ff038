# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs every block of docs/migrating.md."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepctr_package import import_deepctr
from model_cases import auc
from patience import PATIENCE_S

import torch_cpudist as cpudist

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"<!-- (\w+): (.+?) -->\n```\w+\n(.*?)```", TEXT, re.DOTALL)
REFUSED = [(about, body) for kind, about, body in BLOCKS if kind == "raises"]


def block(kind, about):
    (body,) = [body for k, a, body in BLOCKS if (k, a) == (kind, about)]
    return body


def execute(body, names=None):
    """Runs a block of the page in this process; returns its names."""
    names = {"__name__": "__main__"} if names is None else names
    exec(compile(body, str(PAGE), "exec"), names)  # noqa: S102
    return names


@pytest.fixture(autouse=True)
def _in_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def group_of_one():
    """torch.distributed's default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_every_block_is_tagged_and_run():
    assert TEXT.count("\n```") == 2 * len(BLOCKS)
    kinds = {(kind, about) for kind, about, _ in BLOCKS if kind != "raises"}
    assert kinds == {
        *(("file", name) for name in ("ddp.py", "train.py")),
        *(("file", f"torchrec_{when}.py") for when in ("before", "after", "open")),
        *(("cell", name) for name in ("resume", "deepctr", "rechub", "start")),
        ("run", "train"),
    }


def make_groups_of_one(monkeypatch):
    """Scripts that make a process group make it of this process alone."""
    make = functools.partial(dist.init_process_group, store=dist.HashStore())
    alone = functools.partial(make, rank=0, world_size=1)
    monkeypatch.setattr(dist, "init_process_group", alone)


def differences(first, second):
    """Largest difference of two checkpoints' weights and Adagrad sums."""
    pairs = [(first["model"][k], second["model"][k]) for k in first["model"]]
    states = first["optimizer"]["state"], second["optimizer"]["state"]
    pairs += [(states[0][i]["sum"], states[1][i]["sum"]) for i in states[0]]
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_ddp_and_its_replacement_leave_the_same_checkpoint(
    launch_forks, tmp_path, monkeypatch
):
    # One process on the joined batches: the samplers of two deal the same samples.
    before = block("file", "ddp.py").replace("batch_size=16", "batch_size=32")
    make_groups_of_one(monkeypatch)
    execute(before)
    checkpoint = tmp_path / "checkpoint.pt"
    expected = torch.load(checkpoint, weights_only=True)
    checkpoint.unlink()
    (tmp_path / "train.py").write_text(block("file", "train.py"))
    program = launch_forks(block("run", "train").strip(), CPUDIST_THREADS=1)
    assert program.wait(PATIENCE_S) == 0, program.text()
    found = torch.load(checkpoint, weights_only=True)
    assert differences(expected, found) <= 1e-6
    for state in (expected, found):
        torch.save(state, checkpoint)
        resumed = execute(block("cell", "resume"))
        again = {"optimizer": resumed["opt"].state_dict()}
        again["model"] = resumed["model"].state_dict()
        cpudist.shutdown()
        assert differences(state, again) == 0


@pytest.mark.parametrize("when", ["before", "after", "open"])
def test_torchrec_and_its_replacement_learn(when, monkeypatch):
    pytest.importorskip("torchrec")
    if when == "before":
        make_groups_of_one(monkeypatch)
    losses = execute(block("file", f"torchrec_{when}.py"))["losses"]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_deepctr_learns():
    import_deepctr()
    names = execute(block("cell", "deepctr"))
    assert auc(names["y"], names["score"]) > 0.8


def test_rechub_learns(tmp_path):
    pytest.importorskip("torch_rechub")
    names = execute(block("cell", "rechub"))
    assert auc((names["items"] % 2).numpy(), names["score"]) > 0.8
    saved = torch.load(tmp_path / "model.pth", weights_only=True)
    for name, value in names["model"].state_dict().items():
        assert torch.equal(saved[name], value), name


@pytest.mark.parametrize(("about", "body"), REFUSED, ids=[a for a, _ in REFUSED])
def test_what_is_refused(about, body, group_of_one):
    if "torchrec" in body:
        pytest.importorskip("torchrec")
    name, message = about.split(": ")
    names = execute(block("cell", "start"))
    with pytest.raises(getattr(cpudist, name), match=re.escape(message)):
        execute(body, names)
    cpudist.shutdown(pull="none")
