# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A small model, the optimizers of the parity matrix, and plain torch as reference.

The reference trains in one process on the joined batch. On tables, rules that torch
runs on sparse gradients are torch's; for the others every row is a parameter of its
own, which has a gradient only in steps that touch it: the definition of a lazy rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from patience import PATIENCE_S
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.launch.context import open_contexts
from torch_cpudist.testing import run_ranks

# Tensors this small only wait for torch's other threads.
torch.set_num_threads(1)
ONE_THREAD = {"CPUDIST_THREADS": "1"}
# Of a run whose links prove it first. What runs over bad networks runs with it, too.
KEY = {"CPUDIST_SECRET": "a key of at least thirty-two bytes"}

ROWS, DIM, SLOTS, BATCH, STEPS = 30, 4, 3, 5, 50

Optimizer = torch.optim.Optimizer


class Model(nn.Module):
    """Two sparse lookups of one table, and a dense network."""

    def __init__(self, dtype: torch.dtype = torch.float32, table: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.bag = (
            nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=table) if table else None
        )
        self.first = nn.Linear(DIM, 6, dtype=dtype)
        self.last = nn.Linear(6, 1, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.randn(parameter.shape, generator=generator).to(dtype)
                parameter.copy_(values.to(parameter.dtype) * 0.5)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        hidden = dense if self.bag is None else self.bag(ids) + dense
        return self.last(torch.tanh(self.first(hidden))).squeeze(1)


@dataclass(frozen=True)
class Rule:
    """How to build the optimizers of a case: for dense parameters and for tables."""

    dense: Callable[..., Optimizer]
    table: Callable[..., Optimizer]
    torch_runs_it: bool  # on sparse gradients


def _same(build: Callable[..., Optimizer], torch_runs_it: bool = False) -> Rule:
    return Rule(build, build, torch_runs_it)


SGD, Adagrad, Adam = torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam
AdamW, SparseAdam = torch.optim.AdamW, torch.optim.SparseAdam
RMSprop = torch.optim.RMSprop
RULES = {
    "sgd": _same(lambda p: SGD(p, lr=0.1), True),
    "sgd_momentum": _same(lambda p: SGD(p, lr=0.02, momentum=0.9, dampening=0.1)),
    "sgd_nesterov": _same(
        lambda p: SGD(p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01)
    ),
    "adagrad": _same(lambda p: Adagrad(p, lr=0.1, lr_decay=0.01), True),
    "adagrad_decay": _same(lambda p: Adagrad(p, lr=0.1, weight_decay=0.01)),
    "row_wise_adagrad": _same(
        lambda p: cpudist.optim.RowWiseAdagrad(p, lr=0.1, lr_decay=0.01), True
    ),
    "adam": _same(lambda p: Adam(p, lr=0.02, weight_decay=0.01)),
    "sparse_adam": Rule(
        lambda p: Adam(p, lr=0.02), lambda p: SparseAdam(p, lr=0.02), True
    ),
    "adamw": _same(lambda p: AdamW(p, lr=0.02, weight_decay=0.1)),
    "rmsprop": _same(lambda p: RMSprop(p, lr=0.01, weight_decay=0.01)),
    "rmsprop_momentum": _same(lambda p: RMSprop(p, lr=0.01, momentum=0.5)),
    "ftrl": _same(lambda p: cpudist.optim.FTRL(p, lr=0.2, l1=0.01, l2=0.1), True),
}


def split(model: Model) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Dense parameters and tables of a model."""
    tables = [] if model.bag is None else [model.bag.weight]
    dense = [p for p in model.parameters() if all(p is not t for t in tables)]
    return dense, tables


def build(rule: Rule, model: Model) -> list[Optimizer]:
    """The optimizers that a user would wrap."""
    dense, tables = split(model)
    return [rule.dense(dense), *([rule.table(tables)] if tables else [])]


class Batches:
    """The same batches for everybody; trainer ``r`` of ``n`` takes its part of a step.

    ``sizes``: samples per trainer, by step; default: ``BATCH`` each.
    """

    def __init__(
        self,
        trainers: int,
        dtype: torch.dtype = torch.float32,
        sizes: Callable[[int, int], int] = lambda step, rank: BATCH,
        steps: int = STEPS,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.trainers = trainers
        self._parts = []
        for step in range(steps):
            parts = []
            for rank in range(trainers):
                n = sizes(step, rank)
                ids = torch.randint(0, ROWS, (n, SLOTS), generator=generator)
                dense = torch.randn(n, DIM, generator=generator).to(dtype)
                target = torch.randn(n, generator=generator).to(dtype)
                parts.append((ids, dense, target))
            self._parts.append(parts)

    def __len__(self) -> int:
        return len(self._parts)

    def part(self, step: int, rank: int) -> tuple[torch.Tensor, ...]:
        return self._parts[step][rank]

    def parts(self, step: int) -> list[tuple[tuple[torch.Tensor, ...], float]]:
        """Two parts or more of a step's samples, and their shares of its mean."""
        parts = self._parts[step]
        if self.trainers == 1:
            halves = zip(*(torch.tensor_split(t, 2) for t in parts[0]), strict=True)
            parts = list(halves)
        total = sum(len(part[2]) for part in parts)
        return [(part, len(part[2]) / total) for part in parts if len(part[2])]

    def joined(self, step: int) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.cat(tensors) for tensors in zip(*self._parts[step], strict=True)
        )


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    ids, dense, target = batch
    return (model(ids, dense) - target).square().mean()


