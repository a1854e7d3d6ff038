# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prefetch in rounds: the bits of training without it, and no pull on demand."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from async_cases import alone, wrapped
from sync_cases import assert_same_bits, copy_of, run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.launch.context import open_contexts

ROWS, DIM, STEPS = 60, 3, 12


class Model(nn.Module):
    """Two tables, one looked up twice in a forward, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.table = nn.Embedding(ROWS, DIM, sparse=True)
        self.last = nn.Linear(DIM, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, bags: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        half = len(ids) // 2
        picked = torch.cat([self.table(ids[:half]), self.table(ids[half:])])
        return self.last(torch.tanh(self.bag(bags) + picked)).squeeze(1)


Batch = tuple[torch.Tensor, torch.Tensor]


def batches_of(rank: int, steps: int = STEPS, uneven: bool = False) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 + rank)
    made = []
    for step in range(steps):
        n = 1 + (step + rank) % 4 if uneven else 3
        bags = torch.randint(ROWS, (n, 4), generator=generator)
        ids = torch.randint(ROWS, (n,), generator=generator)
        made.append((bags, ids.to(torch.int32) if rank % 2 else ids))
    return made


def ids_of(model: Model) -> Any:
    return lambda batch: {model.bag: batch[0], model.table: batch[1]}


def train_batch(model: Model, optimizer: Any, batch: Batch, **options: Any) -> None:
    optimizer.zero_grad()
    model(*batch).square().mean().backward()
    optimizer.step(**options)


def train(
    depth: int,
    trainers: int,
    servers: int,
    *,
    strategy: Any = None,
    clip: Any = None,
    uneven: bool = False,
    early: bool = False,
    network: Any = None,
    optimizer: Any = torch.optim.Adagrad,
) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Every trainer's final weights and stats; ``depth`` 0 is without prefetch."""

    def body(context: cpudist.Context) -> Any:
        model = Model()
        inner = optimizer(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(
            inner, model, strategy=strategy or cpudist.Sync(), clip=clip
        )
        rank = context.trainer_rank
        loader: Any = batches_of(rank, STEPS // (rank + 1) if early else STEPS, uneven)
        if depth:
            loader = cpudist.data.prefetch(loader, opt, ids=ids_of(model), depth=depth)
            assert len(loader) == STEPS // (rank + 1) if early else STEPS
        for batch in loader:
            options = {"samples": len(batch[1])} if uneven else {}
            train_batch(model, opt, batch, **options)
        stats = opt.stats()
        opt.leave()
        context.barrier()
        opt.flush()
        return copy_of(model), stats

    return run(body, trainers, servers, network=network)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("trainers", "servers"), [(1, 0), (1, 2), (2, 0), (2, 3), (3, 1)]
)
def test_rounds_are_the_same_bits(trainers: int, servers: int, depth: int) -> None:
    plain = train(0, trainers, servers)
    ahead = train(depth, trainers, servers)
    for (expected, _), (found, stats) in zip(plain, ahead, strict=True):
        assert_same_bits(expected, found)
        assert stats["rows_pulled"] == 0
        assert stats["prefetch_hits"] > 0
        assert stats["prefetch_refreshed"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"clip": cpudist.ClipNorm(0.05)},
        {"clip": cpudist.ClipTensorNorm(0.02)},
        {"uneven": True},
        {"early": True},
        {"uneven": True, "early": True, "clip": cpudist.ClipNorm(0.05)},
        {"optimizer": torch.optim.Adam},
    ],
    ids=["clip_norm", "clip_each", "uneven", "early", "all", "adam"],
)
def test_rounds_of_every_kind_are_the_same_bits(options: dict[str, Any]) -> None:
    plain = train(0, 2, 2, **options)
    ahead = train(2, 2, 2, **options)
    for (expected, _), (found, stats) in zip(plain, ahead, strict=True):
        assert_same_bits(expected, found)
        assert stats["rows_pulled"] == 0


def test_lost_and_repeated_frames_change_nothing() -> None:
    plain = train(0, 2, 2)
    plan = _core.FaultPlan(drop=0.2, duplicate=0.2, reorder=0.2, cut=0.02, seed=3)
    ahead = train(2, 2, 2, network=_core.InprocNetwork(plan))
    for (expected, _), (found, _) in zip(plain, ahead, strict=True):
        assert_same_bits(expected, found)


