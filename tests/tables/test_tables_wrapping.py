# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Wrapped modules: their class, copies, refusals, and use in forked workers."""

from __future__ import annotations

import copy
import copyreg
import io
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from sync_cases import assert_same_bits, copy_of, largest_difference
from table_cases import DIM, ROWS, alone, embedding, ids, sgd, train, wrap
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.tables.weight import as_it_stands

# What torch's restricted loader must be told to load a whole module.
SAVED_WITH_MODULES = [copyreg._reconstructor, object, set, OrderedDict]

# ---- the class swap ----------------------------------------------------------------


def test_the_module_keeps_object_weight_and_interface():
    def body():
        model = nn.Sequential(embedding(padding_idx=1))
        module, weight = model[0], model[0].weight
        keys = list(model.state_dict())
        optimizer = wrap(model)
        assert model[0] is module
        assert isinstance(module, nn.Embedding)
        assert module.weight is weight
        assert list(model.state_dict()) == keys
        assert type(module) is not nn.Embedding
        assert type(module).__name__ == "Embedding"
        assert repr(module) == repr(nn.Embedding(ROWS, DIM, padding_idx=1, sparse=True))
        optimizer.close()
        assert type(module) is nn.Embedding
        assert not [name for name in module.__dict__ if "cpudist" in name]
        assert module(ids(1, 2)).shape == (2, DIM)

    alone(body)


def test_shutdown_gives_classes_back():
    model = nn.Sequential(embedding())
    alone(lambda: wrap(model))
    assert type(model[0]) is nn.Embedding


def test_a_saved_model_loads_as_a_plain_one():
    def body():
        model = nn.Sequential(embedding(), nn.Linear(DIM, 1))
        wrap(model)
        file = io.BytesIO()
        torch.save(model, file)
        assert b"torch_cpudist" not in file.getvalue()
        file.seek(0)
        allowed = [nn.Sequential, nn.Embedding, nn.Linear, *SAVED_WITH_MODULES]
        with torch.serialization.safe_globals(allowed):
            loaded = torch.load(file)
        assert type(loaded[0]) is nn.Embedding
        assert_same_bits(copy_of(model), copy_of(loaded))

    alone(body)


def test_a_deepcopy_is_plain_and_independent():
    def body():
        model = nn.Sequential(embedding(), nn.Linear(DIM, 1))
        optimizer = wrap(model)
        train(model, optimizer, [ids(1, 2)], lambda m, b: m(b))
        optimizer.flush()
        copied = copy.deepcopy(model)
        assert type(copied[0]) is nn.Embedding
        assert not [name for name in copied[0].__dict__ if "cpudist" in name]
        assert_same_bits(copy_of(model), copy_of(copied))
        before = copy_of(copied)
        train(model, optimizer, [ids(1, 2)], lambda m, b: m(b))
        assert_same_bits(before, copy_of(copied))
        plain = sgd(copied)
        train(copied, plain, [ids(1, 2)], lambda m, b: m(b))
        optimizer.flush()
        assert largest_difference(copy_of(model), copy_of(copied)) <= 1e-6
        return model

    model = alone(body)
    assert type(copy.copy(model[0])) is nn.Embedding


def test_a_saved_state_dict_is_plain():
    def body():
        model = embedding()
        optimizer = wrap(model)
        train(model, optimizer, [ids(1, 2)], lambda m, b: m(b))
        optimizer.flush()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert_same_bits(torch.load(file, weights_only=True), copy_of(model))

    alone(body)


# ---- refusals ----------------------------------------------------------------------


def test_rows_that_were_not_pulled_are_refused():
    def body():
        model = nn.Sequential(embedding())
        optimizer = wrap(model)
        train(model, optimizer, [ids(1, 2)], lambda m, b: m(b))
        before = copy_of(model)
        optimizer.zero_grad()
        F.embedding(ids(1), model[0].weight, sparse=True).sum().backward()
        with pytest.raises(cpudist.UnpulledRowError, match=r"0\.weight"):
            optimizer.step()
        assert_same_bits(before, copy_of(model))
        optimizer.zero_grad()
        train(model, optimizer, [ids(1, 2)], lambda m, b: m(b))
        assert largest_difference(before, copy_of(model)) > 1e-3

    alone(body)


