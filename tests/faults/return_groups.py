# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A trainer that outlives servers in a job of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counting import counted, step, wrapped

import torch_cpudist as cpudist


def train(
    folder: Path, strategy: str, kind: str, context: cpudist.Context, report: Any
) -> list[Any]:
    """Saves, and trains on until servers were lost and have come back."""
    rank = context.trainer_rank
    model, opt = wrapped(kind, strategy)
    opt.resume()
    cpudist.barrier()  # none is saved while one of them is not there
    for _ in range(20):
        step(opt, model, rank)
    if rank == 0:
        opt.save_snapshot("kept")
    while not (folder / "snapshots" / "kept" / "manifest.json").exists():
        step(opt, model, rank)
    for _ in range(20):
        step(opt, model, rank)
    report("trained")
    while not opt.stats()["recovered"]["count"]:
        step(opt, model, rank)
    for _ in range(20):
        step(opt, model, rank)
    cpudist.barrier()
    values = counted(opt, model)
    cpudist.barrier()
    return [rank, opt.stats()["steps"], opt.stats()["recovered"], values]
