# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Foreseen lookups leave errors, batches, copies and saved models as they were."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import gc
import io
import pickle
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from async_cases import alone
from foreseen_cases import (
    BATCH,
    ROWS,
    TABLES,
    WATCHED,
    Columns,
    batches_of,
    one_step,
)
from torch import nn

import torch_cpudist as cpudist


def double(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    """A hook of the user's own."""
    return 2 * result


def wrapped(model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
    strategy = cpudist.Sync(communicator=options) if options else None
    return cpudist.DistributedOptimizer(inner, model, strategy=strategy)


def repeat(model: nn.Module, opt: Any, steps: int) -> None:
    for batch in batches_of(0, steps):
        one_step(model, opt, batch)


def test_errors_of_ids_are_those_of_lookups() -> None:
    def body(context: cpudist.Context) -> None:
        model = Columns()
        opt = wrapped(model)
        repeat(model, opt, WATCHED + 1)
        bad = torch.full((BATCH, TABLES), ROWS)
        with pytest.raises(cpudist.RowOutOfRangeError, match=r"tables\.0"):
            model(bad)
        repeat(model, opt, 1)
        with torch.no_grad():
            model.tables[3].weight.add_(1.0)
        with pytest.raises(cpudist.ModelChangedError, match=r"tables\.3"):
            model(batches_of(0)[0])

    alone(body)


def test_no_batch_is_kept() -> None:
    def body(context: cpudist.Context) -> None:
        model = Columns()
        opt = wrapped(model)

        class Fails(Exception):
            pass

        def fail(*_: Any) -> None:
            raise Fails

        for step in range(WATCHED + 2):
            batch = batches_of(step)[0]
            kept = weakref.ref(batch)
            handle = None
            if step == 1:
                handle = model.tables[TABLES - 1].register_forward_hook(fail)
            with torch.no_grad():
                try:
                    model(batch)
                except Fails:
                    assert step == 1
            if handle is not None:
                handle.remove()
            del batch
            assert kept() is None
        assert opt.stats()["lookups"]["together"] == 1

    alone(body)


def loaded_of(file: io.BytesIO) -> Any:
    """A saved model, by what may be in it and nothing of this package."""
    allowed = [Columns, Copied, Reduced, double, nn.ModuleList, nn.Embedding]
    allowed += [copyreg._reconstructor, object, set, OrderedDict]
    allowed += [getattr, contextlib.nullcontext]
    with torch.serialization.safe_globals(allowed):
        return torch.load(file)


def test_copies_and_the_end_leave_no_trace() -> None:
    def body(context: cpudist.Context) -> None:
        model = Columns()
        plain = set(vars(model))
        model.register_forward_hook(double)
        opt = wrapped(model)
        repeat(model, opt, WATCHED + 2)
        together = opt.stats()["lookups"]["together"]
        file = io.BytesIO()
        torch.save(model, file)
        assert b"torch_cpudist" not in file.getvalue()
        file.seek(0)
        loaded = loaded_of(file)
        batch = batches_of(0)[0]
        for one in (copy.deepcopy(model), loaded):
            assert [*one._forward_hooks.values()] == [double]
            assert not one._forward_pre_hooks
            assert vars(one).keys() == plain
            assert torch.equal(one(batch), model(batch))
        assert opt.stats()["lookups"]["together"] <= together + 1
        opt.close()
        assert vars(model).keys() == plain
        assert not model._forward_pre_hooks
        assert [*model._forward_hooks.values()] == [double]

    alone(body)


class Copied(Columns):
    """Copies itself by its attributes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class Reduced(Columns):
    """Pickles itself in a way of its own."""

    def __reduce__(self) -> Any:
        return copyreg._reconstructor, (type(self), object, None), (self.__dict__, None)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state[0])


@pytest.mark.parametrize("kind", [Columns, Copied, Reduced])
def test_a_copy_is_saved_as_itself(kind: type[Columns]) -> None:
    def body(context: cpudist.Context) -> None:
        model = kind()
        opt = wrapped(model)
        repeat(model, opt, WATCHED + 2)
        best = copy.deepcopy(model)
        values = [p.detach().clone() for p in best.parameters()]
        repeat(model, opt, 2)
        file = io.BytesIO()
        torch.save(best, file)
        file.seek(0)
        loaded = loaded_of(file)
        for one in (best, loaded, copy.copy(best), copy.deepcopy(best)):
            for found, value in zip(one.parameters(), values, strict=True):
                assert torch.equal(found, value)
        assert not torch.equal(next(model.parameters()), values[0])

    alone(body)


class Shared(Columns):
    """Copies itself by its dictionary, in a method of its own."""

    number = 0

    def twin(self, number: int, deep: bool = False) -> Shared:
        made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__) if deep else self.__dict__)
        made.number = number
        return made


@pytest.mark.parametrize("deep", [False, True])
def test_who_has_the_dictionary_of_another_is_copied_as_itself(deep: bool) -> None:
    def body(context: cpudist.Context) -> None:
        model = Shared()
        opt = wrapped(model)
        repeat(model, opt, 1)
        twin = model.twin(7, deep)
        assert copy.deepcopy(twin).number == 7
        assert copy.deepcopy(model).number == 0
        assert "number" not in vars(copy.deepcopy(model))
        if deep:
            # Which has another entry, and is the only one with that.
            assert pickle.loads(pickle.dumps(twin)).number == 7  # noqa: S301
            return
        for one in (model, twin):
            with pytest.raises(cpudist.UnsupportedModelError, match=r"copy\)\.pop"):
                torch.save(one, io.BytesIO())
        vars(twin).pop("__reduce_ex__")
        file = io.BytesIO()
        torch.save(model, file)
        assert b"torch_cpudist" not in file.getvalue()

    alone(body)


def test_who_outlives_the_owner_of_its_dictionary_is_saved() -> None:
    def body(context: cpudist.Context) -> None:
        model = Shared()
        opt = wrapped(model)
        repeat(model, opt, 1)
        twin = model.twin(7, deep=True)
        opt.close()
        del model, opt
        gc.collect()
        assert pickle.loads(pickle.dumps(twin)).number == 7  # noqa: S301
        assert copy.deepcopy(twin).number == 7

    alone(body)


class Quiet(Columns):
    """Keeps what it has computed, and returns nothing."""

    def forward(self, ids: Any) -> None:
        self.found = super().forward(ids)
        if self.fails:
            raise ValueError("the batch is of no use")

    fails = False


@pytest.mark.parametrize("handling", [False, True])
def test_a_forward_that_returns_nothing_is_foreseen(handling: bool) -> None:
    """Whether it is called while an error is handled, or not."""

    def one(model: Quiet, opt: Any, batch: torch.Tensor) -> None:
        opt.zero_grad()
        model(batch)
        model.found.sum().backward()
        opt.step()

    def body(context: cpudist.Context) -> None:
        model = Quiet()
        opt = wrapped(model)
        batches = batches_of(0, WATCHED + 4)
        model.fails = True
        for _ in range(WATCHED):  # of which nothing is learned
            with pytest.raises(ValueError, match="no use"):
                model(batches[0])
        model.fails = False
        for step, batch in enumerate(batches[:-1]):
            try:
                if handling:
                    raise KeyError
                one(model, opt, batch)
            except KeyError:
                one(model, opt, batch)
            assert opt.stats()["lookups"]["together"] == max(step - WATCHED + 1, 0)
        assert opt.stats()["lookups"]["in_vain"] == 0

    alone(body)


def test_what_comes_beside_the_batch_is_not_walked() -> None:
    class Beside(Columns):
        def forward(self, batch: torch.Tensor, words: Any = None) -> torch.Tensor:
            return super().forward(batch)

    class Lazy(dict[int, int]):
        read = 0

        def items(self) -> Any:
            Lazy.read += 1
            return super().items()

    def body(context: cpudist.Context) -> None:
        model = Beside()
        opt = wrapped(model)
        words = Lazy(dict.fromkeys(range(100_000), 0))
        for batch in batches_of(0, WATCHED + 2):
            opt.zero_grad()
            model(batch, words=words).sum().backward()
            opt.step()
        assert Lazy.read == 0
        assert opt.stats()["lookups"]["alone"] > 0

    alone(body)


def test_two_optimizers_of_one_model_ask_for_their_tables() -> None:
    def body(context: cpudist.Context) -> None:
        model = Columns(4)
        halves = [list(model.tables[:2].parameters())]
        halves.append(list(model.tables[2:].parameters()))
        opts = [
            cpudist.DistributedOptimizer(torch.optim.SGD(half, lr=0.1), model)
            for half in halves
        ]
        for batch in batches_of(0, WATCHED + 2, count=4):
            model.zero_grad()
            model(batch).sum().backward()
            for opt in opts:
                opt.step()
        for opt in opts:
            found = opt.stats()["lookups"]
            assert (found["together"], found["tables"]) == (2, 2)
        opts[0].close()
        assert torch.equal(copy.deepcopy(model)(batch), model(batch))
        assert len(model._forward_pre_hooks) == 1

    alone(body)


def test_switched_off_there_is_no_hook() -> None:
    def body(context: cpudist.Context) -> None:
        model = Columns()
        opt = wrapped(model, learn_lookups=False)
        assert not model._forward_pre_hooks
        repeat(model, opt, 5)
        assert opt.stats()["lookups"]["together"] == 0

    alone(body)


def test_the_variable_switches_it_off() -> None:
    def body(context: cpudist.Context) -> None:
        model = Columns()
        wrapped(model)
        assert not model._forward_pre_hooks

    alone(body, variables={"CPUDIST_COMMUNICATOR_LEARN_LOOKUPS": "0"})


def test_after_leaving_lookups_ask_by_themselves() -> None:
    def body(context: cpudist.Context) -> None:
        model = Columns()
        opt = wrapped(model)
        repeat(model, opt, WATCHED + 2)
        opt.leave()
        before = opt.stats()["lookups"]
        for batch in batches_of(0, 5):
            model(batch)
        after = opt.stats()["lookups"]
        assert after["together"] == before["together"]
        assert after["in_vain"] == 0
        repeat(model, opt, 2)
        assert opt.stats()["lookups"]["together"] == before["together"] + 1

    alone(body)
