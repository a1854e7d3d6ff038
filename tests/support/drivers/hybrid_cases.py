# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the trainers of Hybrid's tests run, each as a process."""

from __future__ import annotations

import copy
from typing import Any

import sync_cases
import torch
from async_cases import Counting, backward, model_sum
from collective_cases import same_bits, trained

import torch_cpudist as cpudist

STEPS = 8


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def sums(context: cpudist.Context, strategy: Any) -> dict[str, Any]:
    """SGD with lr 1: tables get every gradient once, dense parameters their mean."""
    rank, n = context.trainer_rank, context.trainer_count
    model, bits, replay = Counting(), True, True
    with trained(model, sgd, strategy) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, 10 * step + rank)
            optimizer.step()
            bits = bits and same_bits(model)
            so_far = [10 * s + r for s in range(step + 1) for r in range(n)]
            start, moved = Counting().dense.detach(), model_sum(so_far)["dense"]
            expected = start + (moved - start) / n
            replay = replay and torch.equal(model.dense.detach(), expected)
        stats = optimizer.stats()
        cpudist.barrier()
        optimizer.flush()
        everything = [10 * s + r for s in range(STEPS) for r in range(n)]
        expected_table = model_sum(everything)["table.weight"]
        start = Counting().table.weight.detach()
        moved = model.table.weight.detach() - start
        return {
            "bits": bits,
            "replay": replay,
            "once": torch.equal(start + moved, expected_table),
            "mean": torch.equal(moved * n, expected_table - start),
            "stats": sorted(stats),
        }


def parity(
    context: cpudist.Context, strategy: dict[str, Any], name: str
) -> dict[str, Any]:
    """Uneven batches, saved and loaded halfway; against plain torch and Sync."""
    rank, n = context.trainer_rank, context.trainer_count
    rule = sync_cases.RULES[name]
    batches = sync_cases.Batches(n, sizes=lambda step, r: (step + 2 * r) % 4, steps=10)
    model, saved = sync_cases.Model(), None

    def build(trained_model: Any) -> list[torch.optim.Optimizer]:
        return sync_cases.build(rule, trained_model)

    for steps in (range(5), range(5, 10)):
        # The second time with other optimizers: their state comes from the first.
        with trained(model, build, strategy) as optimizer:
            if saved is not None:
                optimizer.load_state_dict(saved)
            for step in steps:
                batch = batches.part(step, rank)
                optimizer.zero_grad()
                if len(batch[2]):
                    sync_cases.loss_of(model, batch).backward()
                optimizer.step(samples=len(batch[2]))
            saved = copy.deepcopy(optimizer.state_dict())
            cpudist.barrier()
            optimizer.flush()
    expected, allowed = sync_cases.reference_on(rule, batches)
    apart = sync_cases.largest_difference(expected, sync_cases.copy_of(model))
    return {"worst": apart / allowed, "bits": same_bits(model)}


def rewritten(context: cpudist.Context, dense: str, sparse: str) -> bool:
    """Whether weights that trainer 0 writes reach every part of every trainer."""
    model = Counting()
    strategy = {"name": "hybrid", "dense": dense, "sparse": sparse}
    with trained(model, sgd, strategy) as optimizer:
        backward(model, context.trainer_rank)
        optimizer.step()
        cpudist.barrier()
        optimizer.flush()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(5.0 + context.trainer_rank)
        optimizer.store_model(all_rows=True)
        optimizer.flush()
        return all(bool((p == 5.0).all()) for p in model.parameters())


def nothing_half_done(context: cpudist.Context, dense: str) -> dict[str, Any]:
    """What ``flush(overwrite=True)`` does where a part cannot take values back."""
    model, rank = Counting(), context.trainer_rank
    strategy = {"name": "hybrid", "dense": dense, "sparse": "async"}
    with trained(model, sgd, strategy) as optimizer:
        backward(model, rank)
        optimizer.step()
        cpudist.barrier()
        optimizer.flush()
        held = model.table.weight.detach().clone()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(5.0)
        said = ""
        try:
            optimizer.flush(overwrite=True)
        except cpudist.ModelChangedError as error:
            said = str(error)
        kept = all(bool((p == 5.0).all()) for p in model.parameters())
        optimizer.store_model(all_rows=True)
        with torch.no_grad():
            model.table.weight.fill_(7.0)
        optimizer.flush(overwrite=True)  # of tables alone: the servers have them
        back = bool((model.table.weight == 5.0).all()) and not bool((held == 5.0).all())
        cpudist.barrier()
        return {"said": said, "kept": kept, "back": back}


def hybrids(context: cpudist.Context, _report: Any) -> dict[str, Any]:
    """Every pair of parts that a sum can check, and one that is Sync."""
    geo = cpudist.Geo(push_every=3)
    pairs: dict[str, tuple[Any, Any]] = {
        "allreduce async": ("allreduce", "async"),
        "reduce async": ("reduce", "async"),
        "sync async": ("sync", "async"),
        "allreduce sync": ("allreduce", "sync"),
        "sync sync": ("sync", "sync"),
        "allreduce geo": ("allreduce", geo),
        "sync geo": ("sync", geo),
        "local_sgd async": (cpudist.LocalSGD(every=1), "async"),
    }
    found: dict[str, Any] = {
        name: sums(context, cpudist.Hybrid(dense=dense, sparse=sparse))
        for name, (dense, sparse) in pairs.items()
    }
    for name in ("sgd", "adagrad", "sparse_adam", "ftrl"):
        alone = {"name": "allreduce", "bucket_bytes": 100}
        found[f"parity alone {name}"] = parity(context, alone, name)
    for dense in ("allreduce", "sync"):
        strategy = {"name": "hybrid", "dense": dense, "sparse": "sync"}
        found[f"parity {dense}"] = parity(context, strategy, "adagrad")
        for sparse in ("async", "geo"):
            found[f"rewritten {dense} {sparse}"] = rewritten(context, dense, sparse)
    for dense in ("allreduce", "local_sgd"):
        found[f"half done {dense}"] = nothing_half_done(context, dense)
    return found
