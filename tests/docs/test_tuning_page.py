# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""docs/tuning.md: its loop prints what the page shows."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import printed
import pytest
import torch
import torch.nn.functional as F
from loop_pages import Clicks, batches, blocks_of, run_block

import torch_cpudist as cpudist

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
TOPICS = {"threads", "replicas", "servers", "network", "data", "strategy"}


def slow(found: list[Any]) -> Iterator[Any]:
    """A loader that takes four times as long as the step on what it gives."""
    took_s = 0.001
    for _ in range(5):
        for batch in found:
            time.sleep(4 * max(took_s, 0.001))
            began = time.perf_counter()
            yield batch
            took_s = time.perf_counter() - began


def test_the_loop_prints_what_the_page_shows(
    in_a_folder: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        cpudist.init()
        model = cpudist.shard_tables(Clicks(), min_rows=500)
        inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(inner, model)
        names = {
            "F": F,
            "cpudist": cpudist,
            "loader": slow(batches(0)),
            "model": model,
            "opt": opt,
        }
        run_block(blocks_of(TEXT)["tuning", "advise"], "advise", names)
        cpudist.shutdown()
    finally:
        os.sched_setaffinity(0, cores)
    printed.check("advise", capsys.readouterr().out)


def test_every_topic_of_advice_is_described() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ", TEXT.split("\n## CPU\n")[0], re.MULTILINE)
    assert set(rows) == TOPICS
    source = ROOT / "torch_cpudist" / "advice" / "judging.py"
    said = re.findall(r'Advice\(\s+"(\w+)"', source.read_text())
    assert set(said) == TOPICS