def test_one_group_of_half_async_is_sync() -> None:
    plain = train(0, 2, 1)
    ahead = train(1, 2, 1, strategy=cpudist.HalfAsync(group=[[0, 1]]))
    for (expected, _), (found, stats) in zip(plain, ahead, strict=True):
        assert_same_bits(expected, found)
        assert stats["rows_pulled"] == 0


def test_one_pull_per_server_and_step() -> None:
    servers = 2

    def body(context: cpudist.Context) -> None:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Embedding(500, 2, sparse=True) for _ in range(3))
        opt = wrapped(model, cpudist.Sync())
        generator = torch.Generator().manual_seed(context.trainer_rank)
        loader = [torch.randint(500, (3, 40), generator=generator) for _ in range(8)]
        before = []
        for batch in cpudist.data.prefetch(
            loader, opt, ids=lambda b: dict(zip(model, b, strict=True))
        ):
            before.append(opt.stats()["requests"])
            opt.zero_grad()
            sum(m(i).sum() for m, i in zip(model, batch, strict=True)).backward()
            opt.step()
        # A push and a pull at each server; the last step has nothing to ask for.
        counts = [b - a for a, b in itertools.pairwise(before)]
        assert counts == [2 * servers] * 6 + [servers]
        assert opt.stats()["rows_pulled"] == 0

    run(body, 2, servers)


def test_a_row_of_both_batches_is_fresh() -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Embedding(4, 1, sparse=True)
        with torch.no_grad():
            model.weight.zero_()
        opt = wrapped(model, cpudist.Sync())
        for step in range(4):
            opt.prefetch({model: torch.tensor([0, 1])})
            opt.zero_grad()
            out = model(torch.tensor([0, 1]))
            assert out.flatten().tolist() == [-float(step)] * 2
            out.sum().backward()
            opt.step()
        stats = opt.stats()
        assert stats["rows_pulled"] == 0
        assert stats["prefetch_hits"] == 8

    alone(body)


def test_rows_of_others_are_brought_anew_and_idle_ones_are_not() -> None:
    def body(context: cpudist.Context) -> Any:
        model = nn.Embedding(10, 1, sparse=True)
        with torch.no_grad():
            model.weight.zero_()
        opt = wrapped(model, cpudist.Sync(), lr=2.0)
        rank = context.trainer_rank
        if rank == 0:
            opt.prefetch({model: torch.tensor([5, 6, 7])})
        model(torch.tensor([rank + 4])).sum().backward()
        opt.step()
        seen = model(torch.tensor([5, 6, 7])).flatten().tolist()
        return seen, opt.stats()["prefetch_refreshed"], opt.stats()["rows_pulled"]

    first, second = run(body, 2, 1)
    assert first == ([-1.0, 0.0, 0.0], 1, 1)
    assert second[0] == first[0]


@pytest.mark.parametrize(
    "drop", ["flush", "leave", "barrier", "store_model", "load_state_dict"]
)
def test_what_is_outstanding_is_dropped(drop: str) -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Embedding(8, 1, sparse=True)
        with torch.no_grad():
            model.weight.zero_()
        opt = wrapped(model, cpudist.Sync())
        opt.prefetch({model: torch.arange(8)})
        if drop == "load_state_dict":
            opt.load_state_dict(opt.state_dict())
        elif drop == "store_model":
            opt.flush()
            with torch.no_grad():
                model.weight.fill_(3.0)
            opt.store_model(all_rows=True)
        elif drop == "barrier":
            context.barrier()
        else:
            getattr(opt, drop)()
        expected = 3.0 if drop == "store_model" else 0.0
        opt.prefetch({model: torch.arange(2)})
        assert model(torch.arange(8)).flatten().tolist() == [expected] * 8
        model(torch.arange(3)).sum().backward()
        opt.step()
        assert model(torch.arange(1)).item() == expected - 1.0

    alone(body)


def test_prefetch_of_rows_never_used_is_bounded() -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Embedding(2000, 1, sparse=True)
        first = model.weight.detach().clone()
        opt = wrapped(model, cpudist.Sync())
        for step in range(40):
            opt.prefetch({model: torch.arange(step * 20, step * 20 + 20)})
            opt.zero_grad()
            model(torch.tensor([1999 - step])).sum().backward()
            sent = opt.stats()["bytes_sent"]
            opt.step()
        # Keys of 16 batches at most.
        assert opt.stats()["bytes_sent"] - sent < 16 * 20 * 8 + 1000
        opt.flush()
        assert torch.equal(model.weight[-40:], first[-40:] - 1)
        assert torch.equal(model.weight[:-40], first[:-40])

    alone(body)


