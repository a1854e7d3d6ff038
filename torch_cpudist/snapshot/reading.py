# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A snapshot opened: rows by key, dense parameters, states of trainers, load plans.

One of changes is read together with the snapshots it is put over: the newest row of
each key counts.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torch_cpudist.errors import SnapshotError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.chain import chain_of
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.member import Member
from torch_cpudist.snapshot.merging import Layer
from torch_cpudist.snapshot.parts import Array, LoadRun

_FILE_SYSTEM = Files()


@dataclass(frozen=True)
class Rows:
    """Rows of a table by key.

    Attributes:
        found: bool ``[keys]``: whether the snapshot has a row of the key.
        columns: ``[keys, …]`` by name, zero where there is none: ``weight``,
            ``count``, ``last_seen``, and ``state`` and ``average`` where they are kept.
    """

    found: npt.NDArray[np.bool_]
    columns: Mapping[str, Array]


class Snapshot(Member):
    """A committed snapshot, for reading.

    Dense parameters and states of trainers are all its own. Thread safety: any number
    of threads.

    Args:
        path: its directory, beside those that it is put over.
        files: the file system.

    Attributes:
        members: itself, then what each is put over; the last one has all rows.

    Raises:
        SnapshotError: there is no snapshot, or it is of a later format.
        SnapshotCorruptError: its manifest is damaged, or that of one it needs.
    """

    def __init__(
        self, path: str | os.PathLike[str], files: Files = _FILE_SYSTEM
    ) -> None:
        folder = Path(path).expanduser().absolute()
        directory = Directory(folder.parent, files)
        own, *others = chain_of(directory.manifest(folder.name), directory.manifest)
        super().__init__(folder, own, files)
        self.members: tuple[Member, ...] = (
            self,
            *(Member(directory.folder(one.name), one, files) for one in others),
        )

    def forget(self) -> None:
        """Lets go of all files; those that are used again are opened and checked anew.

        Arrays that were given out keep what they need.
        """
        super().forget()
        for member in self.members[1:]:
            member.forget()

    def layers(self, table: str) -> list[Layer]:
        """A table as ``merging.merged`` wants it: the oldest member first.

        Raises:
            SnapshotError: there is no such table.
            SnapshotCorruptError: a file is not as it was written.
        """
        return [
            Layer(list(member.parts(table)), member.gone(table))
            for member in reversed(self.members)
        ]

    def rows(self, table: str, keys: npt.ArrayLike) -> Rows:
        """Looks rows up.

        Args:
            table: its name.
            keys: int64 ``[keys]``.

        Raises:
            SnapshotError: there is no such table.
            SnapshotCorruptError: a chunk that is needed is not as it was written.

        Cost: a few pages of each of the table's files for each key.
        """
        wanted = np.asarray(keys, dtype=np.int64).reshape(-1)
        found = np.zeros(len(wanted), dtype=np.bool_)
        open_ones = np.ones(len(wanted), dtype=np.bool_)
        columns: dict[str, Array] = {}
        for member in self.members:
            asked = np.flatnonzero(open_ones)
            for part in member.parts(table):
                places = part.find(wanted[asked])
                for name in part.columns[1:]:
                    column = part.column(name, 0, 0)
                    if name not in columns:
                        shape = (len(wanted), *column.shape[1:])
                        columns[name] = np.zeros(shape, dtype=column.dtype)
                    for i in np.flatnonzero(places >= 0):
                        row = int(places[i])
                        columns[name][asked[i]] = part.column(name, row, row + 1)[0]
                found[asked[places >= 0]] = True
            open_ones &= ~found & ~np.isin(wanted, member.gone(table))
        return Rows(found, columns)

    def load_plan(self, table: str, server: int, servers: int) -> list[LoadRun]:
        """Which rows of which files one of several servers is to load, in this order.

        However many servers there were: owners follow from buckets alone. Rows of newer
        members come behind those that they replace; rows that have gone are left out.

        Args:
            table: its name.
            server: which one, from 0.
            servers: how many there are now.

        Raises:
            SnapshotError: there is no such table.
            SnapshotCorruptError: a header, or where its buckets begin, is damaged. The
                rows themselves are checked by who loads them.
        """
        buckets = names.server_buckets(server, servers)
        gone = np.empty(0, np.int64)
        by_member = []
        for member in self.members:
            by_member.append(
                [
                    run
                    for part in member.parts(table)
                    for run in part.load_runs(buckets, gone)
                ]
            )
            gone = np.union1d(gone, member.gone(table))
        return [run for runs in reversed(by_member) for run in runs]

    def verify(self, tables: Container[str] | None = None) -> list[SnapshotError]:
        """Reads and checks every byte of all members, and that rows are in their place.

        Args:
            tables: names of those whose rows are checked; ``None``: of all. The rest of
                the snapshot is checked in any case.

        Returns:
            What is wrong, a file each; empty if nothing is.
        """
        return [one for member in self.members for one in member.verify_own(tables)]