def test_gradients_of_rows_pulled_before_the_last_update_are_refused():
    def body():
        model = embedding()
        optimizer = wrap(model)
        late = model(ids(4)).sum()
        train(model, optimizer, [ids(4)], lambda m, b: m(b))
        optimizer.zero_grad()
        late.backward()
        with pytest.raises(cpudist.UnpulledRowError):
            optimizer.step()

    alone(body)


@pytest.mark.parametrize("use", ["tied", "penalty"])
def test_a_dense_gradient_on_a_table_is_refused_by_name(use):
    def body():
        model = nn.Sequential(embedding(), nn.Linear(DIM, 1))
        optimizer = wrap(model)
        before = copy_of(model)
        weight = model[0].weight
        hidden = model[0](ids(1, 2))
        loss = (hidden @ weight.t() if use == "tied" else weight.square()).sum()
        (loss + hidden.sum()).backward()
        with pytest.raises(cpudist.DenseGradientError, match=r"'0\.weight'.*sparse="):
            optimizer.step()
        assert_same_bits(before, copy_of(model))

    alone(body)


def test_a_table_outside_the_model_that_was_passed_is_named():
    def body():
        model = nn.ModuleList([embedding(), nn.Linear(DIM, 1)])
        optimizer = cpudist.DistributedOptimizer(sgd(model), model[1])
        model[1](model[0](ids(1, 2))).sum().backward()
        match = r"'param_groups\[0\]\[0\]'.*Pass the model that contains it"
        with pytest.raises(cpudist.UnsupportedModelError, match=match):
            optimizer.step()

    alone(body)


def test_ids_outside_the_table_are_refused():
    def body():
        model = embedding()
        optimizer = wrap(model)
        for wrong in (-1, ROWS):
            with pytest.raises(cpudist.RowOutOfRangeError, match=str(wrong)):
                model(ids(2, wrong))
        train(model, optimizer, [ids(2)], lambda m, b: m(b))

    alone(body)


def test_ids_of_another_type_are_refused():
    def body():
        model = embedding()
        wrap(model)
        with pytest.raises(TypeError, match=r"int64 or int32, got torch\.float32"):
            model(torch.ones(2))

    alone(body)


def test_a_model_converted_after_wrapping_is_refused():
    def body():
        model = nn.Sequential(embedding(), nn.Linear(DIM, 1))
        optimizer = wrap(model)
        model.double()
        with pytest.raises(cpudist.ModelChangedError, match=r"0\.weight.*float64"):
            model[0](ids(1))
        with pytest.raises(cpudist.ModelChangedError, match=r"1\.weight.*float64"):
            optimizer.flush("dense")
        with pytest.raises(cpudist.ModelChangedError, match=r"float64"):
            optimizer.step()
        with pytest.raises(cpudist.ModelChangedError, match=r"0\.weight.*float64"):
            optimizer.trained.pull_tables()

    alone(body)


def test_a_table_whose_memory_moved_is_found_again():
    def body():
        model = embedding()
        optimizer = wrap(model)
        train(model, optimizer, [ids(1, 2)], lambda m, b: m(b))
        optimizer.flush()
        expected = copy_of(model)

        def move():
            with as_it_stands():  # what is written there is none of the user's values
                model.weight.data = torch.full((ROWS, DIM), torch.nan)

        move()
        assert torch.equal(model(ids(1, 2)), expected["weight"][1:3])
        move()
        optimizer.flush()
        assert_same_bits(expected, copy_of(model))

    alone(body)


def test_lookups_after_close_need_no_server():
    def body():
        model = embedding()
        optimizer = wrap(model)
        optimizer.close()
        assert torch.equal(model(ids(1)), model.weight[1:2])

    alone(body)


