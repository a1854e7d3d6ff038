# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The fused optimizer ops against torch.optim, configured from its own objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_cpudist import _core, ops
from torch_cpudist.optim import FTRL, RowWiseAdagrad
from torch_cpudist.rules.read import read_group

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "sgd momentum": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
    ),
    "sgd nesterov": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adagrad options": (
        torch.optim.Adagrad,
        {
            "lr": 0.1,
            "lr_decay": 0.05,
            "weight_decay": 0.01,
            "initial_accumulator_value": 0.3,
            "eps": 1e-6,
        },
    ),
    "row-wise adagrad": (RowWiseAdagrad, {"lr": 0.1}),
    "row-wise adagrad options": (
        RowWiseAdagrad,
        {
            "lr": 0.1,
            "lr_decay": 0.05,
            "weight_decay": 0.01,
            "initial_accumulator_value": 0.3,
        },
    ),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adam options": (
        torch.optim.Adam,
        {"lr": 0.01, "betas": (0.4, 0.95), "eps": 1e-4, "weight_decay": 0.02},
    ),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "rmsprop options": (
        torch.optim.RMSprop,
        {
            "lr": 0.01,
            "alpha": 0.9,
            "momentum": 0.8,
            "weight_decay": 0.01,
            "eps": 1e-6,
        },
    ),
    "ftrl": (FTRL, {"lr": 0.1}),
    "ftrl options": (
        FTRL,
        {
            "lr": 0.1,
            "l1": 0.05,
            "l2": 0.02,
            "beta": 0.5,
            "lr_power": -0.7,
            "initial_accumulator_value": 0.1,
        },
    ),
}
STEPS = 25


def gradients(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(17)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for _ in range(STEPS)
    ]


def start(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )


def run_torch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    kind, options = OPTIMIZERS[name]
    parameter = torch.nn.Parameter(start(shape).to(dtype))
    optimizer = kind([parameter], **options)
    for grad in gradients(shape):
        parameter.grad = grad.to(dtype)
        optimizer.step()
    return parameter.detach()


def initial_state(
    config: _core.OptimizerConfig, rows: int, elements: int, dtype: torch.dtype
) -> torch.Tensor:
    """State of `rows` rows (or one flat block) of `elements` weights each."""
    width = _core.state_elements(config, elements, elements)
    state = torch.zeros(rows, width, dtype=dtype)
    if config.kind in ("adagrad", "row_wise_adagrad"):
        state.fill_(config.initial_accumulator)
    if config.kind == "ftrl":
        state[:, elements:] = config.initial_accumulator
    return state


def config_of(name: str) -> _core.OptimizerConfig:
    kind, options = OPTIMIZERS[name]
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **options)
    return read_group(optimizer, optimizer.param_groups[0])


def run_dense(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    config = config_of(name)
    weight = start(shape).to(dtype)
    width = weight[0].numel() if weight.dim() > 1 else 1
    if config.kind == "row_wise_adagrad":
        rows = weight.numel() // width
        state = initial_state(config, rows, width, dtype).flatten()
    else:
        state = initial_state(config, 1, weight.numel(), dtype).flatten()
    for step, grad in enumerate(gradients(shape), start=1):
        ops.update_dense(weight, state, grad.to(dtype), config, step=step)
    return weight


def assert_parity(name: str, shape: tuple[int, ...], found: torch.Tensor) -> None:
    """float64: 1e-6; float32: four times torch's own distance to the float64 run."""
    exact = run_torch(name, shape, torch.float64)
    allowed = 1e-6
    if found.dtype == torch.float32:
        single = run_torch(name, shape, torch.float32)
        allowed = max(allowed, 4 * float((single - exact).abs().max()))
    assert float((found - exact).abs().max()) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(37,), (13, 7), (6, 3, 5)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dense_update_equals_torch(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found = run_dense(name, shape, dtype)
    assert_parity(name, shape, found)
    if dtype == torch.float64:
        exact = run_torch(name, shape, torch.float64)
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_with_one_step_number_equal_the_dense_update(
    name: str, dtype: torch.dtype
) -> None:
    shape = (13, 7)
    config = config_of(name)
    weight, state = start(shape).to(dtype), initial_state(config, 13, 7, dtype)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(1))
    for step, grad in enumerate(gradients(shape), start=1):
        rows = grad.to(dtype)[order]
        ops.update_rows(weight, state, order, rows, config, step=step)
    assert torch.equal(weight, run_dense(name, shape, dtype))


SPARSE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": OPTIMIZERS["sgd"],
    "adagrad": OPTIMIZERS["adagrad"],
    "adagrad lr_decay": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "sparse_adam": (torch.optim.SparseAdam, {"lr": 0.01, "eps": 1e-3}),
    "row-wise adagrad": OPTIMIZERS["row-wise adagrad"],
    "ftrl": OPTIMIZERS["ftrl"],
}


def sparse_batches(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(23)
    batches = []
    for _ in range(STEPS):
        keys = torch.randint(20, (30,), generator=generator)
        rows = torch.randn(30, 5, generator=generator, dtype=torch.float64)
        batches.append((keys, rows.to(dtype)))
    return batches


def run_torch_sparse(name: str, dtype: torch.dtype) -> torch.Tensor:
    kind, options = SPARSE[name]
    parameter = torch.nn.Parameter(start((20, 5)).to(dtype))
    optimizer = kind([parameter], **options)
    for keys, rows in sparse_batches(dtype):
        grad = torch.sparse_coo_tensor(
            keys[None], rows, (20, 5), check_invariants=False
        )
        parameter.grad = grad.coalesce()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_update_equals_torch(name: str, dtype: torch.dtype) -> None:
    kind, options = SPARSE[name]
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **options)
    config = read_group(optimizer, optimizer.param_groups[0])
    weight, state = start((20, 5)).to(dtype), initial_state(config, 20, 5, dtype)
    for step, (keys, rows) in enumerate(sparse_batches(dtype), start=1):
        unique, sums = ops.dedupe_segment_sum(keys, rows)
        ops.update_rows(weight, state, unique, sums, config, step=step)
    exact = run_torch_sparse(name, torch.float64)
    allowed = 1e-6
    if dtype == torch.float32:
        single = run_torch_sparse(name, torch.float32)
        allowed = max(allowed, 4 * float((single - exact).abs().max()))
    assert float((weight - exact).abs().max()) <= allowed


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_counted_rows_are_optimizers_of_their_own(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    config = config_of(name)
    dtype = torch.float64
    weight, state = start((20, 5)), initial_state(config, 20, 5, dtype)
    counts = torch.zeros(20, dtype=torch.int64)
    rows = [torch.nn.Parameter(row.clone()[None]) for row in weight]
    optimizers = [kind([row], **options) for row in rows]
    for keys, grads in sparse_batches(dtype):
        unique, sums = ops.dedupe_segment_sum(keys, grads)
        ops.update_rows(weight, state, unique, sums, config, counts=counts)
        for key, grad in zip(unique.tolist(), sums, strict=True):
            rows[key].grad = grad[None].clone()
            optimizers[key].step()
    expected = torch.cat([row.detach() for row in rows])
    torch.testing.assert_close(weight, expected, rtol=1e-11, atol=1e-11)
    touched = torch.cat([keys.unique() for keys, _ in sparse_batches(dtype)])
    assert torch.equal(counts, torch.bincount(touched, minlength=20))
    assert len(set(counts.tolist())) > 1
