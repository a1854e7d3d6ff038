# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lookups that are foreseen: one request per server and forward, and the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from foreseen_cases import (
    BATCH,
    ROWS,
    STEPS,
    TABLES,
    WATCHED,
    Cast,
    Columns,
    Computed,
    batches_of,
    both,
    one_step,
    tables,
    train,
)
from sync_cases import run
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_cpudist as cpudist
from torch_cpudist import _core


def assert_foreseen(found: Any, servers: int, forwards: int = STEPS) -> None:
    """From the fourth forward on each had one pull per server."""
    assert found.requests[WATCHED:] == [2 * servers] * (len(found.requests) - WATCHED)
    assert found.lookups == {
        "together": forwards - WATCHED,
        "tables": TABLES,
        "alone": WATCHED * TABLES,
        "in_vain": 0,
    }


@pytest.mark.parametrize("make", [Columns, Cast])
@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_one_request_per_server_and_step(
    make: Any, trainers: int, servers: int
) -> None:
    def batches(rank: int) -> list[torch.Tensor]:
        kind = torch.float32 if make is Cast else torch.int64
        return [batch.to(kind) for batch in batches_of(rank)]

    for found in both(make, trainers, servers, batches=batches):
        assert found.requests[0] == (TABLES + 1) * servers
        assert_foreseen(found, servers)


def test_of_26_tables() -> None:
    def batches(rank: int) -> list[torch.Tensor]:
        return batches_of(rank, 5, count=26)

    for found in both(lambda: Columns(26), 2, 2, batches=batches):
        assert found.requests == 3 * [27 * 2] + 2 * [2 * 2]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (cpudist.HalfAsync, {"group": [[0, 1]]}),
        (cpudist.HalfAsync, {"group": [[0], [1]]}),
    ],
)
def test_groups_of_trainers(strategy: Any, options: dict[str, Any]) -> None:
    if len(options["group"]) == 1:
        found = both(trainers=2, strategy=strategy, options=options)
    else:
        found = train(True, trainers=2, strategy=strategy, options=options)
    for one in found:
        assert_foreseen(one, servers=1)


def test_uneven_and_empty_batches() -> None:
    def batches(rank: int) -> list[torch.Tensor]:
        return batches_of(rank, 20, size=lambda step, rank: (step * 3 + rank) % 5)

    for found in both(trainers=2, servers=2, batches=batches):
        assert found.lookups["together"] >= 10
        assert found.lookups["in_vain"] == 0


class ByName(nn.Module):
    """Ids by name, nested, of several types; one lookup takes none of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = tables(5)

    def forward(self, batch: Any, *, more: Any) -> torch.Tensor:
        flags = torch.zeros(len(more.first), dtype=torch.int64)
        found = [
            self.tables[0](batch["user"][0]),
            self.tables[1](batch["user"][1].long()),
            self.tables[2](more.first),
            self.tables[3](more.bags[:, 1:].reshape(-1)).view(-1, 2, 2).sum(1),
            self.tables[4](flags),
        ]
        return torch.tanh(torch.stack(found)).sum((0, -1))


@dataclass
class More:
    first: torch.Tensor
    bags: torch.Tensor


def test_inputs_of_every_form() -> None:
    def step(model: nn.Module, opt: Any, ids: torch.Tensor) -> None:
        batch = {"user": [ids[:, 0].clone(), ids[:, 1].int()], "not": "a tensor"}
        more = More(ids[:, 2].contiguous(), ids[:, 3:6])
        opt.zero_grad()
        model(batch, more=more).square().sum().backward()
        opt.step()

    (found,) = both(ByName, step=step)
    assert found.lookups["tables"] == 4
    assert found.lookups["together"] == STEPS - WATCHED
    assert found.lookups["alone"] == WATCHED * 5 + STEPS - WATCHED
    assert found.lookups["in_vain"] == 0


def test_computed_ids_are_left_to_their_lookups() -> None:
    for found in both(Computed, 2, 2):
        assert found.lookups["together"] == 0
        assert found.lookups["alone"] == STEPS * TABLES
        assert found.lookups["in_vain"] == 0


class Switching(Columns):
    """Looks up other columns from some forward on."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.forwards, self.at = 0, at

    def columns(self, ids: torch.Tensor) -> list[torch.Tensor]:
        self.forwards += 1
        found = super().columns(ids)
        return found if self.forwards <= self.at else found[1:] + found[:1]


def test_what_changes_is_dropped_and_learned_anew() -> None:
    steps, at, wrong, rest = 60, 10, 3, 32

    def batches(rank: int) -> list[torch.Tensor]:
        return batches_of(rank, steps)

    (found,) = both(lambda: Switching(at), batches=batches)
    watched = [*range(WATCHED)]
    guessed_wrong = [*range(at, at + wrong)]
    alone_ = [*range(at + wrong, at + wrong + rest + WATCHED - 1)]
    asked_alone = [step for step, n in enumerate(found.requests) if n > 2]
    assert asked_alone == watched + guessed_wrong + alone_
    assert found.lookups["tables"] == TABLES
    # Distinct ids of each column, in each of the forwards that were guessed wrong.
    assert 0 < found.lookups["in_vain"] <= wrong * TABLES * BATCH


def test_structures_are_learned_each_by_itself() -> None:
    class Either(Columns):
        def columns(self, ids: Any) -> list[torch.Tensor]:
            return super().columns(ids["ids"] if isinstance(ids, dict) else ids)

    def batches(rank: int) -> list[Any]:
        both_ways = zip(batches_of(rank), batches_of(rank + 7), strict=True)
        return [one for a, b in both_ways for one in (a, {"ids": b})]

    (found,) = both(Either, batches=batches)
    assert found.lookups["together"] == 2 * (STEPS - WATCHED)
    assert found.lookups["in_vain"] == 0


