# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What needs rows on the trainer is refused, with the way out."""

from __future__ import annotations

import copy

import pytest
import torch
from remote_cases import (
    DIM,
    ROWS,
    Model,
    Ranking,
    initial_rows,
    remote,
    remote_embedding,
    rows_now,
    wrap,
)
from sync_cases import run
from table_cases import alone
from torch import nn
from torch.optim import swa_utils

import torch_cpudist as cpudist
from torch_cpudist.tables.remote_weight import is_remote


@pytest.mark.parametrize(
    "strategy",
    [
        cpudist.AllReduce(),
        cpudist.Reduce(),
        cpudist.LocalSGD(),
    ],
)
def test_strategies_that_keep_tables_on_trainers_are_refused(strategy):
    model = remote(Ranking)

    def body():
        with pytest.raises(cpudist.UnsupportedModelError, match=r"sparse=Async\(\)"):
            wrap(model, strategy)
        wrap(model)  # nothing was left behind

    alone(body)


def tied():
    model = nn.ModuleDict({"a": nn.Embedding(ROWS, DIM), "out": nn.Linear(DIM, ROWS)})
    model["out"].weight = model["a"].weight
    return model


class Own(nn.Module):
    """A lookup that torch's module knows nothing of."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(ROWS, DIM).weight
        self.out = nn.Linear(DIM, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Embedding(ROWS, DIM, max_norm=1.0), "max_norm rewrites rows"),
        (
            lambda: nn.Embedding(ROWS, DIM, scale_grad_by_freq=True),
            "scale_grad_by_freq",
        ),
        (tied, r"tied to 'out\.weight'"),
        (Own, "parameter 'rows' is the weight of a remote table"),
    ],
)
def test_models_that_need_rows_here_are_refused(make, message):
    model = remote(make)

    def body():
        with pytest.raises(cpudist.UnsupportedModelError, match=message):
            wrap(model)

    alone(body)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("name", "value"), [("max_norm", 0.1), ("scale_grad_by_freq", True)]
)
def test_options_that_are_set_later_are_refused_by_the_next_lookup(name, value, kind):
    model = remote(lambda: kind(ROWS, DIM))
    ids = torch.tensor([[1, 2]])

    def body():
        wrap(model)
        model(ids)
        setattr(model, name, value)
        with pytest.raises(cpudist.UnsupportedModelError, match=name):
            model(ids)

    alone(body)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: m.weight.square().sum(), "square of the weight of table 'weight'"),
        (lambda m: nn.functional.embedding(torch.tensor([1]), m.weight), "embedding"),
        (lambda m: m.weight.data.normal_(), "while an optimizer trains it"),
        (lambda m: m.weight.data.copy_(torch.ones(ROWS, DIM)), "while an optimizer"),
        (lambda m: m.double(), r"torch\.float64"),
    ],
)
def test_uses_of_the_whole_weight_are_refused_while_wrapped(use, message):
    model = remote_embedding()

    def body():
        wrap(model)
        with torch.no_grad(), pytest.raises(cpudist.RemoteTableError, match=message):
            use(model)

    alone(body)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
        {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
        {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
        {"avg_fn": swa_utils.get_swa_avg_fn(), "use_buffers": True},
    ],
    ids=["default", "ema", "swa", "one-ema", "one-swa"],
)
def test_averages_of_torch_are_refused_at_their_first_update(options, wrapped):
    model = remote(Ranking)

    def body():
        if wrapped:
            wrap(model)
        averaged = swa_utils.AveragedModel(model, **options)
        for _ in range(2):
            with pytest.raises(cpudist.RemoteTableError, match="AveragedModel") as told:
                averaged.update_parameters(model)
            assert "table 'word.weight' of 40 rows" in str(told.value)
            assert "DistributedOptimizer(average=cpudist.EMA(d))" in str(told.value)
            assert "opt.averaged()" in str(told.value)
        assert int(averaged.n_averaged) == 0

    alone(body)


@pytest.mark.parametrize(
    "average",
    [
        lambda mine, new: mine.lerp_(new, 0.1),
        lambda mine, new: torch._foreach_lerp_([mine], [new], 0.1),
        lambda mine, new: mine.copy_(0.9 * mine + 0.1 * new),
    ],
)
def test_averages_of_ones_own_are_told_who_keeps_them(average):
    model = remote_embedding()

    def body():
        wrap(model)
        mine = copy.deepcopy(model).weight
        with torch.no_grad(), pytest.raises(cpudist.RemoteTableError) as told:
            average(mine, model.weight)
        assert "DistributedOptimizer(average=cpudist.EMA(d))" in str(told.value)
        assert "opt.averaged()" in str(told.value)

    alone(body)


def test_other_weights_in_the_place_of_the_table_are_refused():
    model = remote_embedding()

    def body():
        wrap(model)
        other = torch.zeros(ROWS, DIM)
        with pytest.raises(cpudist.UnsupportedModelError, match="functional_call"):
            torch.func.functional_call(model, {"weight": other}, torch.tensor([1]))
        with pytest.raises(cpudist.UnsupportedModelError, match="cannot record"):
            torch.jit.trace(model, torch.tensor([1]))
        model.weight = nn.Parameter(other)
        with pytest.raises(cpudist.ModelChangedError, match="another parameter"):
            model(torch.tensor([1]))

    alone(body)


def past_its_module(weight, ids):
    return nn.functional.embedding(ids, weight)


def by_another_module(weight, ids):
    return nn.Embedding.from_pretrained(weight.data, freeze=False)(ids)


def by_another_bag(weight, ids):
    return nn.EmbeddingBag.from_pretrained(weight, freeze=False)(ids)


@pytest.mark.parametrize("use", [past_its_module, by_another_module, by_another_bag])
def test_lookups_past_the_modules_of_the_table_are_told_which_these_are(use):
    model = remote_embedding()

    def body():
        wrap(model)
        with pytest.raises(cpudist.RemoteTableError) as told:
            use(model.weight, torch.tensor([[1, 2]]))
        assert "a module that is not in the model of its optimizer" in str(told.value)
        assert "module.weight = other.weight" in str(told.value)

    alone(body)


@pytest.mark.parametrize("wrapped", [True, False])
def test_rows_that_are_copied_into_another_weight_are_told_where_they_are(wrapped):
    """As whoever makes an embedding larger copies them."""
    model, larger = remote_embedding(), nn.Embedding(2 * ROWS, DIM)
    rows = larger.weight.detach().clone()

    def body():
        if wrapped:
            wrap(model)
        with pytest.raises(cpudist.RemoteTableError) as told:
            larger.weight.data[:ROWS] = model.weight.data[:ROWS]
        assert "__setitem__ of the weight of table 'weight'" in str(told.value)
        assert "not here to be read" in str(told.value)
        assert "opt.load_snapshot" in str(told.value)
        assert torch.equal(larger.weight, rows)

    alone(body)


def test_a_weight_that_was_swapped_while_wrapped_is_refused_until_it_is_back():
    model, other = remote(Ranking), nn.Parameter(torch.ones(ROWS, DIM))
    ids = torch.tensor([[1, 2, 3]])

    def body():
        optimizer = wrap(model)
        torch.utils.swap_tensors(model.word.weight, other)
        for use in (lambda: model(ids), optimizer.flush):
            with pytest.raises(cpudist.ModelChangedError, match="its weight has"):
                use()
        torch.utils.swap_tensors(model.word.weight, other)
        model(ids)
        optimizer.flush()

    alone(body)


def test_a_refused_conversion_says_what_it_has_done():
    model = nn.Sequential(nn.Linear(2, DIM), remote_embedding())
    with pytest.raises(cpudist.RemoteTableError, match=r"model\.float\(\)"):
        model.half()
    assert model[0].weight.dtype == torch.float16
    assert model.float()[0].weight.dtype == torch.float32


def test_trainers_must_begin_alike():
    def body(context):
        torch.manual_seed(1)
        made = []

        def train():
            made.append(wrap(models[context.trainer_rank]))
            made[0].step()  # trainer 0 waits for nobody before

        with pytest.raises(cpudist.ConfigMismatchError, match="weight"):
            train()
        for optimizer in made:
            optimizer.close(tell_servers=False)

    models = [remote_embedding(), remote_embedding()]
    nn.init.uniform_(models[1].weight)
    run(body, 2, 2)


def test_frozen_remote_tables_have_no_rows():
    model = remote(Ranking)
    model.word.weight.requires_grad_(False)

    def body():
        wrap(model)
        with pytest.raises(cpudist.RemoteTableError, match="Wrap the optimizer"):
            model(torch.tensor([[1, 2, 3]]))
        with pytest.raises(cpudist.RemoteTableError, match=r"is frozen .* with lr=0"):
            model(torch.tensor([[1, 2, 3]]))

    alone(body)


def test_a_rate_of_nothing_keeps_rows_as_they_are():
    model = remote(Ranking)
    frozen, *others = model.parameters()
    begins = initial_rows("word.weight", frozen)

    def body():
        groups = [{"params": [frozen], "lr": 0.0}, {"params": others, "lr": 1.0}]
        optimizer = wrap(model, optimizer=torch.optim.SGD(groups))
        for _ in range(2):
            model(torch.tensor([[1, 2, 3]])).sum().backward()
            optimizer.step()
        return rows_now(optimizer)["word.weight"]

    assert torch.equal(alone(body), begins)


def test_graphs_and_other_parameters_are_refused_with_what_helps():
    """No copy of a model has the rows of its remote tables."""
    model = remote_embedding()
    ids = torch.tensor([1])

    def exported():
        torch.export.export(model, (ids,), strict=False)

    def called():
        other = {"weight": torch.zeros(ROWS, DIM)}
        torch.func.functional_call(model, other, ids)

    def body():
        wrap(model)
        uses = [exported, called, lambda: torch.jit.script(model)]
        uses.append(lambda: torch.fx.symbolic_trace(nn.Sequential(model)))
        for use in (*uses, lambda: torch.jit.trace(model, ids)):
            with pytest.raises(cpudist.UnsupportedModelError) as refused:
                use()
            assert "a remote table, of which no copy has rows" in str(refused.value)
            assert "static table" in str(refused.value)
            assert "deepcopy" not in str(refused.value)

    alone(body)


@pytest.mark.parametrize("strict", [True, False])
def test_a_graph_that_was_exported_before_wrapping_is_refused_when_it_runs(strict):
    ids = torch.tensor([[1, 2, 3]])
    for part in ("word", "slots"):
        module = getattr(remote(Ranking), part)
        graph = torch.export.export(module, (ids,), strict=strict).module()
        with pytest.raises(cpudist.UnsupportedModelError) as told:
            graph(ids)
        assert f"table '{part}.weight': torch.export cannot record" in str(told.value)


def test_tables_are_not_built_of_tensors_that_are_none():
    fake = torch._subclasses.fake_tensor.FakeTensorMode()
    with fake, pytest.raises(cpudist.UnsupportedModelError, match="FakeTensorMode"):
        remote_embedding()


def test_the_model_of_parity_is_remote_as_a_whole():
    assert sum(is_remote(p) for p in remote(Model).parameters()) == 2
