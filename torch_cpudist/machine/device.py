# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which devices this package trains on."""

from __future__ import annotations

import torch

from torch_cpudist.errors import UnsupportedModelError

CPU = torch.device("cpu")
_SUPPORTED = ("cpu", "cuda")


def check_device(name: str, device: torch.device) -> None:
    """Refuses a parameter on a device that this package does not train on.

    Raises:
        UnsupportedModelError: names the device.
    """
    if device.type == "meta":
        # No memory, no values: nothing could be moved.
        raise UnsupportedModelError(
            f"parameter {name!r} is on meta; expected cpu or a CUDA device. It has no "
            "values that servers could begin with: call model.to_empty(device='cpu') "
            "and initialise all parameters (reset_parameters() of each module, or "
            "load_state_dict()), then build the optimizer over them and wrap it. Every "
            "trainer holds every row of a table: docs/strategies.md has the memory."
        )
    if device.type not in _SUPPORTED:
        raise UnsupportedModelError(
            f"parameter {name!r} is on {device}; expected cpu or a CUDA device. Move "
            "the model there before wrapping the optimizer: model.to('cpu')."
        )