def test_evaluation_in_between() -> None:
    def step(model: nn.Module, opt: Any, batch: torch.Tensor) -> None:
        one_step(model, opt, batch)
        model.eval()
        with torch.no_grad():
            model((batch + 1) % ROWS)
        model.train()

    for found in both(trainers=2, servers=2, step=step):
        assert found.lookups["together"] == 2 * (STEPS - WATCHED)
        assert found.lookups["in_vain"] == 0


def test_several_forwards_of_a_step() -> None:
    def step(model: nn.Module, opt: Any, batch: torch.Tensor) -> None:
        opt.zero_grad()
        for part in batch.chunk(2):
            model(part).square().sum().backward()
        opt.step()

    for found in both(trainers=2, servers=2, step=step):
        # The first two were watched in steps 0 and 1, and one more.
        assert found.requests[2:] == [3 * 2] * (STEPS - 2)
        assert found.lookups["together"] == 2 * STEPS - WATCHED


class Recomputed(Columns):
    """Looks up once more in backward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        anchor = torch.ones((), requires_grad=True)
        found: torch.Tensor = checkpoint(
            lambda one: super(Recomputed, self).forward(ids) * one,
            anchor,
            use_reentrant=False,
        )
        return found


def test_recomputed_lookups() -> None:
    for found in both(Recomputed, 2, 2):
        assert_foreseen(found, servers=2)


def test_prefetch_by_the_user_wins() -> None:
    def step(model: Any, opt: Any, batch: torch.Tensor) -> None:
        own = {model.tables[i]: batch[:, i] for i in range(TABLES // 2)}
        opt.prefetch(own)
        one_step(model, opt, batch)

    for found in both(trainers=2, servers=2, step=step):
        # Their pull, that of all others, and the push.
        assert found.requests[WATCHED:] == [3 * 2] * (STEPS - WATCHED)
        assert found.stats["prefetch_hits"] > 0
        assert found.lookups["in_vain"] == 0


class Inner(nn.Module):
    """Computes ids and hands them to a module that looks all of them up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Columns()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner((ids * 7 + 1) % ROWS)
        return found


def test_a_module_inside_that_gets_everything_at_once() -> None:
    (found,) = both(Inner, servers=3)
    assert found.lookups["tables"] == TABLES
    assert found.lookups["together"] == STEPS - 2 * WATCHED
    assert found.requests[2 * WATCHED :] == [6] * (STEPS - 2 * WATCHED)


def test_a_forward_of_a_submodule_alone() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Columns(3), tables(1)[0]

    def step(model: Any, opt: Any, batch: torch.Tensor) -> None:
        opt.zero_grad()
        loss = model.left(batch).square().sum() + model.right(batch[:, 3]).sum()
        loss.backward()
        opt.step()

    (found,) = both(Two, step=step)
    assert found.lookups["tables"] == 3
    assert found.requests[WATCHED:] == [3] * (STEPS - WATCHED)


def test_lost_and_repeated_frames_change_nothing() -> None:
    def network() -> _core.InprocNetwork:
        plan = _core.FaultPlan(drop=0.2, duplicate=0.2, reorder=0.2, cut=0.02, seed=3)
        return _core.InprocNetwork(plan)

    plain = train(False, trainers=2, servers=2)
    found = train(True, trainers=2, servers=2, network=network())
    for one, other in zip(plain, found, strict=True):
        assert other.lookups["together"] == STEPS - WATCHED
        for name, value in one.state.items():
            assert torch.equal(value, other.state[name])


def test_arrivals_of_one_trainer_are_the_same() -> None:
    """Drained steps of Async: what is read depends on nothing but their order."""

    def step(model: nn.Module, opt: Any, batch: torch.Tensor) -> None:
        one_step(model, opt, batch)
        opt.flush("none")

    for options in (
        {},
        {"max_staleness": 0},
        {"delay_compensation": {"factor": 0.5}},
    ):
        (found,) = both(strategy=cpudist.Async, step=step, options=options, servers=2)
        assert found.lookups["together"] == STEPS - WATCHED
        assert found.lookups["alone"] == WATCHED * TABLES
        assert found.stats["staleness"]["steps_max"] == 0


class Counting(nn.Module):
    """Two tables whose gradients are whole numbers that do not depend on weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 1, sparse=True) for _ in "ab")
        for table in self.tables:
            nn.init.zeros_(table.weight)  # type: ignore[arg-type]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = [table(ids[:, i]).sum() for i, table in enumerate(self.tables)]
        return parts[0] + 3 * parts[1]


def test_arrivals_are_applied_once() -> None:
    steps = 20

    def body(context: cpudist.Context) -> Any:
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, model, strategy="async")
        for batch in batches_of(context.trainer_rank, steps, count=2):
            opt.zero_grad()
            model(batch).backward()
            opt.step()
        stats = opt.stats()
        opt.leave()
        context.barrier()
        opt.flush()
        return [table.weight.detach().clone() for table in model.tables], stats

    expected = [torch.zeros(ROWS, 1), torch.zeros(ROWS, 1)]
    for rank in range(2):
        for batch in batches_of(rank, steps, count=2):
            for i, scale in enumerate((1.0, 3.0)):
                ones = torch.full((len(batch), 1), -scale)
                expected[i].index_add_(0, batch[:, i], ones)
    for weights, stats in run(body, 2, 2):
        assert stats["lookups"]["together"] == steps - WATCHED
        for one, other in zip(weights, expected, strict=True):
            assert torch.equal(one, other)
