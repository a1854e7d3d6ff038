# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The blocks of the pages about the training loop, and what they use."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import torch_cpudist as cpudist

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = "\n".join(
    (DOCS / name).read_text() for name in ("training_loop.md", "around_the_loop.md")
)


def blocks_of(text):
    """The tagged blocks of a page, by what runs them and what they are about."""
    found = re.findall(
        r"<!-- ([\w ]+): (\w+) -->\n```python\n(.*?)```", text, re.DOTALL
    )
    return {(kind, about): body for kind, about, body in found}


BLOCKS = blocks_of(TEXT)


class Clicks(nn.Module):
    """A table large enough for the pages' ``min_rows``, and a dense layer."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(600, 4)
        self.score = nn.Linear(4, 1)

    def forward(self, ids):
        return self.score(self.bag(ids)).squeeze(1)


def batches(rank, count=12):
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(count):
        ids = torch.randint(600, (8, 3), generator=generator)
        found.append((ids, (ids.sum(1) % 2).float()))
    return found


def names_of(rank):
    return {
        "Clicks": Clicks,
        "F": F,
        "cpudist": cpudist,
        "loader": batches(rank),
        "torch": torch,
        "usable": lambda ids: rank == 0 or int(ids[0, 0]) % 2 == 0,
        "validation": batches(7 + rank, 3),
    }


def execute(kind, about, names):
    """Runs a block; a block that is a whole script without its first and last call."""
    body = BLOCKS[kind, about]
    if kind.startswith("two trainers"):
        body = re.sub(r"^cpudist\.(init|shutdown)\(\)", "pass", body, flags=re.M)
    return run_block(body, about, names)


def run_block(body, about, names):
    """Runs a text of a page with these names, and returns them."""
    exec(compile(body, about, "exec"), names)  # noqa: S102 (the repository's own text)
    return names


def wrapped(rank):
    names = names_of(rank)
    torch.manual_seed(0)
    names["model"] = cpudist.shard_tables(Clicks(), min_rows=500)
    inner = torch.optim.Adagrad(names["model"].parameters(), lr=0.1)
    names["opt"] = cpudist.DistributedOptimizer(inner, names["model"])
    return names


def stop_early(context, _):
    """What a process of the test of early stopping runs."""
    names = execute("two trainers", "stop", wrapped(context.trainer_rank))
    loss = cpudist.metrics.LogLoss(from_logits=True)
    with torch.no_grad():
        for ids, y in names["validation"]:
            loss.update(names["kept"](ids), y)
    return {
        "epoch": names["epoch"],
        "patience": names["patience"],
        "plain": type(names["kept"].bag) is nn.EmbeddingBag,
        "worse": loss.compute_all() - names["best"],
    }
