# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The weight of a remote table: a parameter of any number of rows, none of them here.

It has torch's shape, dtype and device, and the memory of one row of NaN, which all rows
share. Optimizers build their state for it, autograd adds up its sparse gradients, and
modules look it up as any other; what would need the rows themselves raises. Until its
optimizer is wrapped it records how it is initialised, for the servers to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, TypeGuard, cast

import torch
from torch import nn

from torch_cpudist.errors import (
    InvalidArgumentError,
    RemoteTableError,
    UnsupportedModelError,
)
from torch_cpudist.settings.open_table import OpenTable
from torch_cpudist.tables.foreign import graph_without_pull
from torch_cpudist.tables.initial import Program, Step
from torch_cpudist.tables.remote_table import ROWS_ELSEWHERE, RemoteTable
from torch_cpudist.tables.weight import (
    Function,
    as_it_stands,
    blind,
    in_graph,
    is_in_place,
)

#: What is done where one of torch's functions is called with a remote weight.
Way = Callable[[Function, Any, Mapping[str, Any]], Any]

#: Filled by the modules of the ways; others are called plainly or refused.
WAYS: dict[Function, Way] = {}
#: What is done instead within functions of torch, by their code; gets their variables.
WITHIN: dict[CodeType, Callable[[Mapping[str, Any], Function, Any, Any], Any]] = {}
#: What errors say to whoever averages weights.
BY_THE_SERVERS = (
    "For an average of weights let the servers keep it, under Sync, HalfAsync or "
    "Async: DistributedOptimizer(average=cpudist.EMA(d)), with the average's decay d, "
    "and use the model within `with opt.averaged():`."
)


def past_modes(frame: FrameType | None) -> FrameType | None:
    """Who has called a function that modes of torch hand on, as ``torch.device`` does.

    Args:
        frame: of whoever calls now.
    """
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


