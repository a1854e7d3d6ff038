# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Bytes on the wire by table, and rows of pushes by bucket of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist

STEPS = 6
BATCH = 16
# A key, and a value of a row, as they travel where nothing is shortened.
KEY_BYTES, VALUE_BYTES = 8, 4


class TwoTables(nn.Module):
    """Of which the second has rows four times as long."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.EmbeddingBag(500, 8, mode="sum", sparse=True)
        self.wide = nn.EmbeddingBag(500, 32, mode="sum", sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.narrow(ids).sum(1) + self.wide(ids).sum(1)


def trained(strategy: str, dtype: str) -> list[dict[str, Any]]:
    """What two trainers and their servers have counted."""
    communicator = cpudist.Communicator(wire_dtype=dtype)
    made = {
        "sync": lambda: cpudist.Sync(communicator=communicator),
        "async": lambda: cpudist.Async(communicator=communicator),
        "geo": lambda: cpudist.Geo(push_every=2, communicator=communicator),
    }[strategy]()

    def body(context: cpudist.Context) -> dict[str, Any]:
        model = TwoTables()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=made)
        torch.manual_seed(context.trainer_rank)
        for _ in range(STEPS):
            opt.zero_grad()
            model(torch.randint(500, (BATCH, 4))).mean().backward()
            opt.step()
        # Of what is exchanged in the background nothing may have left by now, and the
        # first one to flush has nothing of the others'.
        for _ in range(2):
            opt.flush()
            context.barrier()
        ends = context.endpoints
        return {
            "stats": opt.stats(),
            "tables": {one["name"]: one for one in ends.client.table_traffic()},
            "queued": ends.client.stats()["queued"],
            "server": {one["name"]: one for one in ends.server.table_stats()},
        }

    return run(body, 2)


@pytest.mark.parametrize("strategy", ["sync", "async", "geo"])
def test_bytes_are_of_the_table_whose_rows_they_are(strategy: str) -> None:
    plain, shortened = trained(strategy, "fp32"), trained(strategy, "int8")
    for one in (*plain, *shortened):
        narrow, wide = one["tables"]["narrow.weight"], one["tables"]["wide.weight"]
        for way in ("bytes_sent", "bytes_received"):
            assert 0 < narrow[way] < wide[way]
            assert narrow[way] + wide[way] < one["stats"][way]
        assert one["queued"] == 0
    for name in ("narrow.weight", "wide.weight"):
        sent = [
            sum(t["tables"][name]["bytes_sent"] for t in ts)
            for ts in (plain, shortened)
        ]
        assert sent[1] < 0.8 * sent[0]


def test_plain_frames_are_counted_to_the_row() -> None:
    found = trained("sync", "fp32")
    for dim, name in ((8, "narrow.weight"), (32, "wide.weight")):
        for one in found:
            # Both tables are asked for, and get gradients of, the same keys.
            pushed = one["stats"]["rows_pushed"] // 2
            row_bytes = KEY_BYTES + VALUE_BYTES * dim
            assert one["tables"][name]["bytes_sent"] >= pushed * row_bytes
        rows = sum(one["stats"]["rows_pushed"] for one in found) // 2
        assert sum(sum(one["server"][name]["pushed"]) for one in found) == rows


@pytest.mark.parametrize("strategy", ["sync", "async", "geo"])
def test_one_hot_key_fills_one_bucket(strategy: str) -> None:
    def body(context: cpudist.Context) -> list[list[int]]:
        model = TwoTables()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        made = cpudist.Geo(push_every=1) if strategy == "geo" else strategy
        opt = cpudist.DistributedOptimizer(inner, model, strategy=made)
        for _ in range(STEPS):
            opt.zero_grad()
            model(torch.full((BATCH, 4), 7)).mean().backward()
            opt.step()
        opt.flush()
        context.barrier()
        return [one["pushed"] for one in context.endpoints.server.table_stats()]

    found = run(body, 2)
    for of_servers in zip(*found, strict=True):
        buckets = [rows for one in of_servers for rows in one]
        assert sum(rows > 0 for rows in buckets) == 1
        assert max(buckets) >= 2