class PlainTraining:
    """One process, plain torch."""

    def __init__(self, rule: Rule, dtype: torch.dtype, table: bool) -> None:
        self.model = Model(dtype, table)
        dense, tables = split(self.model)
        self._optimizers = [rule.dense(dense)]
        self._rows: list[nn.Parameter] = []
        self._weight = tables[0] if tables else None
        if tables and rule.torch_runs_it:
            self._optimizers.append(rule.table(tables))
        elif tables:
            self._rows = [nn.Parameter(row.clone()[None]) for row in tables[0].detach()]
            self._optimizers.append(rule.table(self._rows))

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def clip(self, clip: cpudist.ClipNorm | cpudist.ClipTensorNorm) -> None:
        """Scales gradients to a 2-norm, together or each, as torch does dense ones."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        for parameter in parameters:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        values = [p.grad.values() if p.grad.is_sparse else p.grad for p in parameters]
        if isinstance(clip, cpudist.ClipTensorNorm):
            for value in values:
                stand_in = nn.Parameter(torch.empty_like(value))
                stand_in.grad = value
                torch.nn.utils.clip_grad_norm_(stand_in, clip.max_norm)
            return
        norm = torch.linalg.vector_norm(torch.cat([v.flatten() for v in values]))
        scale = min(1.0, clip.max_norm / (float(norm) + 1e-6))
        for value in values:
            value.mul_(scale)

    def step(self) -> None:
        if self._rows and self._weight is not None and self._weight.grad is not None:
            grad = self._weight.grad.coalesce()
            for row in self._rows:
                row.grad = None
            for key, values in zip(
                grad.indices()[0].tolist(), grad.values(), strict=True
            ):
                self._rows[key].grad = values[None].clone()
        for optimizer in self._optimizers:
            optimizer.step()
        if self._rows and self._weight is not None:
            with torch.no_grad():
                self._weight.copy_(torch.cat([row.detach() for row in self._rows]))


def train_plain(
    rule: Rule,
    batches: Batches,
    *,
    joined: bool = True,
    dtype: torch.dtype = torch.float32,
    table: bool = True,
    clip: cpudist.ClipNorm | cpudist.ClipTensorNorm | None = None,
) -> dict[str, torch.Tensor]:
    """Trains on the joined batches, or on the mean of the parts' gradients."""
    training = PlainTraining(rule, dtype, table)
    for step in range(len(batches)):
        training.zero_grad()
        if joined:
            loss_of(training.model, batches.joined(step)).backward()
        else:
            for part, share in batches.parts(step):
                (loss_of(training.model, part) * share).backward()
        if clip is not None:
            training.clip(clip)
        training.step()
    return copy_of(training.model)


def run(
    fn: Callable[[cpudist.Context], Any],
    trainers: int,
    servers: int = 0,
    **options: Any,
) -> list[Any]:
    """``run_ranks`` with one torch thread."""
    variables = ONE_THREAD | (options.pop("variables", None) or {})
    options.setdefault("timeout_s", PATIENCE_S)
    if options.get("network") is not None:
        # Frames are lost, and links cut, far more often than on any network.
        variables.setdefault("CPUDIST_RPC_RETRIES", "1000")
    return run_ranks(fn, trainers, servers=servers, variables=variables, **options)


def servers_have(pushes: int, servers: int) -> bool:
    """Whether every server of this process's run has got so many pushes by now."""
    found = [c.server for c in list(open_contexts) if c.server is not None]
    counts = [server.stats()["pushes"] for server in found]
    return len(counts) == servers and min(counts) >= pushes


def copy_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state as it stands now."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def largest_difference(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> float:
    assert first.keys() == second.keys()
    return max(float((first[k] - second[k]).abs().max()) for k in first)


def reference_on(
    rule: Rule,
    batches: Batches,
    dtype: torch.dtype = torch.float32,
    table: bool = True,
    clip: cpudist.ClipNorm | cpudist.ClipTensorNorm | None = None,
) -> tuple[dict[str, torch.Tensor], float]:
    """What one process gets on the joined batches, and the difference allowed.

    1e-6; in float32 at least 4 x torch's own difference between the joined batch and
    the mean of its parts.
    """
    options = {"dtype": dtype, "table": table, "clip": clip}
    expected = train_plain(rule, batches, **options)
    if dtype == torch.float64:
        return expected, 1e-6
    parts = train_plain(rule, batches, joined=False, **options)
    return expected, max(1e-6, 4 * largest_difference(expected, parts))


@functools.cache
def reference(
    name: str, trainers: int, dtype: torch.dtype = torch.float32, table: bool = True
) -> tuple[dict[str, torch.Tensor], float]:
    """``reference_on`` the default batches, computed once."""
    return reference_on(RULES[name], Batches(trainers, dtype), dtype, table)


def assert_same_bits(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


SMALL_BLOCKS = cpudist.Sync(sharding=cpudist.Sharding(min_block_size=8))


def train(
    rule,
    batches,
    servers,
    *,
    dtype=torch.float32,
    table=True,
    by_samples=False,
    variables=None,
    network=None,
    **kwargs,
):
    """Trains with servers; returns every trainer's state dict."""

    def body(context):
        model = Model(dtype, table)
        optimizer = cpudist.DistributedOptimizer(build(rule, model), model, **kwargs)
        for step in range(len(batches)):
            batch = batches.part(step, context.trainer_rank)
            optimizer.zero_grad()
            samples = len(batch[2])
            if samples:
                loss_of(model, batch).backward()
            optimizer.step(samples=samples if by_samples else None)
        optimizer.flush()
        return copy_of(model)

    return run(
        body,
        batches.trainers,
        servers=servers,
        variables=variables,
        network=network,
    )
