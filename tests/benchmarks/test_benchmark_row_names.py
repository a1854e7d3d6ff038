# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the name of a row of the benchmark says: strategy, tables, where it computes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# The benchmark is run as a script: its modules are found beside run.py.
sys.path.insert(0, str(BENCHMARKS))

from peers import cpudist_rank, strategy_row  # noqa: E402

import torch_cpudist as cpudist  # noqa: E402
from torch_cpudist.testing import run_ranks  # noqa: E402


@pytest.mark.parametrize(
    ("text", "strategy", "depth"),
    [
        ("sync", cpudist.Sync(), 0),
        ("geo:push_every=400", cpudist.Geo(push_every=400), 0),
        ("geo:exchange_budget=0.5", cpudist.Geo(exchange_budget=0.5), 0),
        ("half_async:group=0+2/1", cpudist.HalfAsync(group=[[0, 2], [1]]), 0),
        ("async:prefetch=2", cpudist.Async(), 2),
        ("async:max_staleness=8", cpudist.Async(max_staleness=8), 0),
        ("async:remote=true:max_staleness=8", cpudist.Async(max_staleness=8), 0),
        ("sync:device=cuda:threads=4", cpudist.Sync(), 0),
    ],
)
def test_a_row_names_its_strategy_with_its_fields(
    text: str, strategy: cpudist.Strategy, depth: int
) -> None:
    assert cpudist_rank.strategy_of(text) == (strategy, depth)


def test_a_row_says_where_it_computes() -> None:
    spec = strategy_row("sync:device=cuda")
    assert (spec.device, spec.threads) == ("cuda", 1)
    spec = strategy_row("sync:threads=4")
    assert (spec.device, spec.threads) == ("cpu", 4)
    with pytest.raises(ValueError, match="expected device=cpu or cuda, found 'tpu'"):
        strategy_row("sync:device=tpu")
    with pytest.raises(ValueError, match="expected threads=1 or more, found '0'"):
        strategy_row("sync:threads=0")


def test_a_row_says_whether_its_tables_are_remote() -> None:
    for text, remote in (("sync", False), ("sync:remote=true", True)):
        model = torch.nn.ModuleDict({"table": torch.nn.Embedding(4, 2, sparse=True)})
        cpudist_rank.place_tables(model, text)

        def body(context: cpudist.Context, table=model["table"]) -> int:
            inner = torch.optim.SGD(table.parameters(), lr=0.1)
            optimizer = cpudist.DistributedOptimizer(inner, table)
            # Of a remote table no row is here, all are one of NaN.
            stride = table.weight.stride(0)
            optimizer.close()
            return stride

        assert (run_ranks(body, 1)[0] == 0) == remote
    with pytest.raises(ValueError, match="expected remote=true or false, found 'yes'"):
        cpudist_rank.place_tables(model, "sync:remote=yes")
