# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the trainers of AllReduce's and LocalSGD's tests run, each as a process."""

from __future__ import annotations

from typing import Any

import torch
from collective_cases import (
    STEPS,
    Dense,
    adam,
    batch_of,
    by_replicas,
    difference,
    flat_of,
    like_ddp,
    like_one_process,
    loss_of,
    mismatches,
    refusals,
    same_bits,
    saved_and_loaded,
    several_passes,
    trained,
)
from torch import nn

import torch_cpudist as cpudist


def averages(context: cpudist.Context, _report: Any) -> dict[str, Any]:
    """Everything about AllReduce that ends well."""
    found = {
        "float32": like_one_process(context, torch.float32),
        "float64": like_one_process(context, torch.float64),
        "ddp": like_ddp(context),
        "no_sync": several_passes(context, "no_sync"),
        "passes": several_passes(context, "passes"),
        "clipped": several_passes(context, "clipped"),
        "create_graph": several_passes(context, "create_graph"),
        "state": saved_and_loaded(context),
        "local": local_sgd(context),
        "replicas": by_replicas(context),
    }
    if context.trainer_count == 2:
        found["refused"] = refusals(context)
        found["mismatched"] = mismatches(context)
        found["outer"] = outer_steps(context, between=False)
        found["outer between"] = outer_steps(context, between=True)
        found["written"] = written(context)
    return found


def local_sgd(context: cpudist.Context) -> dict[str, Any]:
    """Against plain models that are averaged by hand: differences, and at the end."""
    rank, n = context.trainer_rank, context.trainer_count
    plain = [Dense() for _ in range(n)]
    references = [adam(model) for model in plain]
    ours, worst = Dense(), 0.0
    strategy = cpudist.LocalSGD(every=4, warmup_steps=2)
    with trained(ours, adam, strategy) as optimizer:
        for step in range(STEPS - 1):
            optimizer.zero_grad()
            loss_of(ours, batch_of(step, rank, 3, torch.float32), (0, 1)).backward()
            optimizer.step()
            for other, (model, reference) in enumerate(
                zip(plain, references, strict=True)
            ):
                reference.zero_grad()
                batch = batch_of(step, other, 3, torch.float32)
                loss_of(model, batch, (0, 1)).backward()
                reference.step()
            if step + 1 in (1, 2, 6, 10):
                mean = sum(flat_of(model) for model in plain) / n
                for model in plain:
                    nn.utils.vector_to_parameters(mean.clone(), model.parameters())
            worst = max(worst, difference(ours, plain[rank]))
        apart = not same_bits(ours)
        cpudist.barrier()  # averages what was moved since
        return {
            "worst": worst,
            "apart": apart,
            "together": same_bits(ours),
            "averages": optimizer.stats()["collective"]["averages"],
        }


def outer_steps(context: cpudist.Context, between: bool) -> float:
    """LocalSGD with an outer optimizer, against torch's over movements: difference.

    Args:
        context: this trainer's.
        between: trainers leave and meet between two outer steps, too.
    """
    rank, n = context.trainer_rank, context.trainer_count
    plain, ours = [Dense() for _ in range(n)], Dense()
    references = [adam(model) for model in plain]
    kept, worst = Dense(), 0.0
    options = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    outer = torch.optim.SGD(kept.parameters(), **options)
    strategy = cpudist.LocalSGD(every=3, warmup_steps=1, outer=options)
    with trained(ours, adam, strategy) as optimizer:
        pauses = {1: cpudist.barrier, 4: optimizer.leave, 5: cpudist.barrier}
        pauses |= {STEPS - 1: cpudist.barrier}
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(ours, batch_of(step, rank, 3, torch.float32), (0, 1)).backward()
            optimizer.step()
            for other, (model, reference) in enumerate(
                zip(plain, references, strict=True)
            ):
                reference.zero_grad()
                batch = batch_of(step, other, 3, torch.float32)
                loss_of(model, batch, (0, 1)).backward()
                reference.step()
            mean = sum(flat_of(model) for model in plain) / n
            if step == 0:
                _put(mean, [*plain, kept])
            elif step % 3 == 0:
                _put(_stepped(outer, kept, mean), plain)
            if between and step in pauses:
                pauses[step]()
                mean = sum(flat_of(model) for model in plain) / n
                _put(mean, plain)  # the outer optimizer knows nothing of it
            worst = max(worst, difference(ours, plain[rank]))
        return worst


def _put(values: torch.Tensor, models: list[nn.Module]) -> None:
    for model in models:
        nn.utils.vector_to_parameters(values.clone(), model.parameters())


def _stepped(
    outer: torch.optim.SGD, kept: nn.Module, mean: torch.Tensor
) -> torch.Tensor:
    """One outer step of ``kept`` towards ``mean``."""
    movement, begin = flat_of(kept) - mean, 0
    for p in kept.parameters():
        p.grad = movement[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    outer.step()
    return flat_of(kept)


def written(context: cpudist.Context) -> dict[str, Any]:
    """What trainer 1 writes between two averages of LocalSGD stays its own."""
    model, rank = Dense(), context.trainer_rank
    with trained(model, adam, cpudist.LocalSGD(every=4)) as optimizer:
        loss_of(model, batch_of(0, rank, 3, torch.float32), (0,)).backward()
        optimizer.step()
        if rank:
            with torch.no_grad():
                model.last.bias.fill_(9.0)
        before = flat_of(model).clone()
        cpudist.barrier()  # would average
        kept = torch.equal(before, flat_of(model))
        refused = ""
        try:
            optimizer.flush(overwrite=True)
        except cpudist.ModelChangedError as error:
            refused = str(error)
        optimizer.store_model()
        averages = optimizer.stats()["collective"]["averages"]
        return {
            "kept": kept,
            "refused": refused,
            "together": same_bits(model),
            "averages": averages,
        }
