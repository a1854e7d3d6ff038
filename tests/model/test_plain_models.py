# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models that average or update parameters by themselves are refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sync_cases import run
from table_cases import bag, sgd
from torch import nn

import torch_cpudist as cpudist


def refused(model, message):
    """Wrapping fails with the message, and leaves the model as it was."""
    classes = [type(module) for module in model.modules()]

    def body(context):
        with pytest.raises(cpudist.UnsupportedModelError, match=message):
            cpudist.DistributedOptimizer(sgd(model), model)
        assert context.optimizers() == []

    run(body, 1)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("inner", [False, True])
def test_distributed_data_parallel(inner):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        if inner:
            model = nn.ModuleDict({"bag": bag(), "top": model})
        owner = "module 'top'" if inner else "the model"
        refused(model, f"{owner} is a DistributedDataParallel.* Pass the module inside")
    finally:
        dist.destroy_process_group()


def test_an_optimizer_during_backward():
    from torch.distributed.optim import _apply_optimizer_in_backward  # slow

    model = nn.ModuleDict({"bag": bag(), "top": nn.Linear(3, 1)})
    _apply_optimizer_in_backward(
        torch.optim.SGD, model["bag"].parameters(), {"lr": 0.1}
    )
    refused(model, r"'bag\.weight' is updated during backward.* Leave that call out")


class Fused(nn.Linear):
    """As torchrec's: it would train itself."""

    @property
    def fused_optimizer(self):
        raise AssertionError("asked for, but not to be touched")


def test_modules_that_train_themselves():
    model = nn.ModuleDict({"bag": bag(), "top": Fused(3, 1)})
    refused(model, "module 'top' is a Fused, which updates its tables itself")
