# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Embeddings of a user's own class, and weights that are replaced after wrapping."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from sync_cases import copy_of, largest_difference, run
from table_cases import (
    DIM,
    ROWS,
    alone,
    assert_trains_like_torch,
    embedding,
    ids,
    sgd,
    train,
    weight_of,
    wrap,
)
from torch import nn

import torch_cpudist as cpudist

# ---- classes that work -------------------------------------------------------------


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


class Hashed(nn.Embedding):
    """The ids it is given are no rows; the parameter has a name of its own."""

    def forward(self, words):
        return super().forward(words * 31 % self.num_embeddings)


class Bags(nn.EmbeddingBag):
    def forward(self, words, scale=1.0):
        return super().forward(words % ROWS) * scale


class Twice(Hashed):
    """Calls the class in between by its name, from a method of its own."""

    def rows(self, words):
        return Hashed.forward(self, words)

    def forward(self, words):
        return self.rows(words) + self.rows(words + 1)


class Shift:
    """Not a module; stands before ``nn.Embedding`` in the order of bases."""

    def forward(self, input):
        return super().forward(input + 1)


class Shifted(Shift, nn.Embedding):
    pass


class Registered(nn.Embedding):
    """Classes derived from it have to name themselves."""

    def __init_subclass__(cls, *, key):
        raise AssertionError(f"{key}: nobody derives from it here")

    @torch.autocast("cpu", enabled=False)
    def forward(self, input):
        return super().forward(input)


@pytest.mark.parametrize("kind", [Scaled, Hashed, Bags, Twice, Shifted, Registered])
def test_a_module_class_of_ones_own_trains_like_torch(kind):
    def make():
        return weight_of(kind(ROWS, DIM, sparse=True))

    far = 5 if kind in (Scaled, Shifted, Registered) else 1000
    assert_trains_like_torch(make, [ids([1, 2]), ids([2, far])])


def test_changed_ids_are_read_fresh_in_eval():
    """The other trainer's updates arrive for the rows that are looked up."""

    def body(context):
        model = weight_of(Hashed(ROWS, DIM, sparse=True))
        optimizer = wrap(model)
        words = ids(1, 2) if context.trainer_rank == 0 else ids(3, 4)
        train(model, optimizer, [words], lambda m, b: m(b))
        model.eval()
        with torch.no_grad():
            looked_up = model(words=ids(1, 2, 3, 4))
        optimizer.flush()
        assert torch.equal(looked_up, model(ids(1, 2, 3, 4)))
        return copy_of(model)

    states = run(body, 2)
    before = copy_of(weight_of(Hashed(ROWS, DIM, sparse=True)))
    changed = (states[0]["weight"] != before["weight"]).any(dim=1).nonzero().ravel()
    assert changed.tolist() == sorted(word * 31 % ROWS for word in (1, 2, 3, 4))


def test_the_class_is_given_back():
    model = nn.Sequential(weight_of(Hashed(ROWS, DIM, sparse=True)))

    def body():
        optimizer = wrap(model)
        assert isinstance(model[0], Hashed)
        assert type(copy.deepcopy(model)[0]) is Hashed
        optimizer.close()
        assert type(model[0]) is Hashed
        wrap(model)
        wrap(model)

    alone(body)
    assert type(model[0]) is Hashed


def test_a_wrapper_around_an_embedding():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = embedding()

        def forward(self, batch):
            return self.inner(input=batch + 1)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    assert_trains_like_torch(Wrapper, [ids(1, 2), ids(2, 5)])


# ---- classes whose lookups cannot be seen ------------------------------------------


class Bypass(nn.Embedding):
    def forward(self, input):
        return F.embedding(input, self.weight, sparse=True)


class Direct(nn.Embedding):
    def forward(self, input):
        return nn.Embedding.forward(self, input + 1)


class UnderBypass(Bypass):
    def forward(self, input):
        return super().forward(input)


@pytest.mark.parametrize(
    ("kind", "named"), [(Bypass, "Bypass"), (Direct, "Direct"), (UnderBypass, "Bypass")]
)
def test_a_forward_that_goes_past_the_pull_is_refused(kind, named):
    match = rf"'0\.weight'.* {named}\.forward does not call super.*sparse=False"

    def body():
        model = nn.Sequential(kind(ROWS, DIM, sparse=True))
        with pytest.raises(cpudist.UnsupportedModelError, match=match):
            wrap(model)
        model[0].sparse = False
        said = []
        cpudist.shard_tables(model, min_rows=1, report=said.append)
        assert not model[0].sparse
        assert f"{named}.forward" in said[0]
        wrap(model)

    alone(body)


def test_a_forward_on_the_module_itself_is_refused():
    def body():
        model = nn.Sequential(embedding())
        plain = model[0].forward
        model[0].forward = lambda input: plain(input + 1)
        with pytest.raises(cpudist.UnsupportedModelError, match=r"'0\.weight'.*itself"):
            wrap(model)
        del model[0].forward
        wrap(model)

    alone(body)


# ---- replaced weights --------------------------------------------------------------


def test_a_weight_that_was_replaced_is_noticed():
    def body():
        model = nn.Sequential(embedding(), nn.Linear(DIM, 1))
        loaded = {name: value + 1 for name, value in model.state_dict().items()}
        optimizer = wrap(model)
        model.load_state_dict(loaded, assign=True)
        with pytest.raises(cpudist.ModelChangedError, match=r"'0\.weight'.*assign="):
            model(ids(1))
        with pytest.raises(cpudist.ModelChangedError, match=r"'0\.weight'.*close\(\)"):
            wrap(model)
        optimizer.close()
        plain = copy.deepcopy(model)
        optimizer = wrap(model)
        train(model, optimizer, [ids(1, 2)], lambda m, b: m(b))
        train(plain, sgd(plain), [ids(1, 2)], lambda m, b: m(b))
        optimizer.flush()
        assert largest_difference(copy_of(model), copy_of(plain)) <= 1e-6

    alone(body)
