# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who steps what of a plain optimizer: parts by owners, the rest as a whole, once."""

from __future__ import annotations

import pytest
import torch
from replica_cases import DIM
from replica_tables import (
    MODES,
    Calls,
    Tables,
    assert_equal,
    batch_of,
    both,
    cut,
    loss_of,
)
from sync_cases import copy_of, largest_difference
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torch_cpudist as cpudist
from torch_cpudist.errors import UnsupportedModelError, UnsupportedOptimizerError
from torch_cpudist.ops.tables import TablesStep
from torch_cpudist.replicas import reduction

SGD, Adagrad, Adam = torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam


def tables_by(build, reduce, between=None, steps=6):
    batches = [(cut(batch_of(i), 2), batch_of(i)) for i in range(steps)]
    return both(Tables, build, loss_of, batches, reduce, between=between)


# -- tables ------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_table_of_two_optimizers_takes_both_steps_in_order(reduce, momentum):
    def build(model):
        first = SGD(model.parameters(), lr=0.05)
        return [first, SGD(model.tables(), lr=0.1, momentum=momentum)]

    assert_equal(tables_by(build, reduce))


@MODES
def test_groups_of_tables_may_change(monkeypatch, reduce):
    """A table leaves for another optimizer; one that had none comes to one."""
    calls = Calls(monkeypatch)

    def build(model):
        return [Adagrad([model.first.weight], lr=0.1), SGD(model.out.parameters(), 0.1)]

    def between(step, model, optimizers):
        if step == 1:
            optimizers[0].param_groups.pop(0)
            optimizers[1].add_param_group({"params": [model.first.weight], "lr": 0.2})
        if step == 3:
            optimizers[1].add_param_group({"params": [model.second.weight]})

    assert_equal(tables_by(build, reduce, between))
    # One table in steps 0 to 3, two in 4 and 5, of which 4 does not use the second.
    assert len(calls.threads) == 7 * (2 if reduce == "allreduce" else 1)


@pytest.mark.parametrize("tables", [2, 9])
def test_all_tables_of_a_step_are_one_call_for_each_thread(monkeypatch, tables):
    """Each call lets go of Python's lock, for which the others then queue."""
    model = nn.ModuleList(nn.Embedding(8, DIM, sparse=True) for _ in range(tables))
    calls, sums, real = Calls(monkeypatch), [], reduction.sum_table_rows

    def count(given):
        sums.append(len(given))
        return real(given)

    monkeypatch.setattr(reduction, "sum_table_rows", count)
    with cpudist.ReplicaExecutor(
        model,
        lambda model, ids: sum(table(ids).square().mean() for table in model),
        SGD(model.parameters(), lr=0.1),
        2,
        num_threads=1,
    ) as executor:
        executor.run(torch.arange(8))
    assert len(calls.steps) == 2
    assert len(calls.threads) == tables
    assert sorted(sums) == [0, 0, tables, tables]


@pytest.mark.parametrize("make", [SGD, Adagrad])
def test_weight_decay_of_a_table_is_refused_as_torch_does(make):
    def build(model):
        return [make(model.parameters(), lr=0.1, weight_decay=0.01)]

    plain = Tables()
    loss_of(plain, batch_of(0)).backward()
    with pytest.raises(RuntimeError):
        build(plain)[0].step()
    with pytest.raises(RuntimeError, match="in replica"):
        tables_by(build, "reduce", steps=1)