class Lookups(torch.utils.data.Dataset):
    """A dataset that (wrongly) reads a table in the worker."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 2

    def __getitem__(self, item):
        return self.model(ids(item)).detach()


@pytest.fixture
def in_this_thread():
    context = cpudist.init()
    yield context
    context.shutdown()


def test_forked_workers_load_data_but_cannot_look_up(in_this_thread):
    model = embedding()
    optimizer = wrap(model)
    context = torch.multiprocessing.get_context("fork")
    options = {"num_workers": 1, "multiprocessing_context": context, "timeout": 60}
    loader = torch.utils.data.DataLoader([1, 2, 3, 4], batch_size=2, **options)
    train(model, optimizer, loader, lambda m, b: m(b))
    loader = torch.utils.data.DataLoader(Lookups(model), **options)
    batches = iter(loader)
    for _ in range(2):
        with pytest.raises(cpudist.ForkedProcessError, match="forked child"):
            next(batches)
    # At its end the loader ends its worker; a collected one would wait for it.
    assert next(batches, None) is None
    train(model, optimizer, [ids(1)], lambda m, b: m(b))


# ---- what other ways to gradients and weights make of tables -------------------------


def test_gradients_that_are_asked_for_by_name_are_those_of_backward():
    """Of tables and dense parameters in one call."""

    def make():
        return nn.Sequential(embedding(), nn.Linear(DIM, 1))

    def step(model, optimizer, gradients):
        for batch in (ids(1, 2), ids(2, 3)):
            optimizer.zero_grad()
            gradients(model, model(batch).square().sum())
            optimizer.step()

    def asked(model, loss):
        parameters = list(model.parameters())
        found = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient

    def body(gradients):
        torch.manual_seed(1)
        model = make()
        optimizer = wrap(model)
        step(model, optimizer, gradients)
        optimizer.flush()
        return copy_of(model)

    assert_same_bits(
        alone(lambda: body(asked)), alone(lambda: body(lambda _, loss: loss.backward()))
    )


@pytest.mark.parametrize("kind", ["static", "remote"])
def test_two_parameters_over_one_memory_are_refused(kind):
    def build():
        first = nn.Embedding(ROWS, DIM, sparse=True)
        second = nn.EmbeddingBag(ROWS, DIM, sparse=True, _weight=first.weight)
        return nn.ModuleDict({"a": first, "b": second})

    if kind == "static":
        model = build()
    else:
        with cpudist.remote_tables(min_rows=ROWS):
            model = build()

    def body():
        words = r"'b\.weight' cannot be a table: .* over the rows of 'a\.weight'"
        with pytest.raises(cpudist.UnsupportedModelError, match=words):
            wrap(model)
        model["b"].weight = model["a"].weight
        optimizer = wrap(model)
        (model["a"](ids(1)).sum() + model["b"](ids(2).view(1, 1)).sum()).backward()
        optimizer.step()

    alone(body)


@pytest.mark.parametrize(
    ("parts", "remote"), [("two", False), ("two", True), ("one", True)]
)
def test_tables_made_of_one_array_are_not_written_by_each_other(parts, remote):
    """Two slices of it, or twice the same, of which servers get a copy each."""
    vectors = torch.arange(2.0 * ROWS * DIM).sin().view(2 * ROWS, DIM)
    slices = (slice(0, ROWS), slice(ROWS, None) if parts == "two" else slice(0, ROWS))
    model = nn.ModuleList(
        nn.Embedding.from_pretrained(vectors[part], freeze=False) for part in slices
    )
    cpudist.shard_tables(model, min_rows=ROWS, remote=remote)
    batch = ids(1, 2, 2)

    def body():
        optimizer = wrap(model, sgd(model, lr=1.0))
        for _ in range(3):
            optimizer.zero_grad()
            sum((i + 1) * one(batch).sum() for i, one in enumerate(model)).backward()
            optimizer.step()
        with torch.no_grad():
            found = [one(ids(1, 2, 3)).clone() for one in model]
            optimizer.flush()
            if not remote:
                model[0].weight.add_(1)
        if not remote:
            with pytest.raises(cpudist.ModelChangedError):
                optimizer.step()
            optimizer.flush(overwrite=True)
        return found

    begins = [vectors[part][1:4].clone() for part in slices]
    for i, (rows, begin) in enumerate(zip(alone(body), begins, strict=True)):
        lost = 3.0 * (i + 1) * torch.tensor([[1.0], [2.0], [0.0]])
        torch.testing.assert_close(rows, begin - lost)
