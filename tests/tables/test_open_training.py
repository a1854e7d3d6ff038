# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables of any key train as a dictionary of rows, and as others do, to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from open_cases import (
    DIM,
    KEYS,
    assert_as_in,
    begun,
    counted,
    dictionary_of,
    keys_trained,
    pushes,
    read,
    step,
    wrap,
)
from staging_cases import stage_always
from sync_cases import run
from table_cases import alone
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.tables.remote_weight import table_of

STEPS = 12
UNIFORM = cpudist.Uniform(-1, 1)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_any_key_trains_as_in_a_dictionary(trainers, servers):
    modules = [cpudist.Embedding(DIM, initial=UNIFORM, seed=5) for _ in range(trainers)]
    expected = dictionary_of(modules[0])
    given = [pushes(STEPS, rank) for rank in range(trainers)]

    assert_as_in(expected, given, keys_trained(modules, given, servers))
    assert (expected.filtered, expected.evicted) == (0, 0)


class Words(nn.Module):
    """Every kind of module over two weights, in front of a dense layer."""

    def __init__(self, keys: Sequence[int], rows: int | None = None) -> None:
        super().__init__()
        padding, other = keys[3], keys[4]
        if rows is None:
            self.word: nn.Embedding = cpudist.Embedding(DIM, padding_key=padding)
            self.bag: nn.EmbeddingBag = cpudist.EmbeddingBag(DIM, padding_key=other)
            self.last: nn.EmbeddingBag = cpudist.EmbeddingBag(DIM, mode="sum")
        else:
            self.word = nn.Embedding(rows, DIM, padding_idx=padding, sparse=True)
            self.bag = nn.EmbeddingBag(rows, DIM, padding_idx=other, sparse=True)
            self.last = nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True)
        self.last.weight = self.word.weight
        self.top = nn.Linear(DIM, 1)
        with torch.no_grad():
            for parameter in self.top.parameters():
                parameter.fill_(0.3)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat, offsets = ids.reshape(-1), torch.arange(0, ids.numel(), ids.shape[1])
        last = self.last(flat, offsets, weights.reshape(-1))
        hidden = self.word(ids[:, 0]) * self.word(ids[:, 1]) + self.bag(ids) + last
        return self.top(torch.tanh(hidden)).squeeze(1)


RULES = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "row_wise": lambda p: cpudist.optim.RowWiseAdagrad(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
}


# Of a table of so many rows, too. Sums depend on keys in their last bit.
ROWS = 2**58
CLOSED = [key % ROWS for key in KEYS]


def closed_like(model: Words) -> Words:
    """A remote table whose rows begin as those of the same keys of a model of any."""
    with cpudist.remote_tables(min_rows=ROWS):
        made = Words(CLOSED, ROWS)
    for name in ("word", "bag"):
        own, other = getattr(made, name).weight, getattr(model, name).weight
        table_of(own).program = table_of(other).program
    return made


def static_like(model: Words) -> Words:
    """With rows in memory, of which row i is what key i of ``KEYS`` begins with."""
    made = Words(range(len(KEYS)), len(KEYS))
    for name in ("word", "bag"):
        rows = begun(getattr(model, name).weight, KEYS, f"{name}.weight")
        with torch.no_grad():
            getattr(made, name).weight.copy_(torch.from_numpy(rows))
    return made


def trained(model, case, rank, places):
    """Losses and rows; ``places`` says what ids are called."""
    make, strategy, options = case
    opt = cpudist.DistributedOptimizer(
        make(model.parameters()), model, strategy(), **options
    )
    losses = []
    for at in range(STEPS):
        made = torch.Generator().manual_seed(100 * at + rank)
        ids = places[torch.randint(0, len(KEYS), (6, 3), generator=made)]
        weights = torch.rand(6, 3, generator=made)
        target = torch.randn(6, generator=made)
        opt.zero_grad()
        opt.prefetch({model.word: ids[:, :2], model.bag: ids})
        loss = (model(ids, weights) - target).square().mean()
        loss.backward()
        opt.step()
        opt.flush("dense")
        losses.append(float(loss.detach()))
    rows = [read(model.word, places.tolist()), read(model.last, places.tolist())]
    with torch.no_grad():
        bags = model.bag(places[:, None])
    return losses, [*rows, bags.clone(), model.top.weight.detach().clone()]


def all_trained(models, case, places, servers):
    def body(context):
        rank = context.trainer_rank
        return trained(models[rank], case, rank, torch.tensor(places))

    return run(body, len(models), servers)