def test_eval_uses_what_is_there() -> None:
    def body(context: cpudist.Context) -> None:
        model = Model()
        opt = wrapped(model, cpudist.Sync(), lr=0.1)
        first, second, third = batches_of(0, 3)
        train_batch(model, opt, first)
        opt.prefetch(ids_of(model)(second))
        with torch.no_grad():
            found = model.eval()(*second)
            other = model(*third)
        opt.flush()
        with torch.no_grad():
            assert torch.equal(found, model(*second))
            assert torch.equal(other, model(*third))

    alone(body)


def test_lookups_of_several_threads_find_their_rows() -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.ModuleList(nn.Embedding(400, 2, sparse=True) for _ in range(2))
        first = [table.weight.detach().clone() for table in model]
        opt = wrapped(model, cpudist.Sync())
        for step in range(6):
            ids = torch.arange(60 * step, 60 * step + 60)
            opt.prefetch(dict.fromkeys(model, ids))
            opt.zero_grad()
            with ThreadPoolExecutor(4) as pool:
                parts = [ids[i::4] for i in range(4)]
                jobs = [(m, i, p) for m in range(2) for i, p in enumerate(parts)]
                found = list(pool.map(lambda job: model[job[0]](job[2]), jobs))
            for (m, _, part), rows in zip(jobs, found, strict=True):
                assert torch.equal(rows, first[m][part])
            sum(rows.sum() for rows in found).backward()
            opt.step()
        assert opt.stats()["rows_pulled"] == 0
        assert opt.stats()["prefetch_hits"] == 6 * 2 * 60

    # Every reply takes its time, so that the threads wait for it together.
    plan = _core.FaultPlan(delay=1.0, delay_ms_max=4, seed=3)
    alone(body, servers=2, network=_core.InprocNetwork(plan))


def test_a_lost_server_is_told_at_the_next_use() -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Embedding(40, 1, sparse=True)
        opt = wrapped(model, cpudist.Sync())
        servers = [c.server for c in list(open_contexts) if c.server is not None]
        assert len(servers) == 1
        servers[0].stop("the test ends it")
        with pytest.raises(cpudist.Error) as caught:  # noqa: PT012
            opt.prefetch({model: torch.arange(4)})
            model(torch.arange(4))
        assert isinstance(caught.value, (cpudist.PeerLostError, cpudist.ClosedError))
        raise Expected

    with pytest.raises(Expected):
        alone(body)


class Expected(Exception):
    """Ends a run whose server is gone."""


@pytest.mark.parametrize("strategy", ["sync", "async", "geo", "allreduce", "reduce"])
def test_what_is_wrong_is_refused(strategy: str) -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Sequential(nn.Embedding(8, 2, sparse=True), nn.Linear(2, 1))
        opt = wrapped(model, cpudist.strategy(strategy))
        ids = torch.tensor([1])
        with pytest.raises(cpudist.RowOutOfRangeError):
            opt.prefetch({model[0]: torch.tensor([1, 8])})
        with pytest.raises(cpudist.InvalidArgumentError, match="no table"):
            opt.prefetch({model[1]: ids})
        with pytest.raises(cpudist.InvalidArgumentError, match="mapping"):
            opt.prefetch(ids)
        with pytest.raises(cpudist.InvalidArgumentError, match="keys"):
            opt.prefetch({"0": ids})
        with pytest.raises(TypeError, match="int64"):
            opt.prefetch({model[0]: ids.float()})
        assert opt.stats()["rows_prefetched"] == 0
        opt.prefetch({model[0]: ids[:0]})
        opt.close()
        with pytest.raises(cpudist.ClosedError):
            opt.prefetch({model[0]: ids})

    alone(body)


def test_geo_has_nothing_to_do(caplog: Any) -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Embedding(8, 2, sparse=True)
        opt = wrapped(model, cpudist.Geo(push_every=2))
        with caplog.at_level("INFO", logger="torch_cpudist"):
            for _ in range(3):
                opt.prefetch({model: torch.tensor([1])})

    alone(body)
    assert sum("every row is here" in r.message for r in caplog.records) == 1