class RemoteWeight(torch.Tensor):
    """The parameter of a remote table, an alias of it, or some of its rows.

    Aliases (``detach()``, ``.data``) record like the parameter; rows (``weight[0]``)
    take a constant only, as the padding row does.
    """

    _cpudist_table: RemoteTable
    _cpudist_rows: tuple[int, int] | None  # of the table; None: all
    _is_param: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Records an initialiser, calls what needs no rows, refuses all else.

        Raises:
            RemoteTableError: rows would be needed here.
            UnsupportedModelError: a write that is no initialiser which servers know.
        """
        named = kwargs or {}
        if torch.compiler.is_compiling():
            return in_graph(_is_blind, _called, func, args, named)
        caller = past_modes(sys._getframe(1))
        within = None if caller is None else WITHIN.get(caller.f_code)
        if caller is not None and within is not None:
            return within(caller.f_locals, func, args, named)
        return _called(func, args, named)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """What it is; there are no values to show."""
        table = self._cpudist_table
        size = "any key" if table.open is not None else f"rows={table.rows}"
        return (
            f"RemoteWeight({size}, dim={table.dim}, name={table.name!r}, "
            f"initial={list(table.program.steps)})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A remote weight of its own, whose rows begin as these began."""
        if id(self) not in memo:
            memo[id(self)] = _alike(self, self._cpudist_table.copy())
        return cast(torch.Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a description; rows are the servers'."""
        with as_it_stands():
            table, trained = self._cpudist_table, self.requires_grad
        told = (table.rows, table.dim, table.program.steps, table.program.overrides)
        rest = (table.seed_of(table.name), table.values, table.name, table.stored)
        kind = (isinstance(self, nn.Parameter), trained)
        if table.open is not None:
            return rebuilt, (*told, *rest, *kind, table.open)
        return rebuilt, (*told, *rest, *kind)


def rebuilt(
    rows: int,
    dim: int,
    steps: tuple[Step, ...],
    overrides: tuple[tuple[int, int, float], ...],
    seed: int,
    values: torch.Tensor | None,
    name: str,
    stored: bool,
    parameter: bool,
    trained: bool,
    open: OpenTable | None = None,
) -> RemoteWeight:
    """What ``torch.save`` has saved of a remote weight, unwrapped."""
    table = RemoteTable(rows, dim, Program(steps, overrides, seed), values, open)
    table.name, table.stored, table.loaded = name, stored, True
    made = weight_of(table)
    return as_parameter(made, trained) if parameter else made


def is_remote(weight: object) -> TypeGuard[RemoteWeight]:
    """Whether a weight is that of a remote table."""
    return isinstance(weight, RemoteWeight)


def table_of(weight: torch.Tensor) -> RemoteTable:
    """What is known of the table of a remote weight."""
    return cast(RemoteWeight, weight)._cpudist_table


def _row(table: RemoteTable) -> torch.Tensor:
    """Memory of one row, as many times as there are rows."""
    row = torch.full((1, table.dim), torch.nan, dtype=torch.float32, device="cpu")
    if type(row) is not torch.Tensor:
        raise UnsupportedModelError(
            f"{table.describe()}: expected torch to make a plain tensor for its "
            f"weight, found {type(row).__name__}, as under FakeTensorMode. Build the "
            "model outside of such a mode."
        )
    return row.expand(table.rows, table.dim)


def marked(
    plain: torch.Tensor, table: RemoteTable, rows: tuple[int, int] | None = None
) -> RemoteWeight:
    """A plain tensor of the memory of a row as one of a table, or of some rows of it.

    Within ``as_it_stands``.
    """
    made = plain.as_subclass(RemoteWeight)
    made._cpudist_table = table
    made._cpudist_rows = rows
    return made


def weight_of(table: RemoteTable) -> RemoteWeight:
    """A weight without rows, no parameter yet. Cost: the memory of one row."""
    with as_it_stands():
        return marked(_row(table), table)


def as_parameter(weight: RemoteWeight, requires_grad: bool) -> RemoteWeight:
    """A remote weight as ``nn.Parameter(weight)`` makes it."""
    with as_it_stands():
        made = marked(weight.detach(), table_of(weight))
        made.requires_grad_(requires_grad)
    made._is_param = True
    return made


def _alike(weight: RemoteWeight, table: RemoteTable) -> RemoteWeight:
    made = weight_of(table)
    if isinstance(weight, nn.Parameter):
        with as_it_stands():
            return as_parameter(made, weight.requires_grad)
    return made


def become_remote(weight: nn.Parameter, table: RemoteTable) -> None:
    """Makes a parameter on the CPU or a CUDA device remote; it stays the same one."""
    made = cast(RemoteWeight, weight)
    with as_it_stands():
        weight.data = _row(table)
    made.__class__ = RemoteWeight
    made._cpudist_table = table
    made._cpudist_rows = None
    made._is_param = True


def become_local(weight: RemoteWeight) -> None:
    """Makes a remote weight a plain parameter with rows, which torch draws here."""
    table = weight._cpudist_table
    values = table.values
    if values is None:
        values = table.program.rows_here(table.rows, table.dim)
    del weight._cpudist_table, weight._cpudist_rows, weight._is_param
    weight.__class__ = nn.Parameter  # type: ignore[assignment]
    weight.data = values


# -- what functions do -----------------------------------------------------------------


def find(values: Any) -> RemoteWeight:
    """The first remote weight among arguments of torch."""
    found = _search(values)
    if found is None:
        raise InvalidArgumentError("no remote weight among the arguments")
    return found


def _search(values: Any) -> RemoteWeight | None:
    if isinstance(values, RemoteWeight):
        return values
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        return next(filter(_is_weight, map(_search, values)), None)
    return None


def _is_weight(found: RemoteWeight | None) -> bool:
    return found is not None


def _called(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    how = WAYS.get(func)
    if how is not None:
        return how(func, args, kwargs)
    if blind(func):
        return plainly(func, args, kwargs)
    writes = "out" in kwargs and isinstance(kwargs["out"], RemoteWeight)
    raise refusal(func, find((args, kwargs)), writes)


def name_of(func: Function) -> str:
    """Of a function, or of the attribute that is read or set."""
    name = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def plainly(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of functions that look at no value."""
    with as_it_stands():
        return func(*args, **kwargs)


#: What graphs call for a lookup: of the model as it was before it was wrapped.
_OF_GRAPHS = frozenset({"embedding.default", "embedding_bag.padding_idx"})
#: What averages of weights do, other libraries' too, and no initialiser.
_AVERAGING = frozenset({"lerp", "lerp_", "_foreach_lerp", "_foreach_lerp_"})


def refusal(func: Function, weight: RemoteWeight, writes: bool = False) -> Exception:
    """The error for a function that needs rows, or that writes what servers cannot.

    Args:
        func: what was called.
        weight: that it was called on, or some of its rows.
        writes: it does, as its name does not say.
    """
    table = weight._cpudist_table
    name = name_of(func)
    writes = writes or is_in_place(name) or name in ("__setitem__", "data")
    if table.undecided:
        kind = UnsupportedModelError if writes else RemoteTableError
        return kind(
            f"{name} of the weight of an embedding of {table.rows} rows that is built "
            "in remote_tables(names=): whether a pattern fits it is decided when the "
            "context ends, and until then it is initialised as remote ones are. Build "
            "with min_rows= instead; or use it after the context; or build the model "
            "as it is and call cpudist.shard_tables(model, remote=[...])."
        )
    if name in _AVERAGING:
        return RemoteTableError(
            f"{name} on {table.describe()}: its rows are not here. {BY_THE_SERVERS}"
        )
    if writes:
        table.check_unwrapped(name)
        some = "" if weight._cpudist_rows is None else "rows of "
        return UnsupportedModelError(
            f"{name} on {some}{table.describe()} is no initialiser that servers can do "
            "by key: they do normal_, uniform_, fill_, zero_, mul_, add_, sub_, div_ "
            "by numbers, clamp_, erfinv_, and constants for single rows (and what "
            "torch.nn.init makes of these). For values of your own build the table as "
            "a static one and pass the model to cpudist.shard_tables(model, "
            "remote=[...]), which stores and frees it; or replace the initialiser: "
            "shard_tables(model, remote=[...], initial=cpudist.Normal(std=0.01))."
        )
    if name in _OF_GRAPHS:
        return graph_without_pull(table.name, True, "torch.export", "export")
    if name in ("embedding", "embedding_bag"):
        return _from_elsewhere(name, table) if table.wrapped else _untrained(weight)
    return RemoteTableError(
        f"{name} of the weight of {table.describe()}: its rows are not here. Look rows "
        "up through the nn.Embedding or nn.EmbeddingBag that has the weight, and take "
        f"penalties over the rows that were looked up. {BY_THE_SERVERS} Or keep the "
        "table on the trainers too (leave it out of remote_tables and shard_tables("
        "remote=))."
    )


def unreadable(func: Function, weight: RemoteWeight) -> RemoteTableError:
    """The error for a function that would copy rows into a tensor of this trainer."""
    return RemoteTableError(
        f"{name_of(func)} of the weight of {weight._cpudist_table.describe()} into "
        f"another: its rows are not here to be read. {ROWS_ELSEWHERE}"
    )


def _from_elsewhere(name: str, table: RemoteTable) -> RemoteTableError:
    """The error for a lookup of a table that an optimizer trains, past its modules."""
    return RemoteTableError(
        f"{name} of the weight of {table.describe()}, by torch's function or a module "
        "that is not in the model of its optimizer: its rows come by the nn.Embedding "
        "and nn.EmbeddingBag that were in the model when that was wrapped. Call one of "
        "these; give a module of yours the same parameter before wrapping "
        "(module.weight = other.weight)."
    )


def _untrained(weight: RemoteWeight) -> RemoteTableError:
    """The error for a lookup of a table that no optimizer trains."""
    table = weight._cpudist_table
    why = "its rows come from the servers."
    if isinstance(weight, nn.Parameter) and not weight.requires_grad:
        why += (
            " It is frozen (requires_grad=False), and servers have the rows of what an "
            "optimizer trains only: call weight.requires_grad_(True) before wrapping, "
            "in a parameter group with lr=0 where rows are to stay as they are."
        )
    if table.origin is not None and table.origin.wrapped:
        why += (
            f" It is a copy of {table.origin.describe()}, whose optimizer is open: "
            "rows that were trained are looked up in the original, and elsewhere after "
            "cpudist.export and cpudist.load_for_inference."
        )
    return RemoteTableError(
        f"{table.describe()} was looked up, but no DistributedOptimizer trains it: "
        f"{why} Wrap the optimizer that has its weight before the first lookup; a copy "
        "of a wrapped model, or one whose optimizer is closed, has none."
    )


# -- compiled code ---------------------------------------------------------------------


def _is_blind(func: Function) -> bool:
    return func not in WAYS and blind(func)
