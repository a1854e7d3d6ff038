# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: what the trainers of one kind of test run, and the one reference of them all
"""What the trainers of collective tests run, each as a process, and their reference.

Gradients are sent by hooks during backward and in several buckets, because buckets are
made small here.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.collective.group import CollectiveGroup

STEPS, WIDTH = 12, 6
SMALL = {"name": "allreduce", "bucket_bytes": 100}
Batch = tuple[torch.Tensor, torch.Tensor]


class Dense(nn.Module):
    """Layers of which each step uses some."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in "abc")
        self.last = nn.Linear(WIDTH, 1, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values.to(dtype) * 0.5)

    def forward(self, x: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
        for i in use:
            x = torch.tanh(self.layers[i](x))
        return self.last(x).squeeze(1)


def batch_of(step: int, rank: int, size: int, dtype: torch.dtype) -> Batch:
    """One trainer's samples of one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, WIDTH, generator=generator).to(dtype)
    return x, torch.randn(size, generator=generator).to(dtype)


def used(step: int, rank: int) -> tuple[int, ...]:
    """Layers in use: one always, one on some ranks, one in some steps."""
    return (0, *((1,) if rank != 1 else ()), *((2,) if step % 3 == 0 else ()))


def groups_of(model: Dense) -> list[dict[str, Any]]:
    first = {"params": list(model.layers.parameters()), "lr": 0.05}
    return [first, {"params": list(model.last.parameters()), "lr": 0.02}]


def adam(model: Dense) -> torch.optim.Optimizer:
    return torch.optim.NAdam(groups_of(model))  # one that no server runs


def loss_of(model: nn.Module, batch: Batch, use: tuple[int, ...]) -> torch.Tensor:
    return (model(batch[0], use) - batch[1]).square().mean()


def flat_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def same_bits(model: nn.Module) -> bool:
    """Whether all trainers have the same dense values, bit for bit."""
    own = torch.cat(
        [
            p.detach().reshape(-1)
            for n, p in model.named_parameters()
            if "table" not in n
        ]
    )
    others = [torch.empty_like(own) for _ in range(cpudist.trainer_count())]
    dist.all_gather(others, own)
    return all(torch.equal(own, other) for other in others)


def difference(first: nn.Module, second: nn.Module) -> float:
    return float((flat_of(first) - flat_of(second)).abs().max())


@contextmanager
def trained(
    model: nn.Module, make: Callable[[Any], Any], strategy: Any, **options: Any
) -> Iterator[cpudist.DistributedOptimizer]:
    """An optimizer around ``model`` for a while."""
    made = cpudist.DistributedOptimizer(make(model), model, strategy, **options)
    yield made
    made.close()


def plainly(
    dtype: torch.dtype,
    sizes: Callable[[int, int], int],
    weigh: bool,
    clip: float | None = None,
    of_tensors: bool = False,
) -> Dense:
    """One process: the mean over trainers of the gradients of their batches."""
    model = Dense(dtype)
    optimizer = adam(model)
    n = cpudist.trainer_count()
    for step in range(STEPS):
        optimizer.zero_grad()
        total = sum(sizes(step, rank) for rank in range(n))
        for rank in range(n):
            size = sizes(step, rank)
            share = size / total if weigh else 1 / n
            if size:
                batch = batch_of(step, rank, size, dtype)
                (loss_of(model, batch, used(step, rank)) * share).backward()
        if clip is not None:
            parameters = list(model.parameters())
            for some in [[one] for one in parameters] if of_tensors else [parameters]:
                torch.nn.utils.clip_grad_norm_(some, clip)
        optimizer.step()
    return model


def evenly(_step: int, _rank: int) -> int:
    return 4


def unevenly(step: int, rank: int) -> int:
    return (step + 2 * rank) % 4


def like_one_process(
    context: cpudist.Context, dtype: torch.dtype, strategy: Any = SMALL
) -> dict[str, Any]:
    """Equal and unequal weights, clipping: differences to plain torch."""
    rank, found = context.trainer_rank, {}
    cases = {
        "mean": (evenly, False, None),
        "samples": (unevenly, True, None),
        "clipped": (evenly, False, 0.3),
        "tensors": (evenly, False, 0.05),
    }
    for name, (sizes, weigh, clip) in cases.items():
        model, bits = Dense(dtype), True
        each = name == "tensors"
        kind = cpudist.ClipTensorNorm if each else cpudist.ClipNorm
        options = {} if clip is None else {"clip": kind(clip)}
        with trained(model, adam, strategy, **options) as optimizer:
            for step in range(STEPS):
                optimizer.zero_grad()
                size = sizes(step, rank)
                if size:
                    batch = batch_of(step, rank, size, dtype)
                    loss_of(model, batch, used(step, rank)).backward()
                optimizer.step(samples=size if weigh else None)
                bits = bits and same_bits(model)
            collective = optimizer.stats()["collective"]
        found[name] = difference(model, plainly(dtype, sizes, weigh, clip, each))
        if each:
            found["one norm"] = difference(model, plainly(dtype, sizes, weigh, clip))
        found[f"{name} bits"] = bits
        found[f"{name} repeated"] = collective["repeated"]
        found["buckets"] = collective["buckets"]
        found["state_bytes"] = collective.get("state_bytes")
    return found


def like_ddp(context: cpudist.Context) -> float:
    """The difference to torch's own DistributedDataParallel."""
    rank, ours, theirs = context.trainer_rank, Dense(), Dense()
    wrapped = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    reference = adam(theirs)
    with trained(ours, adam, SMALL) as optimizer:
        for step in range(STEPS):
            batch = batch_of(step, rank, 4, torch.float32)
            for model, stepped in ((ours, optimizer), (wrapped, reference)):
                stepped.zero_grad()
                loss_of(model, batch, used(step, rank)).backward()
                stepped.step()
    return difference(ours, theirs)


def by_replicas(context: cpudist.Context) -> tuple[float, int, bool, str]:
    """Three replicas in every trainer: difference to one process, steps sent twice.

    Also: whether a parameter has a hook of the strategy, and what is said of the user's
    beside it.
    """

    def loss_fn(net: nn.Module, part: Batch) -> torch.Tensor:
        return loss_of(net, part, (0, 2))

    n, ours, plain = context.trainer_count, Dense(), Dense()
    reference = adam(plain)
    with trained(ours, adam, SMALL) as optimizer:
        with cpudist.ReplicaExecutor(ours, loss_fn, optimizer, 3) as executor:
            for step in range(STEPS):
                executor.run(batch_of(step, context.trainer_rank, 7, torch.float32))
                reference.zero_grad()
                for rank in range(n):
                    part = batch_of(step, rank, 7, torch.float32)
                    (loss_fn(plain, part) / n).backward()
                reference.step()
            found = difference(ours, plain)
            parameter = next(ours.parameters())
            sends = bool(parameter._post_accumulate_grad_hooks)
            parameter.register_post_accumulate_grad_hook(lambda _: None)
            with pytest.raises(cpudist.UnsupportedModelError) as refused:
                executor.run(batch_of(0, context.trainer_rank, 7, torch.float32))
        repeated = optimizer.stats()["collective"]["repeated"]
    return found, repeated, sends, str(refused.value)


def several_passes(
    context: cpudist.Context, how: str, strategy: Any = SMALL
) -> tuple[float, int]:
    """Two passes a step, against the sum of both: the difference, steps sent twice."""
    rank, n, ours, plain = context.trainer_rank, context.trainer_count, Dense(), Dense()
    reference = adam(plain)
    with trained(ours, adam, strategy) as optimizer:
        for step in range(STEPS):
            batches = [batch_of(100 * k + step, rank, 3, torch.float32) for k in (1, 2)]
            optimizer.zero_grad()
            if how == "no_sync":
                with optimizer.no_sync():
                    loss_of(ours, batches[0], (0, 1)).backward()
            else:
                loss_of(ours, batches[0], (0, 1)).backward()
            again = loss_of(ours, batches[1], (0, 2))
            again.backward(create_graph=how == "create_graph")
            if how == "clipped":
                torch.nn.utils.clip_grad_value_(ours.parameters(), 0.05)
            optimizer.step()
            sums = [torch.zeros_like(p) for p in plain.parameters()]
            for other in range(n):
                plain.zero_grad()
                for k, use in ((1, (0, 1)), (2, (0, 2))):
                    batch = batch_of(100 * k + step, other, 3, torch.float32)
                    loss_of(plain, batch, use).backward()
                if how == "clipped":
                    torch.nn.utils.clip_grad_value_(plain.parameters(), 0.05)
                for total, parameter in zip(sums, plain.parameters(), strict=True):
                    total += parameter.grad / n
            for total, parameter in zip(sums, plain.parameters(), strict=True):
                parameter.grad = total
            reference.step()
        repeated = optimizer.stats()["collective"]["repeated"]
        for bucket in optimizer.driver.exchange.buckets:
            assert not bucket.storage.requires_grad  # would keep every step's graph
    return difference(ours, plain), repeated


def refusals(context: cpudist.Context) -> dict[str, str]:
    """Errors that all trainers get alike."""
    rank, found = context.trainer_rank, {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            found[name] = "nothing"
        except cpudist.Error as error:
            found[name] = f"{type(error).__name__}: {error}"

    model = Dense()
    with trained(model, adam, "allreduce") as optimizer:
        loss_of(model, batch_of(0, rank, 2, torch.float32), (0,)).backward()
        note("samples", lambda: optimizer.step(samples=2 if rank else None))
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
        note("lr", optimizer.step)
    other = nn.Sequential(nn.Linear(2 + rank, 3))
    build = cpudist.DistributedOptimizer
    note("shape", lambda: build(torch.optim.SGD(other.parameters()), other, SMALL))
    return found


def mismatches(context: cpudist.Context) -> list[str]:
    """What is said when the trainers' strategies differ."""
    found = []
    for pair in (("allreduce", "sync"), ("reduce", "async"), ("allreduce", "reduce")):
        model = Dense()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = pair[context.trainer_rank]
        try:
            cpudist.DistributedOptimizer(optimizer, model, strategy)
        except cpudist.ConfigMismatchError as error:
            found.append(str(error))
    return found


def saved_and_loaded(context: cpudist.Context, strategy: Any = SMALL) -> dict[str, Any]:
    """``state_dict`` into plain torch and back, and weights written by one trainer."""
    rank, model, plain = context.trainer_rank, Dense(), Dense()

    def steps(stepped: Any, trained_model: Dense, first: int, ranks: list[int]) -> None:
        for step in range(first, first + 3):
            stepped.zero_grad()
            for one in ranks:
                batch = batch_of(step, one, 4, torch.float32)
                (loss_of(trained_model, batch, (0, 1)) / len(ranks)).backward()
            stepped.step()

    everyone = list(range(context.trainer_count))
    with trained(model, adam, strategy) as optimizer:
        steps(optimizer, model, 0, [rank])
        saved = copy.deepcopy(optimizer.state_dict())
    plain.load_state_dict(model.state_dict())
    reference = adam(plain)
    reference.load_state_dict(copy.deepcopy(saved))
    steps(reference, plain, 3, everyone)
    with trained(model, adam, strategy) as optimizer:
        optimizer.load_state_dict(saved)
        steps(optimizer, model, 3, [rank])
        continued = difference(model, plain)
        with torch.no_grad():
            model.last.weight.fill_(float(rank + 7))
        optimizer.store_model()
        optimizer.flush()
        cpudist.barrier()
        stored = model.last.weight[0, 0].item()
        steps(optimizer, model, 6, [rank])
        found = {"continued": continued, "stored": stored, "bits": same_bits(model)}
        found["global_step"] = cpudist.global_step()
        return found


# -- trainers that do not come -----------------------------------------------------


def until_lost(context: cpudist.Context, report: Any) -> None:
    """Steps without end."""
    model = Dense()
    optimizer = cpudist.DistributedOptimizer(adam(model), model, SMALL)
    step = 0
    while True:
        optimizer.zero_grad()
        batch = batch_of(step, context.trainer_rank, 2, torch.float32)
        loss_of(model, batch, (0, 1)).backward()
        optimizer.step()
        step += 1
        if step == 3:
            report("training")


def one_stops_early(context: cpudist.Context, report: Any) -> float:
    """The last trainer takes fewer steps; how long the others wait for it."""
    model = Dense()
    optimizer = cpudist.DistributedOptimizer(adam(model), model, SMALL)
    for step in range(2 if context.trainer_rank == 1 else 3):
        loss_of(model, batch_of(step, 0, 2, torch.float32), (0,)).backward()
        began = time.monotonic()
        optimizer.step()
    report(time.monotonic() - began)
    cpudist.barrier()
    return 0.0


class Looks:
    """A group's store that says when it was read that a trainer has left."""

    def __init__(self, store: Any, seen: str) -> None:
        self._store, self._seen = store, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        found = self._store.get(key)
        if found.endswith(b"has left"):
            self._store.set(self._seen, "")
        return found


def one_leaves_meanwhile(context: cpudist.Context) -> float:
    """Trainer 1 leaves while a sum that it has begun still waits for trainer 2."""
    group = CollectiveGroup(context, "the test")
    seen = f"{group.prefix}/trainer 0 has seen it"
    tensor = torch.ones(3)
    if context.trainer_rank == 0:
        group.store = Looks(group.store, seen)
    if context.trainer_rank == 2:
        group.store.wait([seen], PATIENCE)
    work = group.start_sum(tensor)
    if context.trainer_rank == 0:
        # As one of a CUDA device is waited for: looked at until it has ended.
        group.pending[-1].on_device = True
    if context.trainer_rank == 1:
        group.tell_left("has left")
    group.wait(work, "a sum")
    cpudist.barrier()
    group.close()
    return float(tensor[0])


def asks_alone(context: cpudist.Context, report: Any) -> None:
    """Trainer 0 wants the state of all, trainer 1 steps."""
    model = Dense()
    optimizer = cpudist.DistributedOptimizer(adam(model), model, "reduce")
    loss_of(model, batch_of(0, 0, 2, torch.float32), (0,)).backward()
    optimizer.step()
    report("stepped")
    if context.trainer_rank == 0:
        optimizer.state_dict()
    else:
        optimizer.step()
