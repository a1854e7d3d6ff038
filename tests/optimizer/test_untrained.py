# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the optimizer does not train is compared with trainer 0's, and warned of."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.launch.rendezvous import Rendezvous
from torch_cpudist.optimizer.untrained import Untrained

WORDS = "what no wrapped optimizer trains differs from trainer 0's"


def warnings(caplog):
    """What each trainer was told, by rank."""
    said = [r.getMessage() for r in caplog.records if WORDS in r.getMessage()]
    return {int(text.split(":")[0].removeprefix("trainer ")): text for text in said}


def transfer(seed):
    """A model whose backbone is not trained: two parameters, a norm with buffers."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def wrap(model, strategy=None):
    head = torch.optim.SGD(model[2].parameters(), lr=0.1)
    return cpudist.DistributedOptimizer(head, model, strategy=strategy)


def train_once(model, *optimizers):
    """A step of each, at which trainers compare."""
    model(torch.ones(2, 3)).sum().backward()
    for opt in optimizers:
        opt.step()


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("strategy", ["sync", "geo"])
def test_each_trainer_that_differs_is_warned(strategy, servers, caplog):
    def train(context):
        # Trainer 2 is seeded as trainer 0.
        model = transfer(context.trainer_rank % 2)
        opt = wrap(model, strategy)
        train_once(model, opt)
        train_once(model, opt)
        cpudist.barrier()
        opt.flush()
        return model

    models = run(train, 3, servers)
    told = warnings(caplog)
    assert list(told) == [1]
    assert len([r for r in caplog.records if WORDS in r.getMessage()]) == 1
    assert "in 4 of the model's parameters and buffers" in told[1]
    assert "'0.weight', '0.bias', '1.weight' and 1 more. Load" in told[1]
    assert "seed alike before wrapping" in told[1]
    # They are told, not changed; what is trained is trainer 0's.
    assert not torch.equal(models[0][0].weight, models[1][0].weight)
    assert torch.equal(models[0][2].weight, models[1][2].weight)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m[1].running_mean.add_(1e-6), "1.running_mean"),
        (lambda m: m[1].num_batches_tracked.add_(1), "1.num_batches_tracked"),
        (lambda m: m.register_buffer("more", torch.ones(2)), "more"),
        (lambda m: m[0].weight.view(-1)[-1:].neg_(), "0.weight"),
    ],
)
def test_one_differing_tensor_is_named(change, name, caplog):
    def train(context):
        model = transfer(0)
        if context.trainer_rank == 1:
            with torch.no_grad():
                change(model)
        train_once(model, wrap(model))

    run(train, 2)
    assert f"'{name}'" in warnings(caplog)[1]


def test_frozen_parameters_of_the_optimizer_count_too(caplog):
    def train(context):
        model = transfer(context.trainer_rank)
        model[0].weight.requires_grad_(False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        train_once(model, cpudist.DistributedOptimizer(inner, model))

    run(train, 2)
    assert "in 1 of the model's" in warnings(caplog)[1]
    assert ": '0.weight'. Load" in warnings(caplog)[1]


def test_equal_models_are_not_warned_of(caplog):
    def train(context):
        model = transfer(5)
        # Of no memory, of another layout, empty, seen from the side.
        model.register_buffer("nothing", torch.empty(0))
        model.register_buffer("meta", torch.empty(3, device="meta"))
        model.register_buffer("sparse", torch.eye(3).to_sparse())
        model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
        model.register_buffer("scalar", torch.tensor(True))
        model.register_buffer("complex", torch.ones(2, dtype=torch.complex64).conj())
        model[1].register_module("lazy", nn.LazyLinear(2))
        train_once(model, wrap(model))

    run(train, 2)
    assert warnings(caplog) == {}


def test_statistics_that_moved_on_are_no_difference_when_wrapped_again(caplog):
    def train(context):
        model = transfer(5)
        first = wrap(model)
        model[1].running_mean += context.trainer_rank
        second = wrap(model)
        assert second is not first
        train_once(model, second)

    run(train, 2)
    assert warnings(caplog) == {}


def test_what_a_second_optimizer_trains_is_no_difference(caplog):
    def train(context):
        model = transfer(context.trainer_rank)
        first = wrap(model)
        rest = [*model[0].parameters(), *model[1].parameters()]
        inner = torch.optim.SGD(rest, lr=0.1)
        second = cpudist.DistributedOptimizer(inner, model)
        train_once(model, first, second)
        return model

    one, other = run(train, 2)
    assert warnings(caplog) == {}
    assert torch.equal(one[0].weight, other[0].weight)


def test_what_is_trained_is_not_compared(caplog):
    def train(context):
        generator = torch.Generator().manual_seed(context.trainer_rank)
        model = nn.Sequential(nn.EmbeddingBag(8, 3, sparse=True), nn.Linear(3, 1))
        with torch.no_grad():
            model[0].weight.copy_(torch.randn(8, 3, generator=generator))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(inner, model)
        model(torch.ones(2, 2, dtype=torch.int64)).sum().backward()
        opt.step()

    run(train, 2)
    assert warnings(caplog) == {}


@pytest.mark.parametrize(("trainers", "group"), [(1, None), (2, object())])
def test_alone_and_in_jobs_of_their_own_nothing_is_read(trainers, group):
    context = SimpleNamespace(
        trainer_count=trainers, environment=SimpleNamespace(apart=group)
    )
    found = Untrained(context, transfer(1), None, True)
    found.tell("1")
    found.compare()
    assert found.found == {}


def test_a_store_that_failed_is_told_and_training_goes_on(monkeypatch, caplog):
    def fail(self, *arguments):
        raise cpudist.AddressError("the rendezvous store failed")

    monkeypatch.setattr(Rendezvous, "show", fail)
    monkeypatch.setattr(Rendezvous, "shown", fail)

    def train(context):
        model = transfer(context.trainer_rank)
        opt = wrap(model)
        train_once(model, opt)
        return opt.rounds

    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        assert run(train, 2) == [1, 1]
    assert caplog.text.count("not compared: the rendezvous store failed") == 2
