# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs the blocks of docs/losses.md, over tables of two trainers."""

from __future__ import annotations

import math

import torch
from loop_pages import DOCS, blocks_of, run_block
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist

TEXT = (DOCS / "losses.md").read_text()
BLOCKS = blocks_of(TEXT)
WORDS, DIM = 2000, 4


def test_every_block_is_run_and_has_a_gradient_for_its_tables() -> None:
    assert set(BLOCKS) == {("two trainers", "in_batch"), ("two trainers", "sampled")}
    assert TEXT.count("```python") == len(BLOCKS)

    def body(context: cpudist.Context) -> list[bool]:
        torch.manual_seed(0)
        table = nn.Embedding(WORDS, DIM, sparse=True)
        bias = nn.Embedding(WORDS, 1, sparse=True)
        tower = nn.Embedding(WORDS, DIM, sparse=True)
        model = nn.ModuleList([table, bias, tower])
        inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
        optimizer = cpudist.DistributedOptimizer(inner, model)
        ids = torch.arange(context.trainer_rank, 16, 2)
        names = {
            "batch": {"user": ids, "item": ids % 5},
            "bias_table": bias,
            "cpudist": cpudist,
            "item_tower": table,
            "loader": [(ids, ids + 1)],
            "log_counts": torch.log1p(torch.arange(WORDS)),
            "network": tower,
            "table": table,
            "user_tower": tower,
            "words": WORDS,
        }
        learned = []
        for block, tables in (("in_batch", 2), ("sampled", 3)):
            optimizer.zero_grad()
            loss = run_block(BLOCKS["two trainers", block], block, names)["loss"]
            assert math.isfinite(loss.item())
            loss.backward()
            found = [p.grad for p in model.parameters() if p.grad is not None]
            learned.append(len(found) == tables and all(g.is_sparse for g in found))
            optimizer.step()
        return learned

    assert run(body, 2) == [[True, True]] * 2
