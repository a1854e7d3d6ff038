# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which embeddings of a model are tables, and which could be.

A table is the weight of an ``nn.Embedding`` or ``nn.EmbeddingBag`` with
``sparse=True``, or one that is remote.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import cast

import torch
from torch import nn

from torch_cpudist.errors import RemoteTableError, UnsupportedModelError
from torch_cpudist.machine.device import check_device
from torch_cpudist.tables.binding import FREQUENCY_OBSTACLE, MAX_NORM_OBSTACLE
from torch_cpudist.tables.local import (
    EmbeddingModule,
    binding_of,
    plain_class,
    torch_class,
)
from torch_cpudist.tables.remote_table import RemoteTable
from torch_cpudist.tables.remote_weight import is_remote, table_of

FROZEN_OBSTACLE = (
    "its weight is frozen (requires_grad=False), and servers have the rows of what an "
    "optimizer trains only",
    "Call weight.requires_grad_(True), in a parameter group with lr=0 where its rows "
    "are to stay as they are; or leave it out of the remote tables.",
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
    def remote(self) -> bool:
        """Whether no row of it is on this trainer."""
        return is_remote(self.weight)

    @property
    def home(self) -> torch.device:
        """Where the weight is when no optimizer has moved it to host memory."""
        for module in self.modules:
            if (binding := binding_of(module)) is not None:
                return binding.home
        return self.weight.device


def obstacle(module: EmbeddingModule, remote: bool) -> tuple[str, str] | None:
    """Says why a module's weight cannot be a table, and what to do about it.

    Args:
        module: that has the weight.
        remote: the table's rows are to be on the servers only.
    """
    instead = "leave it out of the remote tables" if remote else "sparse=False"
    put = instead if remote else "set sparse=False"
    if module.max_norm is not None:
        return MAX_NORM_OBSTACLE
    if module.scale_grad_by_freq:
        return (
            FREQUENCY_OBSTACLE,
            f"Set scale_grad_by_freq=False, or {instead}.",
        )
    bag = isinstance(module, nn.EmbeddingBag)
    if bag and module.mode == "max" and not remote:
        return (
            "torch has no sparse gradient for mode='max'",
            "Use mode='sum' or 'mean', or sparse=False; a remote table takes it "
            "(cpudist.remote_tables).",
        )
    if module.weight.dtype != torch.float32:
        return (
            f"tables are float32, this is {module.weight.dtype}",
            f"Convert it with module.float(), or {put}.",
        )
    if "forward" in vars(module):
        return (
            "its forward was replaced on the module itself, which hides the lookup",
            f"Override forward in a subclass, or {put}.",
        )
    closed = _closed_forward(plain_class(module))
    if closed is not None:
        return (
            f"{closed.__name__}.forward does not call super().forward(ids), where rows "
            "come in",
            f"Make it do so, or {put}.",
        )
    return None


def cannot_be_table(name: str, found: str, remedy: str) -> UnsupportedModelError:
    """The error for a weight that is meant to be a table."""
    return UnsupportedModelError(f"{name!r} cannot be a table: {found}. {remedy}")


def _check_table(table: FoundTable) -> None:
    weight, name = table.weight, table.name
    if not table.remote and any(not module.sparse for module in table.modules):
        raise cannot_be_table(
            name,
            "some of the modules that share this weight have sparse=True and some not",
            "Set sparse=True on all of them (cpudist.shard_tables does) or on none.",
        )
    for module in table.modules:
        found = obstacle(module, table.remote)
        if found is not None:
            raise cannot_be_table(name, *found)
    for module in table.modules:
        if (binding := binding_of(module)) is not None:
            binding.check_weight(weight)
    check_device(name, weight.device)
    if table.remote:
        _check_remote(table)
    elif not weight.is_contiguous():
        raise cannot_be_table(
            name,
            "its weight is not contiguous",
            "Make it so with weight.data = weight.data.contiguous().",
        )


def _check_remote(table: FoundTable) -> None:
    """Refuses a remote table whose initial rows are nowhere, or whose rows are files.

    Raises:
        RemoteTableError: it is.
    """
    if table_of(table.weight).exported:
        raise RemoteTableError(
            f"remote table {table.name!r} is loaded for inference: its rows are in "
            "files, which nobody trains. Call close() of what load_for_inference has "
            "returned first; its rows then begin anew."
        )
    known = table_of(table.weight)
    if known.stored:
        raise RemoteTableError(
            f"remote table {table.name!r}: the rows that it had were stored on the "
            f"servers of {known.whose_rows()}, and there are none here to begin with "
            f"again. {_way_out(table, known)}"
        )


def _way_out(table: FoundTable, known: RemoteTable) -> str:
    """What to do about a table whose rows were stored for somebody else."""
    anew = (
        f"say how rows begin: cpudist.shard_tables(model, remote=[{table.name!r}], "
        "initial=cpudist.Normal(...))"
    )
    if known.origin is None and not known.loaded:
        return f"Build the model anew, or {anew}."
    return (
        "A copy has no rows: train and look up the original itself; copy it before its "
        f"optimizer is wrapped; or, for a copy that trains by itself, {anew}, and then "
        "opt.resume(...) where a snapshot of the original is to go on. To use its rows "
        "without training: cpudist.export and cpudist.load_for_inference."
    )


def find_tables(model: nn.Module, trained: set[int]) -> list[FoundTable]:
    """Finds the tables of a model: sparse embedding weights that the optimizer trains.

    Remote ones are, whatever ``sparse`` says, and their modules get ``sparse=True``: a
    dense gradient would be as large as the table.

    Args:
        model: any module.
        trained: ``id`` of every parameter of the optimizer.

    Returns:
        One entry per weight, in the order of the model's modules.

    Raises:
        UnsupportedModelError: a sparse embedding cannot be a table, with the reason.
        RemoteTableError: a remote one has nothing to begin with.
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
    tables = [t for t in found.values() if t.remote or any(m.sparse for m in t.modules)]
    for table in tables:
        _check_table(table)
        if not table.remote:
            continue
        owner = other_owner(model, table.weight)
        if owner is not None:
            raise cannot_be_table(
                table.name,
                f"it is tied to {owner!r}, which needs all its rows here",
                "Untie them, or leave it out of the remote tables.",
            )
        for module in table.modules:
            module.sparse = True
        # Before any is told to servers: others may begin as this one.
        table_of(table.weight).name = table.name
    _check_apart(tables)
    return tables


def _check_apart(tables: list[FoundTable]) -> None:
    """Refuses two parameters over the memory of one table, which would grow apart."""
    names: dict[tuple[bool, int], str] = {}
    for table in tables:
        weight = table.weight
        place = id(table_of(weight)) if table.remote else weight.data_ptr()
        if not place or not weight.numel():
            continue
        other = names.setdefault((table.remote, place), table.name)
        if other != table.name:
            raise cannot_be_table(
                table.name,
                f"it is another parameter over the rows of {other!r}, as "
                "nn.Embedding(..., _weight=other.weight) and from_pretrained make "
                "them, and servers would train the two apart",
                "Let the modules share one parameter (module.weight = other.weight), "
                "or give one of them a copy (other.weight.detach().clone()).",
            )


def other_owner(model: nn.Module, weight: torch.Tensor) -> str | None:
    """Names a parameter that is this embedding weight, but of another module."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            if parameter is weight and not (embedding and name == "weight"):
                return f"{prefix}.{name}" if prefix else name
    return None
