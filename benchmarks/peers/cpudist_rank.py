# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""This package: a rank that trains, serves or does both, as its environment says."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from job import Job
from torch import nn

import torch_cpudist as cpudist
from peers.common import Batch, CtrModel, TorchTrainee, adagrad, measure


class CpudistTrainee(TorchTrainee):
    """The plain model and optimizer, wrapped."""

    model: CtrModel
    optimizer: cpudist.DistributedOptimizer
    prefetch_depth = 0

    def source(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if not self.prefetch_depth:
            return batches
        table = self.model.table
        ahead = cpudist.data.prefetch(
            batches,
            self.optimizer,
            ids=lambda batch: {table: batch.ids},
            depth=self.prefetch_depth,
        )
        return iter(ahead)

    def counters(self) -> dict[str, float]:
        stats = self.optimizer.stats()
        # What a server sends, some trainer receives: every byte is counted once.
        moved = stats["bytes_sent"] + stats["bytes_received"]
        if "collective" in stats:
            moved += stats["collective"]["sent_bytes"]
        return {"bytes": float(moved), "wait_s": float(stats["wait_s"])}

    def settle(self) -> None:
        # The evaluation's lookups pull their rows themselves.
        self.optimizer.flush(pull="dense")

    def logits(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        # Under bf16 the model brings its own autocast, and returns float32. Ids stay
        # where the table is.
        found: torch.Tensor = self.model(ids, dense.to(self.job.device))
        return found


def _groups(text: str) -> list[list[int]]:
    return [[int(rank) for rank in one.split("+")] for one in text.split("/")]


def _value(text: str) -> float | int | str:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _named_fields(text: str) -> tuple[str, dict[str, str]]:
    name, *options = text.split(":")
    return name, dict(option.partition("=")[::2] for option in options)


def strategy_of(text: str) -> tuple[cpudist.Strategy, int]:
    """Reads ``NAME[:FIELD=VALUE]...``, as ``geo:push_every=400``.

    ``half_async:group=0+1/2+3`` has groups of trainers, ``hybrid:dense=local_sgd`` a
    part by name. Fields of the communicator go by theirs, ``async:wire_dtype=int8``.
    ``prefetch=2`` is no field: it asks for the rows of two batches to come. Nor are
    ``remote=true``, which ``place_tables`` reads, and ``device=cuda`` and
    ``threads=4``, which the row has.

    Returns:
        The strategy, and how many batches to prefetch.
    """
    name, fields = _named_fields(text)
    depth = int(fields.pop("prefetch", "0"))
    for other in ("remote", "device", "threads"):
        fields.pop(other, None)
    read = {
        key: _groups(value) if key == "group" else _value(value)
        for key, value in fields.items()
    }
    names = {field.name for field in dataclasses.fields(cpudist.Communicator)}
    if communicator := {key: read.pop(key) for key in names & read.keys()}:
        read["communicator"] = cpudist.Communicator(**communicator)
    return cpudist.strategy(name, **read), depth


def place_tables(model: nn.Module, text: str) -> None:
    """Makes the tables remote if ``NAME:remote=true`` says so; they keep their values.

    Raises:
        ValueError: it says neither that nor false.
    """
    remote = _value(_named_fields(text)[1].get("remote", "false"))
    if not isinstance(remote, bool):
        raise ValueError(f"{text}: expected remote=true or false, found {remote!r}")
    if remote:
        cpudist.shard_tables(model, remote=True)


def serve(job: Job) -> None:
    """Serves until the end; its process id is where trainers look for it."""
    (Path(job.run_dir) / f"server.{os.getpid()}").touch()
    cpudist.serve()


def train(job: Job, rank: int) -> None:
    """Trains or serves; ``rank`` counts in worlds of one, else ``init()`` says it."""
    cpudist.init()
    if cpudist.is_server():
        serve(job)
    else:
        model = CtrModel(job).to(job.device)
        place_tables(model, job.strategy)
        strategy, depth = strategy_of(job.strategy)
        optimizer = cpudist.DistributedOptimizer(
            adagrad(job, model.parameters()), model, strategy=strategy
        )
        if job.bf16:
            # As the other rows, whose autocast asks no CPU whether it is worth it.
            cpudist.optimize(model, optimizer, force=True)
        if cpudist.trainer_count() > 1:
            rank = cpudist.trainer_rank()
        trainee = CpudistTrainee(job, model, optimizer)
        trainee.prefetch_depth = depth
        measure(job, rank, trainee)
    cpudist.shutdown()
