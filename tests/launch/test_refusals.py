# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Slips of a script are typed errors, of one base class, that say what to do."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist


def small():
    return nn.Sequential(nn.Embedding(10, 2, sparse=True), nn.Linear(2, 1))


def sgd(*modules, lr=0.1):
    parameters = [p for module in modules for p in module.parameters()]
    return torch.optim.SGD(parameters, lr=lr)


def refused(error, words, *arguments, **options):
    """In a world of one, ``DistributedOptimizer(...)`` is an error."""

    def wrap(context):
        with pytest.raises(error, match=words) as found:
            cpudist.DistributedOptimizer(*arguments, **options)
        assert isinstance(found.value, cpudist.Error)

    run(wrap, 1)


# ---- what is wrapped ---------------------------------------------------------------


def test_swapped_arguments():
    model = small()
    words = r"\(optimizer, model\): the optimizer comes first; found Sequential, SGD"
    refused(cpudist.InvalidArgumentError, words, model, sgd(model))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.SGD, "the optimizer must be a torch.optim.Optimizer, got SGD"),
        (None, "the optimizer must be .*, got NoneType"),
        ([3], "each entry of the list must be .*, got int"),
    ],
)
def test_what_is_no_optimizer(optimizer, words):
    refused(cpudist.InvalidArgumentError, words, optimizer, small())


def test_what_is_no_model():
    model = small()
    words = "the model must be an nn.Module, got generator"
    refused(cpudist.InvalidArgumentError, words, sgd(model), model.parameters())


@pytest.mark.parametrize("more", [(), (cpudist.Sync(),), ("sync",), (None,)])
def test_a_missing_model(more):
    model = small()
    words = "the model is missing. Pass the nn.Module whose parameters"
    refused(cpudist.InvalidArgumentError, words, sgd(model), *more)
    if not more:
        options = {"strategy": "sync"}
        refused(cpudist.InvalidArgumentError, words, sgd(model), **options)


@pytest.mark.parametrize("listed", [False, True])
def test_what_is_wrapped_already(listed):
    def wrap(context):
        model = small()
        opt = cpudist.DistributedOptimizer(sgd(model), model)
        words = "the optimizer is a DistributedOptimizer already. Use it as it is"
        with pytest.raises(cpudist.InvalidArgumentError, match=words):
            cpudist.DistributedOptimizer([opt] if listed else opt, model)
        model(torch.ones(2, dtype=torch.int64)).sum().backward()
        opt.step()  # it is none the worse

    run(wrap, 1)


@pytest.mark.parametrize(
    ("dtype", "words", "not_said"),
    [
        (
            torch.complex64,
            "the real and the imaginary part .*view_as_complex",
            "bfloat",
        ),
        (torch.bfloat16, "torch.autocast for bfloat16", "view_as_complex"),
        (torch.float16, "torch.autocast for bfloat16", "view_as_complex"),
    ],
)
def test_parameters_of_other_types_are_told_what_suits_them(dtype, words, not_said):
    def wrap(context):
        model = nn.Sequential(nn.Flatten(), nn.Linear(2, 1, dtype=dtype))
        with pytest.raises(cpudist.UnsupportedModelError, match=words) as found:
            cpudist.DistributedOptimizer(sgd(model), model)
        assert not_said not in str(found.value)

    run(wrap, 1)


@pytest.mark.parametrize("strategy", [cpudist.Sync, cpudist.Geo])
def test_the_class_of_a_strategy(strategy):
    model = small()
    words = rf"Pass an object of the class: {strategy.__name__}\(\)"
    refused(cpudist.ConfigurationError, words, sgd(model), model, strategy=strategy)


def test_an_optimizer_of_another_model():
    words = "none of the optimizer's 3 parameters is one of the model's"
    refused(cpudist.InvalidArgumentError, words, sgd(small()), small())


def test_parameters_of_a_loss_are_counted_and_trained(caplog):
    model, loss = small(), nn.Linear(1, 1)

    def train(context):
        before = loss.weight.item()
        opt = cpudist.DistributedOptimizer(sgd(model, loss), model)
        loss(model(torch.tensor([1]))).sum().backward()
        opt.step()
        assert loss.weight.item() != before

    run(train, 1)
    assert "2 of the optimizer's 5 parameters are not the model's" in caplog.text


def test_parameters_of_the_model_are_not_warned_of(caplog):
    model = small()
    run(lambda context: cpudist.DistributedOptimizer(sgd(model), model) and None, 1)
    assert caplog.text == ""


