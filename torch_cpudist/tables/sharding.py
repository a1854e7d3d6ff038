# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Choosing which embeddings of a model that is built are tables, and which remote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from torch import nn

from torch_cpudist.errors import InvalidArgumentError, RemoteTableError
from torch_cpudist.log import logger
from torch_cpudist.tables.found import (
    FROZEN_OBSTACLE,
    cannot_be_table,
    obstacle,
    other_owner,
)
from torch_cpudist.tables.initial import Constant, Initial, Normal, Program, Uniform
from torch_cpudist.tables.local import EmbeddingModule, binding_of
from torch_cpudist.tables.remote import keep_out_of_state, matches
from torch_cpudist.tables.remote_table import RemoteTable, check_size
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
        initial: how rows of remote tables begin, for all or by pattern, of which the
            first that fits counts; in the place of what they hold or have recorded.

    Returns:
        The same model.

    Raises:
        InvalidArgumentError: ``min_rows`` is negative; a pattern fits no embedding;
            ``initial`` is none, is for no remote table, is never used as other patterns
            come before, or is missing on ``meta``. The model is as it was.
        UnsupportedModelError: an embedding that a pattern names cannot be remote; the
            model is as it was.
        RemoteTableError: its optimizer is wrapped; the model is as it was.
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
    chosen = [_choose(model, named, min_rows, asked) for named in shared.values()]
    asked.check_all_used()
    # Nothing is changed before all of it is known to be possible.
    for one in chosen:
        say(one.made())
    return model


@dataclass
class _Choice:
    """What becomes of one weight; nothing is changed before ``made`` is called.

    Attributes:
        modules: that have the weight.
        line: said of it, but of one that becomes remote now.
        is_table: whether it becomes a table, or is one.
        remote: the name of the weight in its model, where its rows go to the servers.
        initial: how rows begin instead of as they do.
    """

    modules: list[EmbeddingModule]
    line: str
    is_table: bool = False
    remote: str | None = None
    initial: Initial | None = None

    def made(self) -> str:
        """Changes the modules; what there is to say."""
        if self.is_table:
            for module in self.modules:
                module.sparse = True
        if self.remote is None:
            return self.line
        return f"{self.line}: {_make_remote(self.remote, self.modules, self.initial)}"


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
        self._begun: set[str] = set()
        # By pattern of ``initial``: a weight it fits, and what came before it.
        self._shadowed: dict[str, tuple[str, str]] = {}

    def named(self, names: Sequence[str]) -> bool:
        """Whether a pattern names one of these weights."""
        found = [p for p in self._patterns if any(matches(n, [p]) for n in names)]
        self._used |= set(found)
        return bool(found)

    def initial(self, names: Sequence[str]) -> Initial | None:
        """How rows of these weights are to begin, if anything was said."""
        first: str | None = None
        for pattern in self._initial:
            fits = [name for name in names if matches(name, [pattern])]
            if fits and first is None:
                first = pattern
                self._begun.add(pattern)
            elif fits and first is not None:
                self._shadowed.setdefault(pattern, (fits[0], first))
        return None if first is None else self._initial[first]

    def check_all_used(self) -> None:
        """Refuses patterns that meant nothing.

        Raises:
            InvalidArgumentError: names them.
        """
        for pattern in self._initial:
            if pattern in self._shadowed and pattern not in self._begun:
                name, first = self._shadowed[pattern]
                raise InvalidArgumentError(
                    f"shard_tables: initial of {pattern!r} is never used: {name!r}, "
                    f"which it fits, begins as {first!r} says, as does all else that "
                    "it fits. The first pattern that fits counts: put the narrower one "
                    "first, or leave one out."
                )
        asked = [p for p in self._patterns if p not in self._used]
        asked += [p for p in self._initial if p not in self._begun]
        if asked:
            raise InvalidArgumentError(
                f"shard_tables: {asked[0]!r} is no remote "
                "table of this model: no embedding is named so, or initial= is for "
                "one that is not remote. Patterns are of parameters or modules "
                "(model.named_modules()). Nothing was changed."
            )


def _choose(model: nn.Module, named: Named, min_rows: int, asked: _Asked) -> _Choice:
    """What becomes of one weight, of which nothing is changed yet.

    Raises:
        As ``shard_tables``.
    """
    names = ", ".join(repr(name) for name, _ in named)
    weights = [f"{name}.weight" if name else "weight" for name, _ in named]
    modules = [module for _, module in named]
    weight = modules[0].weight
    rows, dim = weight.shape
    is_named = asked.named(weights)
    already = any(module.sparse for module in modules) or is_remote(weight)
    remote = is_named or asked.all or is_remote(weight)
    found = next(filter(None, (obstacle(one, remote) for one in modules)), None)
    if found is None and remote and not weight.requires_grad:
        found = FROZEN_OBSTACLE
    if found is not None:
        if is_named:
            raise cannot_be_table(weights[0], *found)
        kept = "has sparse=True, which cannot train" if already else "stays dense"
        if found is FROZEN_OBSTACLE:
            kept = "stays as it is"
        return _Choice(modules, f"{names}: {kept}: {found[0]}")
    reason = None if already else _why_dense(model, modules, min_rows)
    if is_named and reason is not None and rows < min_rows:
        reason = _tied(model, modules)
    if reason is not None:
        if is_named:
            raise cannot_be_table(weights[0], reason, "Untie them.")
        return _Choice(modules, f"{names}: stays dense: {reason}")
    if remote:
        initial = asked.initial(weights)
        _check_remote(weights[0], modules, initial)
        return _Choice(modules, names, True, weights[0], initial)
    note = " (has sparse=True already)" if already else ""
    return _Choice(modules, f"{names}: table of {rows} rows, dim {dim}{note}", True)


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


def _check_remote(
    name: str, modules: list[EmbeddingModule], initial: Initial | None
) -> None:
    """Refuses a weight whose rows cannot go to the servers now."""
    weight = modules[0].weight
    if any(binding_of(module) is not None for module in modules):
        raise RemoteTableError(
            f"shard_tables: {name!r} is trained by a DistributedOptimizer "
            "already. Make tables remote before wrapping."
        )
    if is_remote(weight):
        return
    if initial is None and weight.is_meta:
        raise InvalidArgumentError(
            f"shard_tables: {name!r} is on meta, which keeps no initial values: "
            f"pass initial={{{name!r}: cpudist.Normal(...)}}, or build the model "
            "in cpudist.remote_tables(min_rows=...), which records its initialisers."
        )
    check_size(*weight.shape)


def _program(modules: list[EmbeddingModule], initial: Initial) -> Program:
    made = Program().then(initial.step)
    paddings = {module.padding_idx for module in modules} - {None}
    for padding in sorted(cast(set[int], paddings)):
        made = made.with_key(padding, 0.0)
    return made


def _make_remote(
    name: str, modules: list[EmbeddingModule], initial: Initial | None
) -> str:
    """Takes the rows out of a weight, unless that was done; what it is now."""
    weight = modules[0].weight
    program = None if initial is None else _program(modules, initial)
    if is_remote(weight):
        if program is not None:
            table_of(weight).begin_with(program)
        return table_of(weight).describe()
    rows, dim = weight.shape
    values = None
    if program is None:
        values = weight.detach().to("cpu").contiguous()
    table = RemoteTable(rows, dim, program or Program(), values)
    table.name = name
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
