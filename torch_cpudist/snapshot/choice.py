# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one decision, and the words that tell of it
"""What of a snapshot goes where in a model: by names, shapes and rules.

Decided from the manifest alone, before anything is changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch_cpudist.errors import InvalidArgumentError, SnapshotError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.manifest import Dense, Manifest, Table

_PATTERN = frozenset("*?[")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Begins:
    """What rows of a remote table begin with, as a manifest has it.

    Attributes:
        initial, overrides, seed: see ``manifest.Table``.
    """

    initial: tuple[tuple[str, float, float], ...]
    overrides: tuple[tuple[int, int, float], ...]
    seed: int


@dataclass(frozen=True)
class Target:
    """A table or dense parameter of a model.

    Attributes:
        name: of the parameter.
        table: whether it is a table; else dense.
        shape: of a table rows and elements of a row.
        state: parts of its optimizer state, as a manifest has them; ``None`` where
            torch keeps it, and trainers' own files have it.
        rule: the kind of its update rule.
        begins: of a remote table, what rows begin with that are not there.
        dtype: of a dense parameter, as a manifest has it.
        open: it is a table of which any int64 is a key.
    """

    name: str
    table: bool
    shape: tuple[int, ...]
    state: tuple[Any, ...] | None
    rule: str
    begins: Begins | None = None
    dtype: str = "F32"
    open: bool = False


@dataclass(frozen=True)
class Taken:
    """What a table or dense parameter of a model gets.

    Attributes:
        name: in the model.
        source: in the snapshot.
        table: whether it is a table.
        state: whether its optimizer state is taken, too.
        rows: of a table, how many the snapshot has; ``None`` where it is put over
            another one, so that only reading both would tell.
        rule: in the snapshot.
        left: what of it is not as in the snapshot, as a sentence's end.
        seed: of a remote table, of what rows begin with from then on.
        crosses: it is a table of what was a dense parameter, or the other way round.
    """

    name: str
    source: str
    table: bool
    state: bool
    rows: int | None = 0
    rule: str = ""
    left: str = ""
    seed: int = 0
    crosses: bool = False

    def line(self) -> str:
        """As a sentence; empty for what needs none: a dense parameter as it was."""
        what = f"{'table' if self.table else 'parameter'} {self.name!r}"
        count = "its" if self.rows is None else self.rows
        told = f"{what}: {count} rows" if self.table else what
        if self.source != self.name:
            told += f" from {self.source!r}"
        parts = [told]
        if not self.state:
            whose = "their" if self.table else "its"
            parts.append(
                f"without {whose} optimizer state, which is of {self.rule} and begins "
                "anew"
            )
        if self.left:
            parts.append(self.left)
        plain = self.source == self.name and len(parts) == 1 and not self.table
        return "" if plain else ", ".join(parts)


@dataclass(frozen=True)
class Plan:
    """What is taken from a snapshot.

    Attributes:
        whole: the run goes back to the snapshot: its counters, its version and what
            trainers keep for themselves are taken, too. Else values are.
        taken: by name in the model.
        missing: why not, of the others that were asked for, by name in the model.
        unused: what of the snapshot goes nowhere.
    """

    whole: bool
    taken: Mapping[str, Taken]
    missing: Mapping[str, str]
    unused: tuple[str, ...]

    def warnings(self) -> list[str]:
        """What was not taken, of the values themselves or beside them."""
        parts = [one for one in self.taken.values() if one.left or not one.state]
        return [*(one.line() for one in parts), *self.missing.values()]

    def lines(self) -> list[str]:
        """What was and what was not taken, as sentences."""
        told = [one.line() for one in self.taken.values()]
        told += self.missing.values()
        if self.whole:
            told += [
                f"{name!r} of the snapshot is not in the model" for name in self.unused
            ]
        return [line for line in told if line]


@dataclass(frozen=True)
class Choice:
    """What a caller asks for.

    Attributes:
        only: names in the model, or patterns of them; ``None``: all, and the run with
            them.
        renamed: names in the model by names in the snapshot; both with a dot at the
            end: of all names that begin so.
    """

    only: tuple[str, ...] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, only: Any, renamed: Any) -> Choice:
        """Checks the arguments of ``load_snapshot``.

        Raises:
            InvalidArgumentError: they are none such.
        """
        if only is not None:
            listed = isinstance(only, Sequence) and not isinstance(only, (str, bytes))
            if not listed or not all(isinstance(one, str) for one in only):
                raise InvalidArgumentError(
                    f"load_snapshot: only={only!r}, expected a list of names of the "
                    "model's parameters, or of patterns such as 'users.*'"
                )
            if not only:
                raise InvalidArgumentError(
                    "load_snapshot: only=[] would take nothing; leave it out for all"
                )
        if renamed is None:
            renamed = {}
        texts = isinstance(renamed, Mapping) and all(
            isinstance(one, str) and one for pair in renamed.items() for one in pair
        )
        if not texts:
            raise InvalidArgumentError(
                f"load_snapshot: map={renamed!r}, expected names in the model by names "
                "in the snapshot, as in {'old': 'new'}"
            )
        for old, new in renamed.items():
            if old.endswith(".") != new.endswith("."):
                raise InvalidArgumentError(
                    f"load_snapshot: map={{{old!r}: {new!r}}}: a name that ends in a "
                    "dot is of all names that begin so: both have to end in one, or "
                    "neither"
                )
        return cls(None if only is None else tuple(only), dict(renamed))

    def plan(self, manifest: Manifest, targets: Sequence[Target]) -> Plan:
        """Decides what is taken.

        Args:
            manifest: of the snapshot.
            targets: tables and dense parameters of the model.

        Raises:
            SnapshotError: nothing fits, or something that was asked for by its name is
                not there, or of another shape.
        """
        saved: dict[str, Table | Dense] = {one.name: one for one in manifest.tables}
        saved |= {one.name: one for one in manifest.dense}
        own = {target.name: target for target in targets}
        sources = self._sources(manifest.name, saved, own)
        asked = self._asked(own)
        taken: dict[str, Taken] = {}
        missing: dict[str, str] = {}
        for name in asked:
            found = _fit(own[name], sources.get(name), saved, manifest)
            if isinstance(found, Taken):
                taken[name] = found
            else:
                missing[name] = found
        named = {*(self.only or ()), *self.renamed.values()} & missing.keys()
        if named:
            raise SnapshotError(
                f"snapshot {manifest.name}: "
                + "; ".join(missing[name] for name in sorted(named))
                + ". They were asked for by name; nothing was changed."
            )
        if asked and not taken:
            raise SnapshotError(
                f"snapshot {manifest.name} has nothing of this model: it has tables "
                f"{sorted(one.name for one in manifest.tables)} and dense parameters "
                f"{sorted(one.name for one in manifest.dense)}, the model has "
                f"{sorted(own)}. Nothing was changed."
            )
        used = {one.source for one in taken.values()}
        unused = tuple(name for name in saved if name not in used)
        return Plan(self.only is None, taken, missing, unused)

    def kept(self, saved: Mapping[str, _Value]) -> dict[str, _Value]:
        """What of values by their names in the snapshot is asked for, renamed."""
        given: dict[str, str] = {}
        for old, new in self.renamed.items():
            for one in saved:
                if one == old or (old.endswith(".") and one.startswith(old)):
                    given.setdefault(new + one[len(old) :], one)
        sources = _with_the_others(saved, given)
        return {
            new: saved[source]
            for new, source in sources.items()
            if self.only is None or any(_matches(new, one) for one in self.only)
        }

    def _asked(self, own: Mapping[str, Target]) -> list[str]:
        """Names in the model, in its order."""
        if self.only is None:
            return list(own)
        chosen: set[str] = set()
        for pattern in self.only:
            found = [name for name in own if _matches(name, pattern)]
            if not found:
                raise SnapshotError(
                    f"only={pattern!r}: no parameter of the model has such a name"
                    f"{_close(pattern, own)}. Nothing was changed."
                )
            chosen.update(found)
        return [name for name in own if name in chosen]

    def _sources(
        self, name: str, saved: Iterable[str], own: Iterable[str]
    ) -> dict[str, str]:
        """Names in the snapshot by names in the model."""
        saved, own = list(saved), set(own)
        found = {one: one for one in saved}
        given: dict[str, str] = {}
        for old, new in self.renamed.items():
            prefix = old.endswith(".")
            olds = [one for one in saved if one.startswith(old)] if prefix else [old]
            pairs = {one: new + one[len(old) :] for one in olds if one in found}
            if not pairs:
                raise SnapshotError(
                    f"map={{{old!r}: {new!r}}}: snapshot {name} has no such name"
                    f"{_close(old, saved)}. A name of the snapshot stands in front of "
                    "one of the model. Nothing was changed."
                )
            if not own & set(pairs.values()):
                raise SnapshotError(
                    f"map={{{old!r}: {new!r}}}: the model has no such parameter"
                    f"{_close(new, own)}. A name of the snapshot stands in front of "
                    "one of the model. Nothing was changed."
                )
            for one, target in pairs.items():
                if given.get(target, one) != one:
                    raise SnapshotError(
                        f"map: both {given[target]!r} and {one!r} of snapshot {name} "
                        f"are to become {target!r}. Nothing was changed."
                    )
                given[target] = one
        return _with_the_others(saved, given)


def _with_the_others(saved: Iterable[str], given: Mapping[str, str]) -> dict[str, str]:
    """Names in the snapshot by names in the model: renamed ones, and all not there."""
    moved = set(given.values())
    kept = {one: one for one in saved if one not in moved and one not in given}
    return kept | dict(given)


def _matches(name: str, pattern: str) -> bool:
    if name == pattern:
        return True
    return not _PATTERN.isdisjoint(pattern) and fnmatchcase(name, pattern)


def _close(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), 3)
    return f" (there are {', '.join(map(repr, found))})" if found else ""


def _fit(
    target: Target,
    source: str | None,
    saved: Mapping[str, Table | Dense],
    manifest: Manifest,
) -> Taken | str:
    """What a target gets from what has its name, or why it gets nothing."""
    what = f"{'table' if target.table else 'parameter'} {target.name!r}"
    found = None if source is None else saved.get(source)
    if source is None or found is None:
        return f"{what} is not in the snapshot and stays as it is"
    if source != target.name:
        what += f" from {source!r}"
    if isinstance(found, Table) != target.table:
        return _crossed(target, found, what)
    if not isinstance(found, Table):
        if found.shape != target.shape:
            return (
                f"{what} was {list(found.shape)}, is {list(target.shape)}: it stays as "
                "it is"
            )
        fits = target.rule == found.rule.kind and target.state in (None, found.state)
        left = ""
        if found.dtype != target.dtype:
            left = f"as {target.dtype}, and was {found.dtype}"
        return Taken(target.name, source, False, fits, rule=found.rule.kind, left=left)
    rows, dim = target.shape
    grown = found.rows <= rows and found.open is None
    if found.dim != dim or not (target.open or grown):
        return (
            f"{what} was {'of any key' if found.open else f'{found.rows} rows'} of "
            f"{found.dim}, is {'of any key' if target.open else rows} of {dim}: it "
            "stays as it is"
        )
    seed, left = _begun(target, found)
    return Taken(
        target.name,
        source,
        True,
        target.state == found.state,
        _rows_of(manifest, source),
        found.rule.kind,
        left,
        seed,
    )


def _rows_of(manifest: Manifest, table: str) -> int | None:
    if manifest.base is not None:
        return None
    return sum(f.rows for f in manifest.table_files(manifest.table_index(table)))


def _crossed(target: Target, found: Table | Dense, what: str) -> Taken | str:
    """What a table gets from a dense parameter, or the other way round."""
    kind, shape = "dense parameter", tuple(found.shape)
    if isinstance(found, Table):
        kind = "table"
    if shape != target.shape or (target.table and found.dtype != "F32"):
        return (
            f"{what} was a {kind}, {list(shape)} of {found.dtype}, is "
            f"{list(target.shape)} of {target.dtype}: it stays as it is"
        )
    seed = 0 if target.begins is None else target.begins.seed
    return Taken(
        target.name,
        found.name,
        target.table,
        False,
        target.shape[0],
        found.rule.kind,
        f"from a {kind}",
        seed,
        True,
    )


def _begun(target: Target, found: Table) -> tuple[int, str]:
    """How rows of a table begin that are not in its files, and what is other then."""
    begins, rows = target.begins, target.shape[0]
    grown = "stay as they are" if begins is None else "begin anew"
    left = []
    if found.rows < rows and found.open is None and not target.open:
        left.append(f"rows from {found.rows} on are not in it and {grown}")
    if begins is None or not found.remote:
        return (0 if begins is None else begins.seed), ", ".join(left)
    if (begins.initial, begins.overrides) != (found.initial, found.overrides):
        left.append("rows that nobody had trained begin as this model says")
        return begins.seed, ", ".join(left)
    # A row depends on the salt too, which another name changes.
    seed = found.seed ^ found.salt ^ names.table_salt(target.name)
    return seed, ", ".join(left)
