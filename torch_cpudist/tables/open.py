# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Embeddings without a vocabulary: remote tables of which any int64 is a key."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from torch_cpudist.errors import InvalidArgumentError, UnsupportedModelError
from torch_cpudist.settings.admission import Admission, is_whole
from torch_cpudist.settings.eviction import Evict
from torch_cpudist.settings.open_table import OpenTable
from torch_cpudist.tables.initial import (
    Constant,
    Initial,
    Normal,
    Program,
    Uniform,
    drawn_seed,
)
from torch_cpudist.tables.remote_table import RemoteTable, nominal_rows
from torch_cpudist.tables.remote_weight import RemoteWeight, table_of, weight_of

_MODES = ("sum", "mean", "max")
# As far as servers go.
_MOST_DIM = 2**16


class Embedding(nn.Embedding):
    """An embedding of any int64 key, whose rows are on the servers only.

    A remote table (see ``remote_tables``) that needs no vocabulary: every int64 is a
    key, negative ones too, ``hash_keys`` makes them of texts and numbers, and a row
    comes into being with its key's first gradient that ``admission`` lets through.
    Everything else is as with ``nn.Embedding`` and remote tables: look rows up once the
    optimizer is wrapped (or an export is loaded); two modules may share the weight.
    ``num_embeddings`` is nominal.

    Args:
        dim: elements of a row.
        padding_key: reads zeros and has no gradient, as ``padding_idx``.
        initial: how rows begin: a ``Normal``, ``Uniform`` or ``Constant``.
        admission: which keys get a row: a ``CountFilter`` or ``Probability``; default:
            each that has a gradient.
        eviction: which rows go again; default: none.
        unknown: what a key without a row reads: ``"initial"``, the value that its row
            begins with, or ``"zeros"``. Its row begins with the initial value anyway.
        max_rows: of the table, over all servers, each of which takes its share. An
            update that would make more raises ``TableFullError`` out of the step of who
            has pushed it, under Sync on all trainers, and nothing of it is applied on
            that server. Under Sync with several servers others have applied theirs:
            the next step raises ``ClosedError``, and the run goes on from a snapshot.
            ``Evict(max_rows=)`` evicts others instead.
        seed: of what rows begin with; default: drawn from torch's default generator,
            as initialisers are. That of trainer 0 counts.

    Raises:
        InvalidArgumentError: an argument is out of range, or two exclude each other.

    Cost: on trainers the memory of one row, and of the rows of the open step; on
    servers of the rows that exist (docs/tables.md has the formula).
    """

    def __init__(
        self,
        dim: int,
        *,
        padding_key: int | None = None,
        initial: Initial = Normal(),  # noqa: B008  frozen
        admission: Admission | None = None,
        eviction: Evict | None = None,
        unknown: str = "initial",
        max_rows: int | None = None,
        seed: int | None = None,
    ) -> None:
        """See the class."""
        weight = _weight(
            "Embedding",
            dim,
            padding_key,
            initial,
            (unknown, max_rows, admission, eviction),
            seed,
        )
        super().__init__(weight.shape[0], dim, sparse=True, _weight=weight)
        # Not through torch, which takes it for a place in the shape.
        self.padding_idx = padding_key

    def extra_repr(self) -> str:
        """What it was built with."""
        return _shown(self)

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuses rows from here.

        Raises:
            UnsupportedModelError: always.
        """
        raise _not_pretrained(cls)


class EmbeddingBag(nn.EmbeddingBag):
    """Bags of any int64 keys, whose rows are on the servers only.

    As ``Embedding``; its forward takes ids, offsets and ``per_sample_weights`` as
    ``nn.EmbeddingBag`` does.

    Args:
        dim: elements of a row.
        mode: how rows of a bag become one: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: ``offsets`` have the number of ids at their end.
        padding_key: is left out of bags, as ``padding_idx``.
        initial: see ``Embedding``, as all that follows.
        admission: which keys get a row.
        eviction: which rows go again.
        unknown: what a key without a row reads.
        max_rows: of the table.
        seed: of what rows begin with.

    Raises:
        InvalidArgumentError: an argument is out of range, or two exclude each other.
    """

    def __init__(
        self,
        dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_key: int | None = None,
        initial: Initial = Normal(),  # noqa: B008  frozen
        admission: Admission | None = None,
        eviction: Evict | None = None,
        unknown: str = "initial",
        max_rows: int | None = None,
        seed: int | None = None,
    ) -> None:
        """See the class."""
        if mode not in _MODES:
            raise InvalidArgumentError(
                f"EmbeddingBag: mode must be one of {', '.join(_MODES)}, got {mode!r}"
            )
        weight = _weight(
            "EmbeddingBag",
            dim,
            padding_key,
            initial,
            (unknown, max_rows, admission, eviction),
            seed,
        )
        super().__init__(
            weight.shape[0],
            dim,
            mode=mode,
            sparse=True,
            _weight=weight,
            include_last_offset=include_last_offset,
        )
        self.padding_idx = padding_key

    def extra_repr(self) -> str:
        """What it was built with."""
        return f"{_shown(self)}, mode={self.mode!r}"

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuses rows from here.

        Raises:
            UnsupportedModelError: always.
        """
        raise _not_pretrained(cls)


_Told = tuple[str, int | None, Admission | None, Evict | None]


def _weight(
    what: str,
    dim: int,
    padding_key: int | None,
    initial: Initial,
    told: _Told,
    seed: int | None,
) -> RemoteWeight:
    """The weight of a table of any key.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """
    if not is_whole(dim) or not 1 <= dim <= _MOST_DIM:
        raise InvalidArgumentError(
            f"{what}: dim must be a whole number from 1 to 65536, got {dim!r}. A table "
            "of any key has no number of rows to be given."
        )
    if padding_key is not None and not (
        is_whole(padding_key) and -(2**63) <= padding_key < 2**63
    ):
        raise InvalidArgumentError(
            f"{what}: padding_key must be an int64, got {padding_key!r}"
        )
    if not isinstance(initial, (Normal, Uniform, Constant)):
        raise InvalidArgumentError(
            f"{what}: initial must be a cpudist.Normal, Uniform or Constant, got "
            f"{initial!r}"
        )
    if seed is not None and not (is_whole(seed) and 0 <= seed < 2**64):
        raise InvalidArgumentError(f"{what}: seed must be 0 to 2**64 - 1, got {seed!r}")
    try:
        opened = OpenTable(*told)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{what}: {error}") from None
    program = Program((initial.step,), (), drawn_seed() if seed is None else seed)
    if padding_key is not None:
        program = program.with_key(padding_key, 0.0)
    return weight_of(RemoteTable(nominal_rows(dim), dim, program, open=opened))


def _shown(module: nn.Embedding | nn.EmbeddingBag) -> str:
    shown = [str(module.embedding_dim), "any key"]
    if module.padding_idx is not None:
        shown.append(f"padding_key={module.padding_idx}")
    opened = table_of(module.weight).open
    if opened is not None:
        plain = OpenTable()
        shown += [
            f"{name}={value!r}"
            for name, value in vars(opened).items()
            if value != getattr(plain, name)
        ]
    return ", ".join(shown)


def _not_pretrained(kind: type) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{kind.__name__}.from_pretrained: rows of a table of any key are on the "
        "servers only. Train an nn.Embedding.from_pretrained that "
        "cpudist.shard_tables(model, remote=[...]) makes remote, and save it: "
        "opt.load_snapshot takes its rows into this one."
    )
