# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Training under Geo, and threads that take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from patience import PATIENCE_S
from sync_cases import loss_of, run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.model.dense_memory import Weights


def geo(push_every: int = 3, **options: Any) -> cpudist.Geo:
    """Exchanges that are over as soon as the servers have answered."""
    settings = {"sharding": {"min_block_size": 8}, "exchange_budget": 1.0} | options
    return cpudist.Geo(push_every=push_every, **settings)


def wrapped(
    model: nn.Module, strategy: Any = None, lr: float = 1.0, **options: Any
) -> cpudist.DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return cpudist.DistributedOptimizer(
        inner, model, strategy=strategy or geo(), **options
    )


class Moving(nn.Module):
    """Two tables, a float32 vector in several blocks and a float64 matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(40, 3, sparse=True)
        self.second = nn.EmbeddingBag(12, 2, mode="sum", sparse=True, padding_idx=0)
        self.vector = nn.Parameter(torch.zeros(50))
        self.matrix = nn.Parameter(torch.zeros(6, 5, dtype=torch.float64))
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.arange(parameter.numel()).remainder(17)
                parameter.copy_(values.view(parameter.shape))


def gradients(seed: int, missing: bool = False) -> dict[str, torch.Tensor]:
    """Whole numbers, by parameter: sparse ones with repeated rows.

    ``missing``: some parameters have none.
    """
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float()

    found = {"vector": whole(50), "matrix": whole(6, 5).double()}
    for name, rows, dim in (("first", 40, 3), ("second", 12, 2)):
        ids = torch.randint(1, rows, (1, 5), generator=generator)
        found[f"{name}.weight"] = torch.sparse_coo_tensor(
            ids, whole(5, dim), (rows, dim), check_invariants=False
        )
    kept = torch.rand(4, generator=generator) < 0.6
    return {
        name: value
        for (name, value), keep in zip(found.items(), kept.tolist(), strict=True)
        if keep or not missing
    }


def put_gradients(model: nn.Module, found: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = found.get(name)


def train(
    model: nn.Module, opt: cpudist.DistributedOptimizer, seeds: Any, **options: Any
) -> None:
    for seed in seeds:
        put_gradients(model, gradients(seed, **options))
        opt.step()


def model_sum(
    seeds: Any, share: float = 1.0, **options: Any
) -> dict[str, torch.Tensor]:
    """The initial model less a share of these gradients: what SGD with lr 1 makes."""
    model = Moving()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for seed in seeds:
            for name, gradient in gradients(seed, **options).items():
                parameters[name] -= share * gradient.to_dense()
    return dict(model.state_dict())


def seeds_of(rank: int, steps: int) -> list[int]:
    return [1000 * rank + step for step in range(steps)]


def exchange(opt: cpudist.DistributedOptimizer, call: str, **options: Any) -> Any:
    """Calls ``<call>`` of the exchange by hand, as the driver does."""
    parameters = opt.trained
    assert parameters is not None
    with Weights(parameters.placement.dense) as weights:
        found = getattr(parameters.exchange, call)(weights, **options)
    parameters.note_written([entry.parameter for entry in parameters.placement.dense])
    return found


class Turns:
    """Threads that do one thing after another, in a fixed order."""

    def __init__(self) -> None:
        self._next = 0
        self._failed = False
        self._changed = threading.Condition()

    @contextmanager
    def at(self, turn: int) -> Iterator[None]:
        """Waits for this turn; the next one comes after it."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._failed or self._next == turn, PATIENCE_S
            )
            if self._failed or not came:
                raise TimeoutError(f"turn {turn}: another trainer failed")
        try:
            yield
        except BaseException:
            with self._changed:
                self._failed = True
                self._changed.notify_all()
            raise
        with self._changed:
            self._next += 1
            self._changed.notify_all()


def alone(body, servers=0):
    return run(body, 1, servers)[0]


def wrap(inners, model, strategy=None):
    return cpudist.DistributedOptimizer(inners, model, strategy or geo(3))


def steps(opt, model, batches, first, last, rank=0):
    opts = opt if isinstance(opt, list) else [opt]
    for step in range(first, last):
        model.zero_grad()
        loss_of(model, batches.part(step, rank)).backward()
        for one in opts:
            one.step()
