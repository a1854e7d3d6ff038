# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Argument checks of the dispatcher ops: typed errors with the values found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from torch_cpudist import _core
from torch_cpudist.errors import InvalidArgumentError, RowOutOfRangeError

# In the order of kernels::OptimizerKind.
_KINDS = (
    "sgd",
    "adagrad",
    "row_wise_adagrad",
    "adam",
    "sparse_adam",
    "adamw",
    "rmsprop",
    "ftrl",
)
# In the order of kernels::OptimizerConfig.
_HYPER = (
    "lr",
    "momentum",
    "dampening",
    "weight_decay",
    "beta1",
    "beta2",
    "eps",
    "alpha",
    "lr_decay",
    "initial_accumulator",
    "l1",
    "l2",
    "lr_power",
)


def fail(message: str) -> NoReturn:
    """Raises InvalidArgumentError; messages are built only on the way to it."""
    raise InvalidArgumentError(message)


def require_tensor(
    op: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], dim: int | None
) -> None:
    """Checks type, dtype (any if ``dtypes`` is empty), device and dimensions."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if dtypes and value.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{op}: {name} must be {expected}, got {value.dtype}")
    if not value.is_cpu or value.layout != torch.strided:
        fail(
            f"{op}: {name} must be a strided tensor on the CPU, got {value.layout} on "
            f"{value.device}"
        )
    if dim is not None and value.dim() != dim:
        fail(f"{op}: {name} must have {dim} dimensions, got shape {tuple(value.shape)}")


def require_keys(op: str, name: str, value: Any, narrow: bool = False) -> None:
    """Checks a vector of int64 keys, of int32 ones too if ``narrow``."""
    dtypes = (torch.int64, torch.int32) if narrow else (torch.int64,)
    require_tensor(op, name, value, dtypes, 1)


def require_real(op: str, name: str, value: Any, dim: int | None) -> None:
    """Checks a float32 or float64 tensor."""
    require_tensor(op, name, value, (torch.float32, torch.float64), dim)


def require_length(op: str, name: str, found: int, expected: int) -> None:
    """Checks a size."""
    if found != expected:
        fail(f"{op}: {name} must be {expected}, got {found}")


def require_in_range(op: str, name: str, index: torch.Tensor, rows: int) -> None:
    """Checks that every value is in ``[0, rows)``."""
    if index.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < 0 or high >= rows:
        raise RowOutOfRangeError(
            f"{op}: {name} must be in [0, {rows}), got values from {low} to {high}"
        )


@contextmanager
def range_errors(op: str, name: str, index: torch.Tensor, rows: int) -> Iterator[None]:
    """Gives an op's own range error its type; the values are looked at only then.

    The ops check every index before they write. A second look in Python would cost as
    much as copying the rows.
    """
    try:
        yield
    except RuntimeError:
        require_in_range(op, name, index, rows)
        raise


def require_contiguous(op: str, name: str, value: torch.Tensor) -> None:
    """Checks that a tensor that is written to is contiguous."""
    if not value.is_contiguous():
        fail(
            f"{op}: {name} is written to and must be contiguous, got strides "
            f"{value.stride()} for shape {tuple(value.shape)}"
        )


def config_arguments(config: _core.OptimizerConfig) -> tuple[int, int, list[float]]:
    """Returns kind, flags and hyper as the update ops take them."""
    hyper = [float(getattr(config, name)) for name in _HYPER]
    return _KINDS.index(config.kind), int(config.nesterov), hyper


def check_update_rows(
    weight: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    grads: torch.Tensor,
    config: _core.OptimizerConfig,
    step: int | None,
    counts: torch.Tensor | None,
) -> None:
    """Checks the arguments of ``update_rows``."""
    op = "update_rows"
    require_real(op, "weight", weight, 2)
    require_contiguous(op, "weight", weight)
    rows, dim = weight.shape
    require_tensor(op, "state", state, (weight.dtype,), 2)
    require_contiguous(op, "state", state)
    width = _core.state_elements(config, dim, dim)
    if tuple(state.shape) != (rows, width):
        fail(
            f"{op}: state must have shape {(rows, width)} for {config.kind}, got "
            f"{tuple(state.shape)}"
        )
    require_keys(op, "keys", keys)
    require_tensor(op, "grads", grads, (weight.dtype,), 2)
    if tuple(grads.shape) != (keys.shape[0], dim):
        fail(
            f"{op}: grads must have shape {(keys.shape[0], dim)}, got "
            f"{tuple(grads.shape)}"
        )
    if (step is None) == (counts is None):
        fail(
            f"{op}: give exactly one of step and counts, got step={step} and "
            f"{'no ' if counts is None else ''}counts"
        )
    if counts is not None:
        require_keys(op, "counts", counts)
        require_contiguous(op, "counts", counts)
        require_length(op, "len(counts)", counts.shape[0], rows)
    else:
        if step is None or step < 1:
            fail(f"{op}: step must be >= 1, got {step}")