class MaybeSparse(nn.Module):
    """One table, whose gradient is sparse or dense by what a part says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(12, 4, sparse=True, dtype=torch.float64)
        self.out = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, ids, sparse):
        return self.out(functional.embedding(ids, self.table.weight, sparse=sparse))


@MODES
def test_a_table_that_is_sparse_in_one_replica_and_dense_in_another(reduce):
    ids = torch.randint(0, 12, (6,), generator=torch.Generator().manual_seed(1))
    parts = [(ids[:3], True), (ids[3:], False)]

    def loss(model, part):
        return model(*part).square().mean()

    models = both(
        MaybeSparse,
        lambda model: [Adagrad(model.parameters(), lr=0.1)],
        loss,
        [(parts, (ids, False))] * 3,
        reduce,
    )
    assert_equal(models)


@MODES
def test_a_table_that_is_no_row_after_another(reduce):
    def make():
        model = Tables()
        weight = model.first.weight.detach()
        model.first.weight = nn.Parameter(weight.t().contiguous().t())
        return model

    def build(model):
        return [SGD(model.parameters(), lr=0.1)]

    batches = [(cut(batch_of(i), 2), batch_of(i)) for i in range(3)]
    assert_equal(both(make, build, loss_of, batches, reduce))


def test_a_step_leaves_one_gradient_of_a_table():
    model = Tables()
    with cpudist.ReplicaExecutor(
        model, loss_of, Adagrad(model.parameters(), lr=0.1), 2, num_threads=1
    ) as executor:
        executor.run_parts(cut(batch_of(0), 2))
        grads = [parameter.grad for parameter in model.parameters()]
        sizes = [
            g._values().nbytes + g._indices().nbytes if g.is_sparse else g.nbytes
            for g in grads
        ]
        assert executor.stats()["gradient_bytes"] == sum(sizes)


def test_norms_that_lookups_enforce_are_refused():
    bounded = nn.Embedding(8, 4, sparse=True, max_norm=1.0)
    optimizer = SGD(bounded.parameters(), lr=0.1)

    def loss(model, ids):
        return model(ids).square().mean()

    with pytest.raises(UnsupportedModelError, match=r"max_norm=1\.0"):
        cpudist.ReplicaExecutor(bounded, loss, optimizer, 2)
    cpudist.ReplicaExecutor(bounded, loss, optimizer, 1).close()
    bounded.max_norm = None
    with cpudist.ReplicaExecutor(bounded, loss, optimizer, 2) as executor:
        executor.run(torch.arange(8))
        bounded.max_norm = 2.0
        with pytest.raises(UnsupportedModelError, match=r"max_norm=2\.0"):
            executor.run(torch.arange(8))


# -- what steps as a whole ---------------------------------------------------------


@MODES
def test_a_wrapped_step_and_global_hooks_run_once_per_step(reduce):
    seen = []

    def build(model):
        dense = SGD(model.out.parameters(), lr=0.05)
        inner = dense.step

        def step(*arguments, **options):
            seen.append("step")
            for parameter in model.out.parameters():
                parameter.grad.mul_(0.5)
            return inner(*arguments, **options)

        dense.step = step
        return [Adagrad(model.tables(), lr=0.1), dense]

    assert_equal(tables_by(build, reduce, steps=4))
    assert seen == ["step"] * 8  # of replicas and of plain torch
    seen.clear()
    hook = register_optimizer_step_pre_hook(lambda o, *_: seen.append(type(o)))
    try:
        assert_equal(tables_by(lambda m: [Adagrad(m.parameters(), 0.1)], reduce))
    finally:
        hook.remove()
    assert seen == [Adagrad] * 12


@MODES
def test_optimizers_with_parameters_in_common_step_in_their_order(reduce):
    def build(model):
        first = SGD(model.out.parameters(), lr=0.05)
        first.register_step_post_hook(lambda *_: None)
        # Weight decay sees what the first has left.
        rest = Adagrad(model.out.parameters(), lr=0.1, weight_decay=0.5)
        return [first, rest]

    assert_equal(tables_by(build, reduce))


def test_both_modes_have_the_same_bits_beside_an_optimizer_that_steps_as_a_whole():
    def train(reduce):
        model = Tables(torch.float32)
        dense = Adam(model.out.parameters(), lr=0.05)
        dense.register_step_post_hook(lambda *_: None)
        with cpudist.ReplicaExecutor(
            model,
            loss_of,
            [Adagrad(model.tables(), lr=0.1), dense],
            2,
            reduce=reduce,
            num_threads=1,
        ) as executor:
            for step in range(20):
                executor.run_parts(cut(batch_of(step, torch.float32), 2))
        return copy_of(model)

    found, expected = train("reduce"), train("allreduce")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_copies_are_right_again_when_hooks_have_gone():
    """A replica's own state is of the steps that it took itself."""
    hooks = []

    def between(step, model, optimizers):
        if step == 1:
            hooks.append(optimizers[0].register_step_pre_hook(lambda *_: None))
        if step == 3:
            hooks.pop(0).remove()

    def build(model):
        return [Adam(model.parameters(), lr=0.05)]

    def make():
        torch.manual_seed(8)
        return nn.Linear(DIM, 2, dtype=torch.float64)

    def batch(step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(6, DIM, generator=generator, dtype=torch.float64)

    batches = [(batch(i).tensor_split(2), batch(i)) for i in range(7)]
    models = both(
        make,
        build,
        lambda model, x: model(x).square().mean(),
        batches,
        "allreduce",
        between=between,
    )
    assert_equal(models)


@MODES
def test_a_step_that_failed_takes_no_gradient_from_the_next(monkeypatch, reduce):
    model, seen = Tables(), []

    def fail(*_arguments, **_options):
        raise RuntimeError("no step")

    with cpudist.ReplicaExecutor(
        model,
        loss_of,
        Adagrad(model.parameters(), lr=0.1),
        2,
        reduce=reduce,
        num_threads=1,
        before_update=lambda: seen.append(model.first.weight.grad.to_dense()),
    ) as executor:
        with monkeypatch.context() as patched:
            patched.setattr(TablesStep, "run", fail)
            with pytest.raises(RuntimeError, match="no step"):
                executor.run_parts(cut(batch_of(0), 2))
        before = model.first.weight.detach().clone()
        executor.run_parts(cut(batch_of(0), 2))
    assert seen[1].abs().sum() > 0
    assert not torch.equal(model.first.weight, before)


# -- what is refused ---------------------------------------------------------------


def test_a_foreign_parameter_that_comes_later_is_refused():
    model = nn.Linear(DIM, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with cpudist.ReplicaExecutor(
        model, lambda m, x: m(x).mean(), optimizer, 2, num_threads=1
    ) as executor:
        executor.run(torch.ones(4, DIM))
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        before = copy_of(model)
        with pytest.raises(UnsupportedOptimizerError, match="not in the model when"):
            executor.run(torch.ones(4, DIM))
    assert largest_difference(copy_of(model), before) == 0


def test_attributes_that_are_computed_from_parameters_are_refused():
    model = nn.Linear(DIM, 1)
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(model)
    with pytest.raises(UnsupportedModelError, match="parametrizations"):
        cpudist.ReplicaExecutor(
            model, lambda m, x: m(x).mean(), SGD(model.parameters(), lr=0.1), 2
        )
