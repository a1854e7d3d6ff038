# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ways in which scripts read a table's weight, and averages of weights by strategy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import sync_cases
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_cpudist as cpudist

DECAY, UPDATES = 0.5, 12


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _swapped(model: nn.Module) -> torch.Tensor:
    """What swaps of averaged and current weights read."""
    return model.bag.weight.data.clone()


def _averaged(model: nn.Module) -> torch.Tensor:
    averaged = AveragedModel(sync_cases.Model())
    averaged.update_parameters(model)
    return averaged.module.bag.weight


#: By name, what gives all rows of ``model.bag`` as a tensor.
READERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "clone": lambda m: m.bag.weight.clone(),
    "detach().clone()": lambda m: m.bag.weight.detach().clone(),
    "data.clone()": _swapped,
    "to(float64)": lambda m: m.bag.weight.to(torch.float64).float(),
    "double": lambda m: m.bag.weight.detach().double().float(),
    "numpy": lambda m: torch.from_numpy(m.bag.weight.detach().numpy().copy()),
    "tolist": lambda m: torch.tensor(m.bag.weight.tolist()),
    "item": lambda m: torch.tensor([[x.item() for x in row] for row in m.bag.weight]),
    "T": lambda m: m.bag.weight.T.clone().T,
    "view": lambda m: m.bag.weight.view(-1).clone().view_as(m.bag.weight),
    "all of it": lambda m: m.bag.weight[:].clone(),
    "rows": lambda m: torch.stack([m.bag.weight[i] for i in range(sync_cases.ROWS)]),
    "last rows": lambda m: torch.cat(
        [m.bag.weight[-sync_cases.ROWS : -1], m.bag.weight[[-1]]]
    ),
    "columns": lambda m: torch.stack(
        [m.bag.weight[:, i] for i in range(sync_cases.DIM)], dim=1
    ),
    "mask": lambda m: m.bag.weight[torch.ones(sync_cases.ROWS, dtype=torch.bool)],
    "index_select": lambda m: torch.index_select(
        m.bag.weight, 0, torch.arange(sync_cases.ROWS)
    ),
    "F.embedding": lambda m: nn.functional.embedding(
        torch.arange(sync_cases.ROWS), m.bag.weight
    ),
    "from_pretrained": lambda m: nn.Embedding.from_pretrained(m.bag.weight)(
        torch.arange(sync_cases.ROWS)
    ),
    "add": lambda m: torch.zeros(sync_cases.ROWS, sync_cases.DIM) + m.bag.weight,
    "copy_": lambda m: torch.empty(sync_cases.ROWS, sync_cases.DIM).copy_(m.bag.weight),
    "foreach": lambda m: torch._foreach_mul([m.bag.weight], 1.0)[0],
    "out": lambda m: torch.mul(
        m.bag.weight.detach(), 1.0, out=torch.empty(sync_cases.ROWS, sync_cases.DIM)
    ),
    "stack": lambda m: torch.stack([m.bag.weight, m.bag.weight])[1],
    "vector": lambda m: nn.utils.parameters_to_vector([m.bag.weight]).view(
        sync_cases.ROWS, sync_cases.DIM
    ),
    "state_dict": lambda m: m.state_dict()["bag.weight"].clone(),
    "deepcopy of state_dict": lambda m: copy.deepcopy(m.state_dict())["bag.weight"],
    "saved state_dict": lambda m: _saved(m.state_dict())["bag.weight"],
    "saved parameters": lambda m: _saved(list(m.parameters()))[0],
    "saved weight": lambda m: _saved(m.bag.weight.detach()),
    "deepcopy of the model": lambda m: copy.deepcopy(m).bag.weight,
    "deepcopy of the module": lambda m: copy.deepcopy(m.bag).weight,
    "deepcopy of the weight": lambda m: copy.deepcopy(m.bag.weight),
    "pickle": lambda m: pickle.loads(pickle.dumps(m.bag)).weight,  # noqa: S301
    "AveragedModel": _averaged,
}


def looked_up(model: nn.Module) -> torch.Tensor:
    """All rows of ``model.bag``, by a lookup of each: what the servers have."""
    with torch.no_grad():
        found: torch.Tensor = model.bag(torch.arange(sync_cases.ROWS)[:, None])
    return found


def averages(
    context: cpudist.Context, strategy: Any, meet: Callable[[], None]
) -> dict[str, float]:
    """Trains and keeps torch's average of the weights, and one of its own.

    Args:
        context: of this trainer.
        strategy: as ``DistributedOptimizer`` takes it.
        meet: returns when every trainer is here.

    Returns:
        ``worst``: by how much the averages differ from float64 ones of rows that were
        looked up one by one; ``moved``: how far a parameter went.
    """
    rank, n = context.trainer_rank, context.trainer_count
    table = strategy["name"] != "localsgd"  # which trains no tables
    batches = sync_cases.Batches(n, steps=UPDATES)
    model = sync_cases.Model(table=table)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = cpudist.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3), model, strategy
    )
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    expected: dict[str, torch.Tensor] = {}
    for step in range(UPDATES):
        optimizer.zero_grad()
        sync_cases.loss_of(model, batches.part(step, rank)).backward()
        optimizer.step()
        if strategy["name"] in ("async", "hybrid"):
            optimizer.flush("none")  # what is queued
        meet()
        averaged.update_parameters(model)
        now = {k: v.detach() for k, v in model.named_parameters() if "bag" not in k}
        if table:
            now["bag.weight"] = looked_up(model)
        for name, value in now.items():
            value = value.double()
            before = expected.get(name, value)
            expected[name] = DECAY * before + (1 - DECAY) * value
        meet()
    found = {k: v.double() for k, v in averaged.module.named_parameters()}
    assert found.keys() == expected.keys()
    worst = max(float((found[k] - expected[k]).abs().max()) for k in expected)
    moved = max(float((expected[k] - start[k]).abs().max()) for k in expected)
    optimizer.close()
    return {"worst": worst, "moved": moved}


STRATEGIES: dict[str, dict[str, Any]] = {
    "sync": {"name": "sync"},
    "async": {"name": "async"},
    "halfasync": {"name": "halfasync"},
    "geo": {"name": "geo", "push_every": 2},
    "allreduce": {"name": "allreduce"},
    "reduce": {"name": "reduce"},
    "localsgd": {"name": "localsgd", "every": 3},
    "hybrid": {
        "name": "hybrid",
        "dense": {"name": "allreduce"},
        "sparse": {"name": "async"},
    },
}


def averages_of_processes(context: cpudist.Context, _: Any) -> dict[str, Any]:
    """``averages`` of the strategies whose trainers are processes."""
    chosen = ("allreduce", "reduce", "localsgd", "hybrid")
    return {
        name: averages(context, STRATEGIES[name], torch.distributed.barrier)
        for name in chosen
    }
