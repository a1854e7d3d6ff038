# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Server(memory_cap_bytes=)``: what does not fit ends with an error on everybody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.launch.context import open_contexts

ROWS, DIM = 1 << 30, 1024  # rows of 4 KiB, 1,020 of which are a slab
CAP_BYTES = 12 << 20  # two slabs and the index; not these, and gradients of 1,200 rows
TOO_MANY = 600  # new rows of each of two trainers
CAPPED = {"CPUDIST_SERVER_MEMORY_CAP_BYTES": str(CAP_BYTES)}


class Model(nn.Module):
    """One remote table that begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        with cpudist.remote_tables(min_rows=ROWS):
            self.table = nn.Embedding(ROWS, DIM)
            nn.init.zeros_(self.table.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).sum()


def wrapped(model: nn.Module, strategy: Any) -> cpudist.DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return cpudist.DistributedOptimizer(inner, model, strategy=strategy)


def step(model: nn.Module, opt: Any, ids: torch.Tensor) -> None:
    opt.zero_grad()
    model(ids).backward()
    opt.step()


def rows_of_servers() -> int:
    servers = [c.server for c in list(open_contexts) if c.server is not None]
    for server in servers:
        assert server.stats()["memory_bytes"] <= CAP_BYTES
    return sum(server.stats()["rows"] for server in servers)


def test_a_round_whose_rows_never_fit_is_refused_for_all_and_the_next_one_is_not():
    def body(context):
        model = Model()
        opt = wrapped(model, cpudist.Sync())
        rank = context.trainer_rank
        step(model, opt, torch.arange(10))
        with pytest.raises(cpudist.OverloadedError) as caught:
            step(model, opt, 10 + rank * TOO_MANY + torch.arange(TOO_MANY))
        text = str(caught.value)
        made = rows_of_servers()
        context.barrier()
        step(model, opt, torch.arange(20))
        context.barrier()
        with torch.no_grad():
            found = model.table(torch.tensor([0, 15, 10 + TOO_MANY]))[:, 0].tolist()
        return text, made, rows_of_servers(), found

    for text, before, after, found in run(body, 2, servers=1, variables=CAPPED):
        assert f"table table.weight: {2 * TOO_MANY} new rows need" in text
        assert f"memory_cap_bytes = {CAP_BYTES}" in text
        assert "CPUDIST_SERVER_MEMORY_CAP_BYTES to" in text
        assert "always will" in text
        assert (before, after) == (10, 20)
        assert found == [-2.0, -1.0, 0.0]


def test_a_queue_does_not_send_again_what_can_never_fit():
    found = []

    def body(context):
        model = Model()
        opt = wrapped(model, cpudist.Async())
        step(model, opt, torch.arange(10))
        opt.flush()

        def push_too_many():
            step(model, opt, torch.arange(10, 10 + 2 * TOO_MANY))
            opt.flush()

        with pytest.raises(cpudist.OverloadedError, match="1200 new rows") as caught:
            push_too_many()
        assert opt.stats()["staleness"]["overloaded"] == 0
        rows = rows_of_servers()
        # That push alone is lost: rows that are there are trained as before.
        step(model, opt, torch.arange(10))
        opt.flush()
        with torch.no_grad():
            moved = model.table(torch.arange(10))[:, 0].tolist()
        found.append((str(caught.value), rows, moved))

    run(body, 1, servers=1, variables=CAPPED)
    ((text, rows, moved),) = found
    assert "always will" in text
    assert rows == 10
    assert moved == [-2.0] * 10


def test_a_queue_sends_again_what_fits_when_others_are_done():
    """Trainers whose pushes fill the cap together make all their rows."""
    steps, each = 6, 200

    def body(context):
        model = Model()
        opt = wrapped(model, cpudist.Async())
        for at in range(steps):
            step(model, opt, torch.arange(at * 20, at * 20 + each))
        opt.flush()
        context.barrier()
        with torch.no_grad():
            moved = model.table(torch.arange(steps * 20 + each))[:, 0].sum().item()
        return moved, rows_of_servers()

    capped = {"CPUDIST_SERVER_MEMORY_CAP_BYTES": str(8 << 20)}
    trainers = 4
    for moved, rows in run(body, trainers, servers=1, variables=capped):
        assert moved == -trainers * steps * each
        assert rows == (steps - 1) * 20 + each


@pytest.mark.parametrize("strategy", [cpudist.Sync(), cpudist.Async(), cpudist.Geo()])
def test_a_model_whose_values_exceed_the_cap_is_refused_when_it_is_wrapped(strategy):
    def body(context):
        model = nn.Embedding(10_000, 16, sparse=True)
        with pytest.raises(cpudist.OverloadedError) as caught:
            wrapped(model, strategy)
        return str(caught.value)

    capped = {"CPUDIST_SERVER_MEMORY_CAP_BYTES": "800000"}
    for text in run(body, 2, servers=1, variables=capped):
        assert "parameter set 0 needs" in text
        assert "memory_cap_bytes = 800000" in text
        assert "CPUDIST_SERVER_MEMORY_CAP_BYTES to more than" in text


def test_rows_that_a_static_table_brings_are_refused_before_any_is_stored():
    """A table that is made remote with its values."""

    def body(context):
        model = nn.Sequential(nn.Embedding(10_000, 16))
        cpudist.shard_tables(model, remote=True)
        with pytest.raises((cpudist.ClosedError, cpudist.OverloadedError)) as caught:
            wrapped(model, cpudist.Sync())
        assert rows_of_servers() == 0
        return str(caught.value)

    capped = {"CPUDIST_SERVER_MEMORY_CAP_BYTES": "300000"}
    texts = run(body, 2, servers=1, variables=capped)
    assert "new rows need" in texts[0]
