# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which device a model is on, and what has to be there with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist.errors import UnsupportedModelError
from torch_cpudist.machine.device import CPU
from torch_cpudist.tables.found import FoundTable


def model_device(
    model: nn.Module,
    tables: Sequence[FoundTable],
    dense: Sequence[tuple[str, torch.device]],
) -> torch.device:
    """The device that a model computes on, where lookups bring their results.

    That of its dense parameters. Tables may be there too, or on the CPU.

    Args:
        model: the module.
        tables: those that are trained.
        dense: names of the parameters that are trained as a whole, and their devices.

    Raises:
        UnsupportedModelError: parameters are on several devices.
    """
    found = {device: name for name, device in reversed(dense)}
    if not found:
        weights = {id(table.weight) for table in tables}
        for name, parameter in model.named_parameters():
            # Frozen ones: what is not on a device is no obstacle.
            if id(parameter) not in weights and parameter.device.type == "cuda":
                found.setdefault(parameter.device, name)
    for table in tables:
        if table.home.type != "cpu":
            found.setdefault(table.home, table.name)
    if len(found) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in found.items())
        raise UnsupportedModelError(
            f"the model's parameters are on several devices: {places}; expected one "
            "for all but tables, which may be on the CPU. Move the model with "
            "model.to(device) before wrapping the optimizer."
        )
    return next(iter(found), CPU)


def state_beside(
    inner: Optimizer, parameter: torch.Tensor, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Optimizer state where torch's ``load_state_dict`` would put it.

    Args:
        inner: the optimizer that has ``parameter``.
        parameter: the parameter.
        state: its state, on any device.
    """
    on_device = any(
        group.get("capturable") or group.get("fused")
        for group in inner.param_groups
        if any(parameter is own for own in group["params"])
    )
    return {
        name: value.to(parameter.device)
        if isinstance(value, torch.Tensor) and (name != "step" or on_device)
        else value
        for name, value in state.items()
    }
