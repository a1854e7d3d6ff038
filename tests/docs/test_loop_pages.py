# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs every block of docs/training_loop.md and docs/around_the_loop.md."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from loop_pages import (
    BLOCKS,
    TEXT,
    Clicks,
    execute,
    names_of,
    run_block,
    stop_early,
    wrapped,
)
from patience import PATIENCE_S
from sync_cases import ONE_THREAD, assert_same_bits, run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.testing import ProcessRanks

pytestmark = pytest.mark.usefixtures("in_a_folder")


def test_every_block_is_tagged_and_run():
    assert TEXT.count("\n```") == 2 * len(BLOCKS)
    assert set(BLOCKS) == {
        *(("two trainers", n) for n in ("loop", "skip", "averaged", "ema", "stop")),
        *(("two trainers", n) for n in ("save", "resume")),
        ("lightning", "strategy"),
        ("lightning", "fit"),
        ("lightning", "kept"),
        ("two trainers lightning", "loop"),
        ("accelerate", "loop"),
        ("accelerate", "state"),
    }


def both(body, trainers=2):
    return run(lambda context: body(context.trainer_rank), trainers)


@pytest.mark.parametrize("trainers", [1, 2])
def test_after_the_loop_everybody_has_the_trained_model(trainers):
    def body(rank):
        model = execute("two trainers", "loop", names_of(rank))["model"]
        return {name: value.clone() for name, value in model.state_dict().items()}

    found = both(body, trainers)
    assert_same_bits(found[0], found[-1])


def test_a_batch_that_one_trainer_skips_ends_its_round():
    def body(rank):
        names = execute("two trainers", "skip", wrapped(rank))
        return names["opt"].rounds

    assert both(body) == [12, 12]


def test_the_average_is_of_current_rows():
    def body(rank):
        names = wrapped(rank)
        names["torch"].manual_seed(1)
        execute("two trainers", "ema", names)
        names["ema"].n_averaged.zero_()  # the next one takes the values as they are
        names["ema"].update_parameters(names["model"])
        names["opt"].flush()
        averaged = names["ema"].module
        assert type(averaged.bag) is nn.EmbeddingBag
        assert torch.equal(averaged.bag.weight, names["model"].bag.weight)
        assert names["scores"].shape == (1,)

    both(body)


def test_the_servers_average_is_shown_and_copied():
    def body(rank):
        names = names_of(rank)
        torch.manual_seed(0)
        model = names["model"] = cpudist.shard_tables(Clicks(), min_rows=500)
        names["inner"] = torch.optim.Adagrad(model.parameters(), lr=0.1)
        names["copy"] = copy
        execute("two trainers", "averaged", names)
        assert type(names["best"].bag) is nn.EmbeddingBag
        with names["opt"].averaged():
            assert_same_bits(model.state_dict(), names["best"].state_dict())
        assert not torch.equal(model.bag.weight, names["best"].bag.weight)
        assert names["scores"].shape == (1,)

    both(body)


@pytest.mark.processes
def test_all_trainers_stop_after_the_same_epoch_with_the_best_model():
    with ProcessRanks(stop_early, 2, variables=ONE_THREAD) as ranks:
        first, second = ranks.results(PATIENCE_S)
    assert first["epoch"] == second["epoch"] < 49
    for found in (first, second):
        assert found["patience"] == 2
        assert found["plain"]
        assert abs(found["worse"]) <= 1e-9


def test_a_checkpoint_goes_on_where_it_was():
    def body(rank):
        names = wrapped(rank)
        opt, model = names["opt"], names["model"]
        for ids, y in names["loader"]:
            opt.zero_grad()
            F.binary_cross_entropy_with_logits(model(ids), y).backward()
            opt.step()
        execute("two trainers", "save", names)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        opt.close()
        names["model"] = cpudist.shard_tables(Clicks(), min_rows=500)
        execute("two trainers", "resume", names)
        assert_same_bits(before, names["model"].state_dict())
        state = names["opt"].state_dict()["state"]
        saved = torch.load("checkpoint.pt", weights_only=True)["opt"]["state"]
        assert torch.equal(state[0]["sum"], saved[0]["sum"])
        names["opt"].close()

    both(body)


def with_data_loader():
    """Names of a page whose batches come from torch's own loader."""
    names = names_of(0)
    ids, labels = (torch.cat(parts) for parts in zip(*names["loader"], strict=True))
    data = torch.utils.data.TensorDataset(ids, labels)
    names["loader"] = torch.utils.data.DataLoader(data, batch_size=8)
    return names


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_by_the_strategy_and_leaves_a_plain_model(tmp_path):
    pytest.importorskip("lightning")
    names = execute("lightning", "strategy", with_data_loader())
    (file,) = tmp_path.rglob("*.ckpt")
    saved = torch.load(file, weights_only=True)["state_dict"]
    assert_same_bits(saved, names["module"].state_dict())
    assert names["trainer"].global_step == 24
    assert type(names["module"].net.bag) is nn.EmbeddingBag
    assert names["module"].net.bag.sparse


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_lightning_goes_on_from_its_last_checkpoint(tmp_path):
    pytest.importorskip("lightning")
    whole = BLOCKS["lightning", "strategy"]
    names = with_data_loader()
    define = whole[: whole.index("module = Module()")]
    exec(compile(define, "strategy", "exec"), names)  # noqa: S102
    for _ in range(2):  # the second time it has nothing left to do
        execute("lightning", "kept", names)
        assert names["trainer"].global_step == 48
    (snapshot,) = (tmp_path / "snapshots").iterdir()
    assert snapshot.name.startswith("ckpt-")


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_and_saves_current_rows(tmp_path):
    pytest.importorskip("lightning")
    names = execute("lightning", "fit", with_data_loader())
    (file,) = tmp_path.rglob("*.ckpt")
    saved = torch.load(file, weights_only=True)["state_dict"]
    assert_same_bits(saved, names["module"].state_dict())
    assert names["trainer"].global_step == 24


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_a_lightning_module_is_trained_by_the_loop():
    pytest.importorskip("lightning")
    whole = BLOCKS["lightning", "fit"]
    define = whole[: whole.index("cpudist.init()")]

    def body(rank):
        names = names_of(rank)
        exec(compile(define, "fit", "exec"), names)  # noqa: S102
        execute("two trainers lightning", "loop", names)
        names["opt"].flush()
        return {k: v.clone() for k, v in names["module"].state_dict().items()}

    one, other = both(body)
    assert_same_bits(one, other)


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_accelerate_deals_batches(tmp_path):
    pytest.importorskip("accelerate")
    names = execute("accelerate", "loop", with_data_loader())
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_same_bits(saved, names["model"].state_dict())
    assert names["opt"].closed


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")
def test_accelerates_state_takes_remote_rows_along(tmp_path):
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    first = execute("accelerate", "state", with_data_loader())
    torch.manual_seed(1)
    # Again, but for the training: what it has was loaded.
    body = BLOCKS["accelerate", "state"].replace("in dealt:", "in ():")
    body = body.replace('accelerator.save_state("state")', "")
    names = run_block(body, "state", with_data_loader())
    assert torch.equal(names["rows"], first["rows"])
    assert names["opt"].stats()["steps"] == first["opt"].stats()["steps"] == 12
