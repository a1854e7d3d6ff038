# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: every kind of entry, and how each is read
"""What a manifest consists of: tables, dense parameters, files, trainers.

Functions that read take what JSON had and its place, and raise ``Malformed``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.settings.admission import CountFilter, Probability
from torch_cpudist.settings.eviction import Evict
from torch_cpudist.settings.open_table import OpenTable
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.checked_json import (
    U32,
    Fields,
    Malformed,
    in_range,
    real,
)

#: Files have a checksum for each so many bytes.
CHUNK_BYTES = 256 * 1024
_MOST_TRAINERS = 65536


@dataclass(frozen=True)
class Version:
    """How far a parameter set was: updates, and the samples and steps behind them."""

    round: int = 0
    samples: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Rule:
    """An update rule: the core's name of it, and its options."""

    kind: str
    options: Mapping[str, float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class StateSlice:
    """Which elements of a row's ``state`` are one part of a table's optimizer state."""

    name: str
    begin: int
    elements: int


@dataclass(frozen=True)
class DenseState:
    """One part of the state of a dense parameter.

    In the ``state`` of a block the parts stand one after the other, each as long as the
    block, or, ``per_row``, as ``elements // row_width`` of it.
    """

    name: str
    per_row: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: of the parameter.
        rows: valid keys are 0 to rows - 1; which ones have a row, its files say. Of an
            open one it is nominal, and any int64 is a key.
        dim: elements of a row.
        remote: whether rows are on servers only.
        salt: spreads keys over buckets.
        seed: of ``initial``.
        initial: steps (name, a, b) that make rows which nobody has pushed or stored.
        overrides: (begin, end, value): rows that are constant; later ones win. Keys
            are unsigned here, and an end of 0 is 2^64.
        rule: its update rule.
        state: parts of the ``state`` of a row, without gaps.
        step: updates that the table had.
        open: of a table of any int64 key, what it was told; ``None``: keys are rows.
    """

    name: str
    rows: int
    dim: int
    remote: bool
    salt: int
    seed: int
    initial: tuple[tuple[str, float, float], ...]
    overrides: tuple[tuple[int, int, float], ...]
    rule: Rule
    state: tuple[StateSlice, ...]
    step: int
    open: OpenTable | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """As a parameter: rows and elements of a row."""
        return self.rows, self.dim

    @property
    def dtype(self) -> str:
        """That of all tables."""
        return "F32"

    @property
    def state_elements(self) -> int:
        """Elements of the state of a row."""
        return sum(part.elements for part in self.state)

    def keys_outside(self, keys: npt.NDArray[np.int64]) -> str:
        """What is wrong with keys that are none of it; empty if nothing is."""
        if self.open is not None or not len(keys):
            return ""
        if int(keys.min()) >= 0 and int(keys.max()) < self.rows:
            return ""
        return f"it has keys outside of 0 to {self.rows - 1}"


@dataclass(frozen=True)
class Block:
    """A run of a flattened dense parameter, in the dense file of the server it was on.

    Attributes:
        name: of its tensors there: ``NAME.weight``, ``NAME.state``, ``NAME.average``.
        offset: its first element.
        elements: how many.
        server: whose file has it.
        step: updates that it had.
    """

    name: str
    offset: int
    elements: int
    server: int
    step: int


@dataclass(frozen=True)
class Dense:
    """A dense parameter.

    Attributes:
        name: of the parameter.
        shape: its shape.
        dtype: ``"F32"`` or ``"F64"``.
        row_width: elements per row, for rules with state per row.
        rule: its update rule.
        state: parts of its state.
        blocks: by offset; they cover the parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    row_width: int
    rule: Rule
    state: tuple[DenseState, ...]
    blocks: tuple[Block, ...]

    @property
    def elements(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class File:
    """A file that a server wrote.

    Attributes:
        name: ``names.part_name`` says whose it is.
        bytes: its size.
        table: index of the table whose rows it has; ``None`` for dense blocks, and for
            keys that have gone.
        rows: how many; of keys that have gone, of all tables.
        crc32c: CRC-32C of every 256 KiB, the last of what is left.
    """

    name: str
    bytes: int
    table: int | None
    rows: int
    crc32c: tuple[int, ...]

    @property
    def gone(self) -> bool:
        """Whether it has keys that have gone."""
        part = names.part_name(self.name)
        return part is not None and part.gone


@dataclass(frozen=True)
class Base:
    """What a snapshot of changes is put over.

    Attributes:
        name: of that snapshot, in the same directory.
        crc32c: what its manifest ends in.
    """

    name: str
    crc32c: int


@dataclass(frozen=True)
class Trainer:
    """The file of a trainer's own state.

    Attributes:
        rank: whose.
        file: its name; JSON, which has size and checksum of its tensors' file inside.
        bytes: its size.
        crc32c: its CRC-32C.
        steps: that this trainer had made.
    """

    rank: int
    file: str
    bytes: int
    crc32c: int
    steps: int


def rule_json(rule: Rule) -> dict[str, Any]:
    """An update rule for JSON."""
    return {"kind": rule.kind, "options": dict(rule.options)}


def table_json(table: Table, opened: bool) -> dict[str, Any]:
    """A table for JSON.

    Args:
        table: it.
        opened: the format says of every table whether it is open.
    """
    return {
        **({"open": _open_json(table.open)} if opened else {}),
        "name": table.name,
        "rows": str(table.rows),
        "dim": table.dim,
        "remote": table.remote,
        "salt": f"{table.salt:016x}",
        "seed": str(table.seed),
        "initial": [list(step) for step in table.initial],
        "overrides": [[str(b), str(e), v] for b, e, v in table.overrides],
        "rule": rule_json(table.rule),
        "state": [vars(part) for part in table.state],
        "step": str(table.step),
    }


def _open_json(told: OpenTable | None) -> dict[str, Any] | None:
    if told is None:
        return None
    rows, evict = told.max_rows, told.eviction
    return {
        "unknown": told.unknown,
        "max_rows": None if rows is None else str(rows),
        "admission": _admission_json(told.admission),
        "eviction": None if evict is None else _eviction_json(evict),
    }


def _admission_json(told: CountFilter | Probability | None) -> dict[str, Any] | None:
    match told:
        case CountFilter(n, sketch_bytes):
            return {"kind": "count", "n": n, "sketch_bytes": str(sketch_bytes)}
        case Probability(p):
            return {"kind": "probability", "p": float(p)}
    return None


def _eviction_json(told: Evict) -> dict[str, Any]:
    given = {
        "unseen_steps": _long(told.unseen_steps),
        "unseen_s": None if told.unseen_s is None else float(told.unseen_s),
        "min_count": told.min_count,
        "max_rows": _long(told.max_rows),
    }
    return {"order": told.order, **given}


def _long(value: int | None) -> str | None:
    return None if value is None else str(value)


def block_json(block: Block) -> dict[str, Any]:
    """A block for JSON."""
    return {
        **vars(block),
        "offset": str(block.offset),
        "elements": str(block.elements),
        "step": str(block.step),
    }


def dense_json(dense: Dense) -> dict[str, Any]:
    """A dense parameter for JSON."""
    return {
        "name": dense.name,
        "shape": list(dense.shape),
        "dtype": dense.dtype,
        "row_width": dense.row_width,
        "rule": rule_json(dense.rule),
        "state": [vars(part) for part in dense.state],
        "blocks": [block_json(block) for block in dense.blocks],
    }


def read_version(value: Any, where: str) -> Version:
    """Reads a version."""
    fields = Fields(value, where)
    version = Version(
        fields.long("round"), fields.long("samples"), fields.long("steps")
    )
    fields.done()
    return version


def base_json(base: Base) -> dict[str, Any]:
    """A base for JSON."""
    return {"name": base.name, "crc32c": f"{base.crc32c:08x}"}


def read_base(value: Any, where: str) -> Base:
    """Reads what a snapshot is put over."""
    fields = Fields(value, where)
    base = Base(
        fields.text("name", names.SNAPSHOT),
        int(fields.text("crc32c", "[0-9a-f]{8}"), 16),
    )
    fields.done()
    return base


def read_trainer(value: Any, where: str) -> Trainer:
    """Reads the entry of a trainer."""
    fields = Fields(value, where)
    rank = fields.number("rank", most=_MOST_TRAINERS)
    trainer = Trainer(
        rank=rank,
        file=fields.text("file", names.trainer_name(rank).replace(".", r"\.")),
        bytes=fields.number("bytes", most=2**53),
        crc32c=int(fields.text("crc32c", "[0-9a-f]{8}"), 16),
        steps=fields.long("steps"),
    )
    fields.done()
    return trainer


def read_rule(value: Any, where: str) -> Rule:
    """Reads an update rule."""
    fields = Fields(value, where)
    options = fields.mapping("options")
    for name, option in options.items():
        if not isinstance(option, bool):
            real(option, f"{where}.options.{name}")
    rule = Rule(fields.text("kind"), options)
    fields.done()
    return rule


def read_slice(value: Any, where: str) -> StateSlice:
    """Reads a part of the state of rows."""
    fields = Fields(value, where)
    part = StateSlice(
        fields.text("name"), fields.number("begin"), fields.number("elements", least=1)
    )
    fields.done()
    return part


def _triple(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) != 3:
        raise Malformed(f"{where}: expected a list of three")
    return value


def read_step(value: Any, where: str) -> tuple[str, float, float]:
    """Reads a step of what rows begin with."""
    operation, a, b = _triple(value, where)
    if not isinstance(operation, str):
        raise Malformed(f"{where}: expected a text, found {operation!r}")
    return operation, real(a, where), real(b, where)


def read_override(value: Any, where: str) -> tuple[int, int, float]:
    """Reads a run of constant rows."""
    begin, end, constant = _triple(value, where)
    fields = Fields({"begin": begin, "end": end}, where)
    return fields.long("begin"), fields.long("end"), real(constant, where)


def _read_open(value: Any, where: str) -> OpenTable | None:
    """Reads what an open table was told."""
    if value is None:
        return None
    fields = Fields(value, where)
    try:
        told = OpenTable(
            fields.text("unknown"),
            fields.optional("max_rows", fields.long),
            _read_admission(fields.take("admission"), f"{where}.admission"),
            _read_eviction(fields.take("eviction"), f"{where}.eviction"),
        )
    except InvalidArgumentError as error:
        raise Malformed(f"{where}: {error}") from error
    fields.done()
    return told


def _read_admission(value: Any, where: str) -> CountFilter | Probability | None:
    if value is None:
        return None
    fields = Fields(value, where)
    told: CountFilter | Probability
    if fields.text("kind", "count|probability") == "count":
        told = CountFilter(fields.number("n"), fields.long("sketch_bytes"))
    else:
        told = Probability(fields.real("p"))
    fields.done()
    return told


def _read_eviction(value: Any, where: str) -> Evict | None:
    if value is None:
        return None
    fields = Fields(value, where)
    told = Evict(
        fields.optional("unseen_steps", fields.long),
        fields.optional("unseen_s", fields.real),
        fields.optional("min_count", fields.number),
        fields.optional("max_rows", fields.long),
        fields.text("order"),
    )
    fields.done()
    return told


def read_table(value: Any, where: str, opened: bool = False) -> Table:
    """Reads a table.

    Args:
        value: what JSON had.
        where: its place.
        opened: the format says of every table whether it is open.
    """
    fields = Fields(value, where)
    table = Table(
        open=_read_open(fields.take("open"), f"{where}.open") if opened else None,
        name=fields.text("name"),
        rows=fields.long("rows", most=2**62),
        dim=fields.number("dim", least=1),
        remote=fields.truth("remote"),
        salt=int(fields.text("salt", "[0-9a-f]{16}"), 16),
        seed=fields.long("seed"),
        initial=fields.each("initial", read_step),
        overrides=fields.each("overrides", read_override),
        rule=read_rule(fields.take("rule"), f"{where}.rule"),
        state=fields.each("state", read_slice),
        step=fields.long("step"),
    )
    fields.done()
    if table.open is not None and not table.remote:
        raise Malformed(f"{where}: is open, and not remote")
    if table.salt != names.table_salt(table.name):
        raise Malformed(f"{where}: salt {table.salt:016x} is not of {table.name!r}")
    at = 0
    for part in table.state:
        if part.begin != at:
            raise Malformed(f"{where}: state {part.name!r} does not begin at {at}")
        at += part.elements
    return table


def read_block(value: Any, where: str) -> Block:
    """Reads a block."""
    fields = Fields(value, where)
    block = Block(
        name=fields.text("name"),
        offset=fields.long("offset"),
        elements=fields.long("elements"),
        server=fields.number("server"),
        step=fields.long("step"),
    )
    fields.done()
    return block


def read_dense_state(value: Any, where: str) -> DenseState:
    """Reads a part of the state of a dense parameter."""
    fields = Fields(value, where)
    part = DenseState(fields.text("name"), fields.truth("per_row"))
    fields.done()
    return part


def read_dense(value: Any, where: str) -> Dense:
    """Reads a dense parameter, whose blocks have to cover it."""
    fields = Fields(value, where)
    dense = Dense(
        name=fields.text("name"),
        shape=fields.each("shape", lambda v, at: in_range(v, at, 0, 2**53)),
        dtype=fields.text("dtype", "F32|F64"),
        row_width=fields.number("row_width", least=1, most=2**53),
        rule=read_rule(fields.take("rule"), f"{where}.rule"),
        state=fields.each("state", read_dense_state),
        blocks=fields.each("blocks", read_block),
    )
    fields.done()
    at = 0
    for block in dense.blocks:
        if block.offset != at or block.elements % dense.row_width:
            raise Malformed(f"{where}: block {block.name!r} does not fit at {at}")
        at += block.elements
    if at != dense.elements:
        raise Malformed(f"{where}: blocks of {at} elements, it has {dense.elements}")
    return dense


def read_file(value: Any, where: str) -> File:
    """Reads the entry of a file, whose name has to fit."""
    fields = Fields(value, where)
    table = fields.take("table")
    file = File(
        name=fields.text("name"),
        bytes=fields.number("bytes", least=10, most=2**53),
        table=None if table is None else in_range(table, f"{where}.table", 0, U32),
        rows=fields.number("rows", most=2**53),
        crc32c=fields.each("crc32c", lambda v, at: in_range(v, at, 0, U32)),
    )
    fields.done()
    part = names.part_name(file.name)
    if part is None or part.table != file.table:
        raise Malformed(f"{where}: {file.name!r} is no name of a file of this table")
    if len(file.crc32c) != -(-file.bytes // CHUNK_BYTES):
        raise Malformed(f"{where}: {len(file.crc32c)} checksums for {file.bytes} bytes")
    return file