# ---- values ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: cpudist.ClipNorm(-1),
        lambda: cpudist.ClipNorm("1"),
        lambda: cpudist.ClipValue(math.nan),
        lambda: cpudist.ClipValue(None),
        lambda: cpudist.clip_grad_norm_([], -1.0),
        lambda: cpudist.clip_grad_norm_([], 1.0, 3),
        lambda: cpudist.shard_tables(small(), min_rows=-1),
    ],
)
def test_values_out_of_range_are_errors_of_this_package(wrong):
    with pytest.raises(cpudist.InvalidArgumentError):
        wrong()


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32])
def test_ids_of_another_type_are_errors_of_this_package(dtype):
    def look_up(context):
        model = small()
        cpudist.DistributedOptimizer(sgd(model), model)
        with pytest.raises(cpudist.IdTypeError, match="int64 or int32, got") as found:
            model(torch.ones(2, dtype=dtype))
        assert isinstance(found.value, TypeError)
        assert isinstance(found.value, cpudist.InvalidArgumentError)

    run(look_up, 1)


def wrap_and_step(inner, model):
    opt = cpudist.DistributedOptimizer(inner, model)
    model(torch.ones(2)).sum().backward()
    opt.step()


@pytest.mark.parametrize(
    ("optimizers", "words"),
    [
        (
            (
                lambda p: torch.optim.Adagrad(p, lr=0.1),
                lambda p: torch.optim.SGD(p, lr=0.1),
            ),
            "optimizer kind: (adagrad against sgd|sgd against adagrad)",
        ),
        (
            (
                lambda p: torch.optim.SGD(p, lr=0.2),
                lambda p: torch.optim.SGD(p, lr=1e-7),
            ),
            "lr: (0.2 against 1e-07|1e-07 against 0.2) ",
        ),
        (
            (
                lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, nesterov=True),
                lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
            ),
            "nesterov: (True against False|False against True)",
        ),
    ],
)
def test_options_that_differ_are_named_as_they_were_written(optimizers, words):
    def train(context):
        model = nn.Linear(2, 1)
        inner = optimizers[context.trainer_rank](model.parameters())
        wrap_and_step(inner, nn.Sequential(nn.Flatten(0), model))

    with pytest.raises(cpudist.ConfigMismatchError, match=words):
        run(train, 2)


@pytest.mark.parametrize(
    ("dtypes", "bounds", "words"),
    [
        ((torch.float32, torch.float64), (None, None), "dtype: float.. against float"),
        (
            (torch.float32,) * 2,
            (None, 4),
            "max_staleness: (none against 4|4 against n)",
        ),
    ],
)
def test_layouts_that_differ_are_told_in_words(dtypes, bounds, words):
    def train(context):
        rank = context.trainer_rank
        model = nn.Sequential(nn.Flatten(0), nn.Linear(2, 1, dtype=dtypes[rank]))
        strategy = cpudist.Async(max_staleness=bounds[rank])
        cpudist.DistributedOptimizer(sgd(model), model, strategy).step()

    with pytest.raises(cpudist.ConfigMismatchError, match=words):
        run(train, 2)


# ---- torch.jit ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("how", ["trace", "script"])
def test_graphs_of_torch_jit_are_refused_and_copies_are_not(kind, how):
    ids = torch.ones(2, 3, dtype=torch.int64)

    def made(model):
        one = torch.jit.trace(model, ids) if how == "trace" else torch.jit.script(model)
        return one(ids)

    def wrapped(context):
        model = nn.Sequential(kind(10, 2, sparse=True), nn.Linear(2, 1))
        opt = cpudist.DistributedOptimizer(sgd(model), model)
        model(ids).sum().backward()
        opt.step()
        words = r"table '0.weight': torch.jit.trace and .*copy.deepcopy\(model\)"
        with pytest.raises(cpudist.UnsupportedModelError, match=words):
            made(model)
        opt.flush()
        assert torch.equal(made(copy.deepcopy(model)), model(ids))
        opt.close()
        assert torch.equal(made(model), model(ids))

    run(wrapped, 1)


# ---- tables without rows -----------------------------------------------------------


@pytest.mark.parametrize(
    ("trainers", "strategy"),
    [
        *((n, strategy) for n in (1, 2) for strategy in ("sync", "async", "geo")),
        (1, "allreduce"),
    ],
)
def test_a_table_without_rows_trains_and_ends(trainers, strategy):
    def train(context):
        model = nn.Sequential(nn.Embedding(0, 4, sparse=True), nn.Linear(4, 1))
        nn.init.zeros_(model[1].bias)
        opt = cpudist.DistributedOptimizer(sgd(model), model, strategy=strategy)
        model[1](torch.ones(1, 4)).sum().backward()
        opt.step()
        opt.state_dict()
        cpudist.barrier()
        opt.flush()
        assert model[1].bias.item() < 0
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.tensor([0]))

    run(train, trainers)