def assert_open_equals_closed(case, trainers, servers):
    models = [Words(CLOSED) for _ in range(trainers)]
    others = [closed_like(models[0]) for _ in range(trainers)]
    opened = all_trained(models, case, CLOSED, servers)
    closed = all_trained(others, case, CLOSED, servers)
    for found, expected in zip(opened, closed, strict=True):
        assert found[0] == expected[0]
        for one, other in zip(found[1], expected[1], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", [cpudist.Sync, cpudist.Async])
def test_any_key_as_a_static_table(strategy):
    trainers = 2 if strategy is cpudist.Sync else 1
    case = RULES["adagrad"], strategy, {}
    models = [Words(KEYS) for _ in range(trainers)]
    statics = [static_like(models[0]) for _ in range(trainers)]
    opened = all_trained(models, case, KEYS, 2)
    static = all_trained(statics, case, range(len(KEYS)), 2)
    for found, expected in zip(opened, static, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        for one, other in zip(found[1], expected[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("servers", [0, 3])
@pytest.mark.parametrize("rule", RULES)
def test_sync_as_a_table_of_rows(rule, servers):
    assert_open_equals_closed((RULES[rule], cpudist.Sync, {}), 2, servers)


@pytest.mark.parametrize(
    "communicator", [{"wire_dtype": "int8"}, {"wire_dtype": "bf16"}]
)
def test_keys_over_a_coded_wire(communicator):
    def strategy():
        return cpudist.Sync(communicator=communicator)

    assert_open_equals_closed((RULES["adagrad"], strategy, {}), 2, 2)


def test_async_with_one_trainer():
    assert_open_equals_closed((RULES["adagrad"], cpudist.Async, {}), 1, 2)


def test_clipping_and_averages():
    options = {"clip": cpudist.ClipNorm(0.05), "average": cpudist.EMA(0.9)}
    assert_open_equals_closed((RULES["adagrad"], cpudist.Sync, options), 2, 2)


def test_staged_models(monkeypatch):
    stage_always(monkeypatch)
    assert_open_equals_closed((RULES["adagrad"], cpudist.Sync, {}), 2, 2)


def test_rows_are_made_by_gradients_and_not_by_lookups():
    module = cpudist.Embedding(DIM)

    def body():
        opt = wrap(module)
        counts = []
        read(module)
        counts.append(counted())
        module(torch.tensor(KEYS))
        counts.append(counted())
        step(opt, module, (KEYS[:3], [1.0, 1.0, 1.0]))
        counts.append(counted())
        return counts

    first, second, third = alone(body)
    assert first["rows"] == second["rows"] == first["created"] == 0
    assert first["unknown_reads"] >= len(KEYS)
    assert (third["rows"], third["created"]) == (3, 3)
    assert third["bytes"] > 0


def test_statistics_are_of_all_remote_tables_and_no_others():
    with cpudist.remote_tables(names=["remote"]):
        model = nn.ModuleDict(
            {
                "static": nn.Embedding(9, DIM, sparse=True),
                "remote": nn.Embedding(9, DIM),
                "open": cpudist.Embedding(DIM),
            }
        )

    def body():
        opt = wrap(model)
        model["remote"](torch.tensor([1, 2])).sum().backward()
        opt.step()
        assert opt.shrink() == {}
        return opt.table_stats()

    found = alone(body)
    assert {name: one["rows"] for name, one in found.items()} == {
        "remote.weight": 2,
        "open.weight": 0,
    }
    known = ["bytes", "created", "evicted", "filtered", "rows", "unknown_reads"]
    assert all(sorted(one) == known for one in found.values())


def test_without_servers_there_are_no_statistics():
    model = nn.Linear(2, 2)

    def body():
        opt = wrap(model, cpudist.AllReduce())
        assert opt.table_stats() == opt.shrink() == {}
        with pytest.raises(cpudist.InvalidArgumentError, match="which are none"):
            opt.shrink("weight")

    alone(body)


def test_replicas_share_a_table_of_any_key():
    model = Words(CLOSED)
    closed = closed_like(model)

    places = torch.tensor(CLOSED)

    def train(made):
        opt = cpudist.DistributedOptimizer(RULES["adagrad"](made.parameters()), made)

        def loss(replica, batch):
            return replica(batch, torch.ones(batch.shape)).square().mean()

        with cpudist.ReplicaExecutor(made, loss, opt, 2) as executor:
            for at in range(4):
                drawn = torch.Generator().manual_seed(at)
                chosen = torch.randint(0, len(KEYS), (6, 3), generator=drawn)
                executor.run(places[chosen])
        return read(made.word, places.tolist())

    found = alone(lambda: train(model))
    assert torch.equal(found, alone(lambda: train(closed)))
