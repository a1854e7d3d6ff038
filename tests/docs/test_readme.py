# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""README's quick start, by trainers that have different numbers of batches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from sync_cases import assert_same_bits, run
from torch import nn

README = Path(__file__).parents[2] / "README.md"
BATCHES = (10, 15)


class Clicks(nn.Module):
    """Of more rows than ``shard_tables`` leaves dense."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(10_000, 4)
        self.score = nn.Linear(4, 1)

    def forward(self, ids):
        return self.score(self.bag(ids)).squeeze(1)


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(BATCHES[rank]):
        ids = torch.randint(50, (8, 3), generator=generator)
        yield ids, (ids.sum(1) % 2).float()


@pytest.mark.parametrize("strategy", ["sync", "async", "geo"])
def test_after_the_quick_start_everybody_has_the_trained_model(strategy):
    (code,) = re.findall(
        r"## Quick start\s+```python\n(.*?)```", README.read_text(), re.S
    )
    for done_here in ("cpudist.init()", "cpudist.shutdown()"):
        assert code.count(done_here) == 1
        code = code.replace(done_here, "pass")

    def train(context):
        names = {"MyModel": Clicks, "loader": batches(context.trainer_rank)}
        exec(code, names)  # noqa: S102 (the repository's own text)
        return names["model"].state_dict()

    one, other = run(train, 2, variables={"CPUDIST_STRATEGY": strategy})
    assert_same_bits(one, other)
