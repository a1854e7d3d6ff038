# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a trainer knows of a table whose rows are on servers only."""

from __future__ import annotations

from dataclasses import replace

import torch

from torch_cpudist.errors import InvalidArgumentError, RemoteTableError
from torch_cpudist.settings.open_table import OpenTable
from torch_cpudist.tables.initial import Program, salt_of

# Tables of servers are numbered so far, and a trainer's addresses of float32.
_MOST_ROWS = 2**62
_MOST_ELEMENTS = 2**60
# What the weight of a table of any key says it has, as a tensor has to have a shape.
_NOMINAL_ROWS = 2**54

# In the metadata of a state_dict: the weights of a module that are not in it.
LEFT_OUT = "cpudist_remote"
#: Where rows that no state_dict has come from; ends a message.
ROWS_ELSEWHERE = (
    "Rows go from one model to another by snapshots (opt.resume, opt.load_snapshot), "
    "and to a process without servers by cpudist.export and cpudist.load_for_inference."
)


def nominal_rows(dim: int) -> int:
    """The rows that the weight of a table of any key says it has."""
    return min(_NOMINAL_ROWS, _MOST_ELEMENTS // dim)


def check_size(rows: int, dim: int) -> None:
    """Refuses what is larger than any table can be.

    Raises:
        InvalidArgumentError: it is.
    """
    if rows > _MOST_ROWS or rows * dim > _MOST_ELEMENTS:
        raise InvalidArgumentError(
            f"a remote table of {rows} rows of {dim}: rows may be at most 2**62, "
            "elements 2**60"
        )


class RemoteTable:
    """What is known here of a table whose rows are on servers only.

    Shared by the parameter and its aliases. Not thread-safe.

    Attributes:
        rows, dim: its shape.
        program: how rows begin.
        open: of a table of any int64 key, what it is told; ``None``: keys are rows.
        values: what they begin with instead, ``[rows, dim]``, until it was stored.
        name: in its model, once that is known.
        wrapped: whether an optimizer trains it now.
        stored: ``values`` went to servers, so that none are here to begin with again.
        exported: an export answers its lookups now.
        told: it was said that rows are in no ``state_dict()``.
        origin: of whose rows these are a copy; servers make rows by names, too.
        loaded: from what ``torch.save`` or pickle has saved.
        undecided: ``remote_tables(names=)`` has it, and knows no name of it yet.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        program: Program,
        values: torch.Tensor | None = None,
        open: OpenTable | None = None,
    ) -> None:
        """Describes a table.

        Raises:
            InvalidArgumentError: it is larger than any table can be.
        """
        check_size(rows, dim)
        self.rows = rows
        self.dim = dim
        self.program = program
        self.open = open
        self.values = values
        self.name = ""
        self.wrapped = False
        self.exported = False
        self.told = False
        self.stored = False
        self.undecided = False
        self.origin: RemoteTable | None = None
        self.loaded = False

    def copy(self) -> RemoteTable:
        """One of its own that begins alike."""
        made = RemoteTable(self.rows, self.dim, self.program, self.values, self.open)
        made.name, made.stored = self.name, self.stored
        made.undecided = self.undecided
        made.begin_as(self)
        return made

    def begin_as(self, other: RemoteTable) -> None:
        """Makes rows begin as those of another of this shape, which stays as it is."""
        self.program, self.values = other.program, other.values
        # What is stored needs no name, and would stay as long as this refers to it.
        self.origin = (other.origin or other) if other.values is None else None

    def seed_of(self, name: str) -> int:
        """The seed with which a table of this name begins as its origin does."""
        if self.origin is None or not self.origin.name:
            return self.program.seed
        return self.program.seed ^ salt_of(self.origin.name) ^ salt_of(name)

    def describe(self) -> str:
        """For messages: what it is."""
        named = f"table {self.name!r}" if self.name else "a table"
        size = "any key" if self.open is not None else f"{self.rows} rows"
        return f"{named} of {size} on the servers"

    def whose_rows(self) -> str:
        """For messages: whose optimizer has the rows that are not here."""
        if self.origin is None:
            if not self.loaded:
                return "an optimizer that is closed"
            return "the optimizer of the model that was saved, which this one is not"
        now = ", which is open" if self.origin.wrapped else ""
        return f"the optimizer of the model that this one is a copy of{now}"

    def check_unwrapped(self, what: str) -> None:
        """Refuses a write to what servers hold."""
        if self.wrapped:
            raise RemoteTableError(
                f"{what} on {self.describe()}, while an optimizer trains it: its rows "
                "are not here to be written. Initialise a model before wrapping its "
                "optimizer; close() the DistributedOptimizer to begin anew."
            )

    def free_values(self) -> None:
        """Lets go of what was stored on the servers."""
        self.stored = self.stored or self.values is not None
        self.values = None

    def begin_from(self, seed: int) -> None:
        """Notes the seed with which servers make rows by now."""
        self.program = replace(self.program, seed=seed)
        self.origin = None

    def begin_with(self, program: Program) -> None:
        """Replaces how rows begin."""
        if program.seed != self.program.seed:
            self.origin = None
        self.program = program
        self.values = None
        self.stored = False
