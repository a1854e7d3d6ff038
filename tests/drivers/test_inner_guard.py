# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What scripts do to a model or optimizer that is wrapped: noticed, never ignored."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from sync_cases import run as run_trainers
from torch import nn

import torch_cpudist as cpudist


def alone(body):
    """Runs ``body()`` in a world of one and shuts it down unless the body did."""

    def rank(context):
        body(context)

    run_trainers(rank, 1)


class Net(nn.Module):
    """A table and a dense layer."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(5, 2, sparse=True)
        self.head = nn.Linear(2, 1)
        nn.init.zeros_(self.rows.weight)

    def forward(self, ids):
        """Scores ids."""
        return self.head(self.rows(ids)).sum()


def wrap(model, inner=None):
    inner = inner or torch.optim.SGD(model.parameters(), lr=1.0)
    return inner, cpudist.DistributedOptimizer(inner, model)


def train_row(table, optimizer, row, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        table(torch.tensor([row])).sum().backward()
        optimizer.step()


# ---- the model after training ------------------------------------------------------


def test_the_model_is_whole_after_shutdown():
    def body(context):
        table = nn.Embedding(3, 1, sparse=True)
        nn.init.zeros_(table.weight)
        _, optimizer = wrap(table)
        train_row(table, optimizer, 1, steps=3)
        context.shutdown()
        assert table.weight.flatten().tolist() == [0, -3, 0]

    alone(body)


def test_every_trainer_has_the_model_after_shutdown():
    def body(context):
        table = nn.Embedding(4, 1, sparse=True)
        nn.init.zeros_(table.weight)
        _, optimizer = wrap(table)
        train_row(table, optimizer, context.trainer_rank, steps=2)
        context.barrier()
        context.shutdown()
        assert table.weight.flatten().tolist() == [-1, -1, 0, 0]

    run_trainers(body, 2)


def test_shutdown_can_leave_rows_as_they_are():
    def body(context):
        table = nn.Embedding(3, 1, sparse=True)
        nn.init.zeros_(table.weight)
        _, optimizer = wrap(table)
        train_row(table, optimizer, 1, steps=3)
        context.shutdown("none")
        assert table.weight[1].item() == -2  # as last looked up

    alone(body)


def test_shutdown_keeps_what_was_written_after_the_last_step(caplog):
    def body(context):
        model = Net()
        _, optimizer = wrap(model)
        model(torch.tensor([1])).backward()
        optimizer.step()
        with torch.no_grad():
            model.head.weight.fill_(7)
        context.shutdown()
        assert model.head.weight.flatten().tolist() == [7, 7]

    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        alone(body)
    assert "shutdown leaves the model as it is" in caplog.text
    assert "head.weight" in caplog.text


def test_flush_does_not_discard_what_was_written():
    def body(context):
        model = Net()
        _, optimizer = wrap(model)
        loaded = {k: torch.full_like(v, 7) for k, v in model.state_dict().items()}
        model.load_state_dict(loaded)
        with pytest.raises(cpudist.ModelChangedError, match="store_model"):
            optimizer.flush()
        assert model.head.bias.item() == 7
        optimizer.store_model(all_rows=True)
        optimizer.flush()
        assert model.rows.weight[3, 0].item() == 7
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        optimizer.flush(overwrite=True)
        assert model.rows.weight[3, 0].item() == 7

    alone(body)


@pytest.mark.parametrize("save", [nn.Module.state_dict, copy.deepcopy])
def test_saving_old_rows_is_warned_of_once(save, caplog):
    def body(context):
        model = Net()
        _, optimizer = wrap(model)
        train_row(model.rows, optimizer, 1)
        saved = save(model)
        save(model)
        weight = saved["rows.weight"] if isinstance(saved, dict) else saved.rows.weight
        assert weight[:, 0].tolist() == [0, -1, 0, 0, 0]

    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        alone(body)
    assert caplog.text.count("opt.flush()") == 1
    assert "'rows.weight'" in caplog.text


def test_saving_after_a_flush_is_not_warned_of(caplog):
    def body(context):
        model = Net()
        _, optimizer = wrap(model)
        train_row(model.rows, optimizer, 1)
        optimizer.flush()
        assert model.state_dict()["rows.weight"][1, 0].item() == -1

    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        alone(body)
    assert caplog.text == ""


# ---- the wrapped optimizer -----------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("step", lambda inner: inner.step()),
        ("state_dict", lambda inner: inner.state_dict()),
        ("load_state_dict", lambda inner: inner.load_state_dict({})),
    ],
)
def test_the_wrapped_optimizer_is_not_used_by_itself(what, call):
    def body(context):
        model = nn.Linear(2, 1)
        inner, optimizer = wrap(model)
        model(torch.ones(1, 2)).sum().backward()
        before = model.weight.detach().clone()
        with pytest.raises(cpudist.ModelChangedError, match=what):
            call(inner)
        assert torch.equal(model.weight, before)
        optimizer.step()
        optimizer.close()
        if what != "load_state_dict":
            call(inner)  # its own again

    alone(body)


def test_a_group_added_to_the_wrapped_optimizer_is_noticed():
    def body(context):
        model = Net()
        inner, optimizer = wrap(model, torch.optim.SGD(model.rows.parameters(), lr=1.0))
        inner.add_param_group({"params": list(model.head.parameters())})
        model(torch.tensor([1])).backward()
        with pytest.raises(cpudist.ModelChangedError, match="Build a new"):
            optimizer.step()

    alone(body)


@pytest.mark.parametrize("frozen", ["head.weight", "rows.weight"])
def test_a_parameter_that_was_unfrozen_later_is_noticed(frozen):
    def body(context):
        model = Net()
        model.get_parameter(frozen).requires_grad_(False)
        _, optimizer = wrap(model)
        model(torch.tensor([1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.get_parameter(frozen).requires_grad_(True)
        model(torch.tensor([1])).backward()
        with pytest.raises(cpudist.ModelChangedError, match=frozen):
            optimizer.step()
        _, optimizer = wrap(model)
        optimizer.zero_grad()
        before = model.get_parameter(frozen).detach().clone()
        model(torch.tensor([1])).backward()
        optimizer.step()
        optimizer.flush()
        assert not torch.equal(model.get_parameter(frozen), before)

    alone(body)


def test_a_grad_scaler_is_refused():
    def body(context):
        model = nn.Linear(2, 1)
        _, optimizer = wrap(model)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        with pytest.raises(cpudist.UnsupportedOptimizerError, match="bfloat16"):
            scaler.step(optimizer)

    alone(body)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_distributed_optimizer_has_no_copies(duplicate):
    def body(context):
        _, optimizer = wrap(nn.Linear(2, 1))
        with pytest.raises(cpudist.UnsupportedOptimizerError, match="state_dict"):
            duplicate(optimizer)

    alone(body)


def test_dense_parameters_that_were_replaced_are_noticed():
    """Without a table there is no lookup that would notice."""

    def body(context):
        model = nn.Linear(3, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = cpudist.DistributedOptimizer(inner, model)
        model.load_state_dict(
            {k: v.clone() for k, v in model.state_dict().items()}, assign=True
        )
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(cpudist.ModelChangedError, match=r"Linear.weight.*assign"):
            optimizer.step()

    alone(body)


# ---- modules in the place of others ------------------------------------------------


@pytest.mark.parametrize("name", ["rows", "head", "inside"])
@pytest.mark.parametrize("strategy", ["sync", "async", "geo", "allreduce"])
def test_a_module_in_the_place_of_another_is_told_at_the_next_step(name, strategy):
    def body(context):
        model = nn.Sequential(Net())
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = cpudist.DistributedOptimizer(inner, model, strategy)
        train_row(model, optimizer, 1)
        if name == "inside":
            model[0] = Net()
        else:
            setattr(model[0], name, getattr(Net(), name))
        parent, child = ("Sequential", "0") if name == "inside" else ("Net", name)
        words = f"module '{child}' of the {parent}: another .* train none of its param"
        with pytest.raises(cpudist.ModelChangedError, match=words):
            train_row(model, optimizer, 1)
        optimizer.close()
        _, optimizer = wrap(model)
        train_row(model, optimizer, 1)

    alone(body)


def test_modules_put_around_others_or_taken_out_are_no_replacement():
    def body(context):
        model = Net()
        model.other = nn.Linear(2, 1)
        _, optimizer = wrap(model)
        train_row(model, optimizer, 1)
        model.head = nn.Sequential(model.head)
        train_row(model, optimizer, 1)
        model.other = nn.Identity()
        train_row(model, optimizer, 1)
        del model.other
        train_row(model, optimizer, 1)
        assert model.head[0].bias.item() != 0
        # What stands around is watched from now on.
        model.head = nn.Sequential(nn.Linear(2, 1))
        with pytest.raises(cpudist.ModelChangedError, match="module 'head' of the Net"):
            train_row(model, optimizer, 1)

    alone(body)
