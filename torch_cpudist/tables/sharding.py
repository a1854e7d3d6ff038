# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Choosing which embeddings of a model that is built are tables, and which remote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from torch import nn

from torch_cpudist.errors import InvalidArgumentError, RemoteTableError
from torch_cpudist.log import logger
from torch_cpudist.tables.found import cannot_be_table, obstacle, other_owner
from torch_cpudist.tables.initial import Constant, Initial, Normal, Program, Uniform
from torch_cpudist.tables.local import EmbeddingModule, binding_of
from torch_cpudist.tables.remote import keep_out_of_state, matches, watch_modules
from torch_cpudist.tables.remote_table import RemoteTable
from torch_cpudist.tables.remote_weight import (
    as_parameter,
    become_remote,
    is_remote,
    table_of,
    weight_of,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Named = list[tuple[str, EmbeddingModule]]


def shard_tables(
    model: ModuleT,
    min_rows: int = 10_000,
    report: Callable[[str], None] | None = None,
    *,
    remote: bool | Sequence[str] = False,
    initial: Initial | Mapping[str, Initial] | None = None,
) -> ModuleT:
    """Marks a model's large embeddings as tables, by setting ``sparse=True`` on them.

    Local, no messages. Call it before building the optimizer: torch's Adam and AdamW,
    say, refuse nothing at that point, but a table's optimizer must be one the servers
    run.

    With ``remote`` tables lose their rows here: see ``remote_tables``, which builds
    them so from the beginning. A weight that is filled is stored on the servers when
    its optimizer is wrapped, from trainer 0, and then freed (it is not until then); one
    on ``meta`` needs ``initial``.

    Args:
        model: changed in place.
        min_rows: embeddings with fewer rows stay dense, >= 0. One that is sparse
            already is a table whatever its size.
        report: called with one line per embedding found; default: the ``torch_cpudist``
            logger at ``info`` (``CPUDIST_LOG=info``).
        remote: ``True`` makes all tables remote; patterns (``fnmatch``) make those
            embeddings remote whose weight or module is named so, whatever their size.
        initial: how rows of remote tables begin, for all or by pattern; in the place of
            what they hold or have recorded.

    Returns:
        The same model.

    Raises:
        InvalidArgumentError: ``min_rows`` is negative; a pattern fits no embedding;
            ``initial`` is none, is for no remote table, or is missing on ``meta``.
        UnsupportedModelError: an embedding that a pattern names cannot be remote.
        RemoteTableError: its optimizer is wrapped.
    """
    if min_rows < 0:
        raise InvalidArgumentError(
            f"shard_tables: min_rows must be >= 0, got {min_rows}"
        )
    say = report if report is not None else logger.info
    asked = _Asked(remote, initial)
    shared: dict[int, Named] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            if module._parameters.get("weight") is None:
                say(
                    f"{name!r}: stays as it is: its weight is computed, not a parameter"
                )
                continue
            shared.setdefault(id(module.weight), []).append((name, module))
    for named in shared.values():
        say(_choose(model, named, min_rows, asked))
    asked.check_all_used()
    return model


class _Asked:
    """What was asked for about remote tables."""

    def __init__(
        self,
        remote: bool | Sequence[str],
        initial: Initial | Mapping[str, Initial] | None,
    ) -> None:
        if isinstance(remote, str) or not isinstance(remote, (bool, Sequence)):
            raise InvalidArgumentError(
                f"shard_tables: remote must be True, False or a sequence of patterns, "
                f"got {remote!r}"
            )
        self.all = remote is True
        self._patterns = [] if isinstance(remote, bool) else list(remote)
        given = initial if isinstance(initial, Mapping) else {"*": initial}
        self._initial = {} if initial is None else dict(given)
        for pattern, one in self._initial.items():
            if not isinstance(one, (Normal, Uniform, Constant)):
                raise InvalidArgumentError(
                    f"shard_tables: initial of {pattern!r} must be a cpudist.Normal, "
                    f"Uniform or Constant, got {one!r}"
                )
        self._used: set[str] = set()

    def named(self, names: Sequence[str]) -> bool:
        """Whether a pattern names one of these weights."""
        found = [p for p in self._patterns if any(matches(n, [p]) for n in names)]
        self._used |= set(found)
        return bool(found)

    def program(self, names: Sequence[str], padding: int | None) -> Program | None:
        """How rows of these weights are to begin, if anything was said."""
        for pattern, one in self._initial.items():
            if one is not None and any(matches(name, [pattern]) for name in names):
                self._used.add(f"initial:{pattern}")
                made = Program().then(one.step)
                if padding is not None:
                    made = made.with_rows(padding, padding + 1, 0.0)
                return made
        return None

    def check_all_used(self) -> None:
        """Refuses patterns that meant nothing.

        Raises:
            InvalidArgumentError: names them.
        """
        asked = [*self._patterns, *(f"initial:{p}" for p in self._initial)]
        unused = [one for one in asked if one not in self._used]
        if unused:
            raise InvalidArgumentError(
                f"shard_tables: {unused[0].removeprefix('initial:')!r} is no remote "
                "table of this model: no embedding is named so, or initial= is for "
                "one that is not remote. Patterns are of parameters or modules "
                "(model.named_modules())."
            )


def _choose(model: nn.Module, named: Named, min_rows: int, asked: _Asked) -> str:
    """Makes one weight a table, or leaves it; the line that says so."""
    names = ", ".join(repr(name) for name, _ in named)
    weights = [f"{name}.weight" if name else "weight" for name, _ in named]
    modules = [module for _, module in named]
    rows, dim = modules[0].weight.shape
    is_named = asked.named(weights)
    already = any(module.sparse for module in modules) or is_remote(modules[0].weight)
    remote = is_named or asked.all or is_remote(modules[0].weight)
    found = next(filter(None, (obstacle(one, remote) for one in modules)), None)
    if found is not None:
        if is_named:
            raise cannot_be_table(weights[0], *found)
        kept = "has sparse=True, which cannot train" if already else "stays dense"
        return f"{names}: {kept}: {found[0]}"
    reason = None if already else _why_dense(model, modules, min_rows)
    if is_named and reason is not None and rows < min_rows:
        reason = _tied(model, modules)
    if reason is not None:
        if is_named:
            raise cannot_be_table(weights[0], reason, "Untie them.")
        return f"{names}: stays dense: {reason}"
    for module in modules:
        module.sparse = True
    if remote:
        return f"{names}: {_make_remote(weights, modules, asked)}"
    note = " (has sparse=True already)" if already else ""
    return f"{names}: table of {rows} rows, dim {dim}{note}"


def _tied(model: nn.Module, modules: list[EmbeddingModule]) -> str | None:
    owner = other_owner(model, modules[0].weight)
    if owner is not None:
        return f"it is tied to {owner!r}, which gives it a dense gradient"
    return None


def _why_dense(
    model: nn.Module, modules: list[EmbeddingModule], min_rows: int
) -> str | None:
    """Says why modules of one weight, none of which is sparse yet, stay as they are."""
    weight = modules[0].weight
    if weight.shape[0] < min_rows:
        return f"{weight.shape[0]} rows are fewer than min_rows={min_rows}"
    return _tied(model, modules)


def _make_remote(
    weights: list[str], modules: list[EmbeddingModule], asked: _Asked
) -> str:
    """Takes the rows out of a weight, unless that was done; what it is now."""
    weight = modules[0].weight
    if any(binding_of(module) is not None for module in modules):
        raise RemoteTableError(
            f"shard_tables: {weights[0]!r} is trained by a DistributedOptimizer "
            "already. Make tables remote before wrapping."
        )
    program = asked.program(weights, modules[0].padding_idx)
    if is_remote(weight):
        if program is not None:
            table_of(weight).begin_with(program)
        return table_of(weight).describe()
    rows, dim = weight.shape
    if program is None and weight.is_meta:
        raise InvalidArgumentError(
            f"shard_tables: {weights[0]!r} is on meta, which keeps no initial values: "
            f"pass initial={{{weights[0]!r}: cpudist.Normal(...)}}, or build the model "
            "in cpudist.remote_tables(min_rows=...), which records its initialisers."
        )
    watch_modules()
    values = None
    if program is None:
        values = weight.detach().to("cpu").contiguous()
    table = RemoteTable(rows, dim, program or Program(), values)
    table.name = weights[0]
    if weight.is_meta:
        made = as_parameter(weight_of(table), weight.requires_grad)
        for module in modules:
            module.weight = made
    else:
        become_remote(cast(nn.Parameter, weight), table)
    for module in modules:
        keep_out_of_state(module)
    stored = "" if values is None else ", stored when its optimizer is wrapped"
    return f"{table.describe()}, dim {dim}{stored}"
