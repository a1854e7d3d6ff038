# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the trainers of Reduce's and of compression's tests run, each as a process."""

from __future__ import annotations

import copy
from typing import Any

import collective_cases as cases
import torch
import torch.distributed as dist
from hybrid_cases import parity
from torch import nn

import torch_cpudist as cpudist

REDUCE = {"name": "reduce", "bucket_bytes": 200, "sharding": {"min_block_size": 4}}
# Values of one average: gradients are whole multiples of this.
UNIT = 2.0**-10


def like_all_reduce(context: cpudist.Context) -> dict[str, Any]:
    """The same steps by Reduce and by AllReduce, with a schedule: how they differ."""
    models = {}
    for strategy in (REDUCE, cases.SMALL):
        model = cases.Dense()
        clip = cpudist.ClipValue(0.1)
        with cases.trained(model, torch_adam, strategy, clip=clip) as optimizer:
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            for step in range(cases.STEPS):
                optimizer.zero_grad()
                batch = cases.batch_of(step, context.trainer_rank, 4, torch.float32)
                cases.loss_of(model, batch, (0, 1)).backward()
                optimizer.step()
                schedule.step()
            models[strategy["name"]] = model
            found = optimizer.stats()["collective"].get("state_bytes")
            inner = optimizer.inners[0]
            held = sum(
                value.nbytes
                for state in inner.state.values()
                for value in state.values()
            )
            if strategy is REDUCE:
                counted, of_reduce = found, held
            else:
                whole = held
    return {
        "difference": cases.difference(models["reduce"], models["allreduce"]),
        "counted": counted == of_reduce,
        "share": of_reduce / whole,
    }


def torch_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def rewrapped(context: cpudist.Context) -> dict[str, bool]:
    """State of one strategy goes on in the next one, and is trainer 0's."""
    model, found = cases.Dense(), {}
    inner = torch_adam(model)

    def steps(optimizer: cpudist.DistributedOptimizer) -> None:
        for step in range(3):
            optimizer.zero_grad()
            batch = cases.batch_of(step, context.trainer_rank, 4, torch.float32)
            cases.loss_of(model, batch, (0, 1)).backward()
            optimizer.step()

    before = 0
    for name in ("local_sgd", "reduce", "geo", "allreduce", "sync"):
        optimizer = cpudist.DistributedOptimizer(inner, model, name)
        state = optimizer.state_dict()["state"]
        counts = [int(one["step"]) for one in state.values()]
        found[f"{name} goes on"] = max(counts, default=0) == before
        steps(optimizer)
        cpudist.barrier()
        optimizer.flush()
        before += 3
        if name in ("allreduce", "reduce"):
            found[name] = cases.same_bits(model)
            saved = optimizer.state_dict()["state"]
            moments = torch.cat([one["exp_avg"].reshape(-1) for one in saved.values()])
            others = [torch.empty_like(moments) for _ in range(context.trainer_count)]
            dist.all_gather(others, moments)
            found[f"{name} state"] = all(torch.equal(moments, one) for one in others)
    optimizer.close()
    return found


def reduces(context: cpudist.Context, _report: Any) -> dict[str, Any]:
    """Everything about Reduce that ends well, and compression."""
    found: dict[str, Any] = {
        "float32": cases.like_one_process(context, torch.float32, REDUCE),
        "like": like_all_reduce(context),
        "tables sparse_adam": parity(context, REDUCE, "sparse_adam"),
    }
    if context.trainer_count == 3:
        found["left"] = cases.one_leaves_meanwhile(context)
        return found
    found["clipped"] = cases.several_passes(context, "clipped", REDUCE)
    found["state"] = cases.saved_and_loaded(context, REDUCE)
    for name in ("adagrad", "row_wise_adagrad"):
        found[f"tables {name}"] = parity(context, REDUCE, name)
    hybrid = {"name": "hybrid", "dense": "reduce", "sparse": "sync"}
    found["tables hybrid"] = parity(context, hybrid, "adagrad")
    found["rewrapped"] = rewrapped(context)
    found["algebra"] = nothing_is_lost(context)
    found["converges"] = converges(context)
    return found


# -- compression -------------------------------------------------------------------


class Vector(nn.Module):
    """One parameter, not a multiple of the number of trainers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(37))


def kept_back(carrier: Any, rank: int) -> torch.Tensor:
    """What this trainer still has to add to all sums of the one bucket, ``[size]``."""
    (one,) = carrier.rounded
    kept: torch.Tensor = one.kept.clone()
    part = kept[rank * len(one.owed) :][: len(one.owed)]
    part.add_(one.owed[: len(part)])
    return kept


def nothing_is_lost(context: cpudist.Context) -> dict[str, bool]:
    """What was applied and what is kept back are the true sum, exactly."""
    model, rank, n = Vector(), context.trainer_rank, context.trainer_count
    strategy = cpudist.AllReduce(compression="bf16")
    true, rounded = torch.zeros(37), True

    def sgd(one: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(one.parameters(), lr=1.0)

    with cases.trained(model, sgd, strategy) as optimizer:
        for step in range(20):
            drawn = torch.Generator().manual_seed(step)
            grads = torch.randint(-3000, 3000, (n, 37), generator=drawn) * UNIT
            true += grads.sum(0)
            if step % 5 == 4:  # a first pass that backward has sent already
                (model.dense * grads[rank] * 0.5).sum().backward()
                (model.dense * grads[rank] * 0.5).sum().backward()
            else:
                (model.dense * grads[rank]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            rounded &= torch.equal(-model.dense.detach() * n, true)
        kept = kept_back(optimizer.driver.exchange.carrier, rank)
        dist.all_reduce(kept)
        return {
            "exact": torch.equal(-model.dense.detach() * n + kept, true),
            "rounded": not rounded,
            "bits": cases.same_bits(model),
        }


def converges(context: cpudist.Context) -> dict[str, float]:
    """The loss on all samples after training with and without compression."""
    found = {}
    batches = [cases.batch_of(1, rank, 32, torch.float32) for rank in range(2)]
    for kind in ("none", "bf16"):
        model = cases.Dense()
        strategy = cpudist.AllReduce(compression=kind)
        with cases.trained(model, torch_adam, strategy) as optimizer:
            for _ in range(40):
                optimizer.zero_grad()
                batch = batches[context.trainer_rank]
                cases.loss_of(model, batch, (0, 1, 2)).backward()
                optimizer.step()
            found[f"{kind} bytes"] = optimizer.stats()["collective"]["sent_bytes"]
        losses = [cases.loss_of(model, batch, (0, 1, 2)).item() for batch in batches]
        found[kind] = sum(losses) / 2
    return copy.deepcopy(found)
