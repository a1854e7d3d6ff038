# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which embeddings of a model are tables, and which could be.

A table is the weight of an ``nn.Embedding`` or ``nn.EmbeddingBag`` with
``sparse=True``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import TypeVar, cast

import torch
from torch import nn

from torch_cpudist.errors import InvalidArgumentError, UnsupportedModelError
from torch_cpudist.log import logger
from torch_cpudist.machine.device import check_device
from torch_cpudist.tables.local import (
    EmbeddingModule,
    binding_of,
    plain_class,
    torch_class,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)

MAX_NORM_OBSTACLE = (
    "max_norm rewrites rows on the trainer during a lookup, outside the optimizer",
    "Set max_norm=None; to bound norms, scale the looked-up rows in the model.",
)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _closed_forward(kind: type) -> type | None:
    """Finds a class whose own forward never calls the one it overrides.

    By the names in its methods' code: ``super`` (or the name of a class in between)
    and ``forward`` in one method. What is not Python code cannot be seen, and passes.
    """
    above = kind.__mro__[: kind.__mro__.index(torch_class(kind))]
    callers = {"super", *(owner.__name__ for owner in above)}
    for owner in above:
        if "forward" not in vars(owner):
            continue
        methods = [inspect.unwrap(m) for m in vars(owner).values() if callable(m)]
        if not inspect.isfunction(inspect.unwrap(vars(owner)["forward"])):
            continue
        names = [
            set(code.co_names)
            for method in methods
            if inspect.isfunction(method)
            for code in _codes(method.__code__)
        ]
        if not any("forward" in found and found & callers for found in names):
            return owner
    return None


@dataclass
class FoundTable:
    """A weight that is a table, and every module that looks it up."""

    name: str
    weight: nn.Parameter
    modules: list[EmbeddingModule] = field(default_factory=list)

    @property
    def home(self) -> torch.device:
        """Where the weight is when no optimizer has moved it to host memory."""
        for module in self.modules:
            if (binding := binding_of(module)) is not None:
                return binding.home
        return self.weight.device


def _obstacle(module: EmbeddingModule) -> tuple[str, str] | None:
    """Says why a module's weight cannot be a table, and what to do about it."""
    if module.max_norm is not None:
        return MAX_NORM_OBSTACLE
    if module.scale_grad_by_freq:
        return (
            "torch has no sparse gradient with scale_grad_by_freq",
            "Set scale_grad_by_freq=False, or sparse=False.",
        )
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return (
            "torch has no sparse gradient for mode='max'",
            "Use mode='sum' or 'mean', or sparse=False.",
        )
    if module.weight.dtype != torch.float32:
        return (
            f"tables are float32, this is {module.weight.dtype}",
            "Convert it with module.float(), or set sparse=False.",
        )
    if "forward" in vars(module):
        return (
            "its forward was replaced on the module itself, which hides the lookup",
            "Override forward in a subclass, or set sparse=False.",
        )
    closed = _closed_forward(plain_class(module))
    if closed is not None:
        return (
            f"{closed.__name__}.forward does not call super().forward(ids), where rows "
            "come in",
            "Make it do so, or set sparse=False.",
        )
    return None


def _refuse(name: str, found: str, remedy: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name!r} cannot be a table: {found}. {remedy}")


def _check_table(table: FoundTable) -> None:
    weight, name = table.weight, table.name
    if any(not module.sparse for module in table.modules):
        raise _refuse(
            name,
            "some of the modules that share this weight have sparse=True and some not",
            "Set sparse=True on all of them (cpudist.shard_tables does) or on none.",
        )
    for module in table.modules:
        obstacle = _obstacle(module)
        if obstacle is not None:
            raise _refuse(name, *obstacle)
    for module in table.modules:
        if (binding := binding_of(module)) is not None:
            binding.check_weight(weight)
    check_device(name, weight.device)
    if not weight.is_contiguous():
        raise _refuse(
            name,
            "its weight is not contiguous",
            "Make it so with weight.data = weight.data.contiguous().",
        )


def find_tables(model: nn.Module, trained: set[int]) -> list[FoundTable]:
    """Finds the tables of a model: sparse embedding weights that the optimizer trains.

    Args:
        model: any module.
        trained: ``id`` of every parameter of the optimizer.

    Returns:
        One entry per weight, in the order of the model's modules.

    Raises:
        UnsupportedModelError: a sparse embedding cannot be a table, with the reason.
    """
    found: dict[int, FoundTable] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        weight = module.weight
        if id(weight) not in trained or not weight.requires_grad:
            continue
        name = f"{prefix}.weight" if prefix else "weight"
        table = found.setdefault(
            id(weight), FoundTable(name, cast(nn.Parameter, weight))
        )
        table.modules.append(module)
    tables = [t for t in found.values() if any(module.sparse for module in t.modules)]
    for table in tables:
        _check_table(table)
    return tables


def _other_owner(model: nn.Module, weight: torch.Tensor) -> str | None:
    """Names a parameter that is this embedding weight, but of another module."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            if parameter is weight and not (embedding and name == "weight"):
                return f"{prefix}.{name}" if prefix else name
    return None


def _why_dense(
    model: nn.Module, modules: list[EmbeddingModule], min_rows: int
) -> str | None:
    """Says why modules of one weight, none of which is sparse yet, stay as they are."""
    weight = modules[0].weight
    if weight.shape[0] < min_rows:
        return f"{weight.shape[0]} rows are fewer than min_rows={min_rows}"
    owner = _other_owner(model, weight)
    if owner is not None:
        return f"it is tied to {owner!r}, which gives it a dense gradient"
    return None


def shard_tables(
    model: ModuleT,
    min_rows: int = 10_000,
    report: Callable[[str], None] | None = None,
) -> ModuleT:
    """Marks a model's large embeddings as tables, by setting ``sparse=True`` on them.

    Local, no messages. Call it before building the optimizer: torch's Adam and AdamW,
    say, refuse nothing at that point, but a table's optimizer must be one the servers
    run.

    Args:
        model: changed in place.
        min_rows: embeddings with fewer rows stay dense, >= 0. One that is sparse
            already is a table whatever its size.
        report: called with one line per embedding found; default: the ``torch_cpudist``
            logger at ``info`` (``CPUDIST_LOG=info``).

    Returns:
        The same model.

    Raises:
        InvalidArgumentError: ``min_rows`` is negative.
    """
    if min_rows < 0:
        raise InvalidArgumentError(
            f"shard_tables: min_rows must be >= 0, got {min_rows}"
        )
    say = report if report is not None else logger.info
    shared: dict[int, list[tuple[str, EmbeddingModule]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            if module._parameters.get("weight") is None:
                say(
                    f"{name!r}: stays as it is: its weight is computed, not a parameter"
                )
                continue
            shared.setdefault(id(module.weight), []).append((name, module))
    for named in shared.values():
        names = ", ".join(repr(name) for name, _ in named)
        modules = [module for _, module in named]
        rows, dim = modules[0].weight.shape
        already = any(module.sparse for module in modules)
        obstacle = next(filter(None, map(_obstacle, modules)), None)
        if obstacle is not None:
            kept = "has sparse=True, which cannot train" if already else "stays dense"
            say(f"{names}: {kept}: {obstacle[0]}")
            continue
        reason = None if already else _why_dense(model, modules, min_rows)
        if reason is not None:
            say(f"{names}: stays dense: {reason}")
            continue
        for module in modules:
            module.sparse = True
        note = " (has sparse=True already)" if already else ""
        say(f"{names}: table of {rows} rows, dim {dim}{note}")
    return model
