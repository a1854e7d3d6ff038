# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which snapshots one consists of: itself, its base, and so on to one with all rows.

A base is named with the checksum that its manifest ends in, so that another snapshot
of that name is not taken for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.settings.open_table import OpenTable
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.manifest import Manifest, Rule, Table


class Broken(SnapshotCorruptError):
    """A chain is not whole.

    Attributes:
        members: names of those that were found, the newest first.
    """

    def __init__(self, message: str, file: str, members: tuple[str, ...]) -> None:
        """Of ``file``, of the snapshot behind ``members``."""
        super().__init__(message, file)
        self.members = members


def chain_of(newest: Manifest, read: Callable[[str], Manifest]) -> tuple[Manifest, ...]:
    """Follows a snapshot to one that has all rows.

    Args:
        newest: where to begin.
        read: the manifest of a snapshot by its name; raises ``SnapshotError``.

    Returns:
        The manifests of all members, the newest first.

    Raises:
        SnapshotCorruptError: one is missing, damaged, or not the one that was meant.
    """
    members = [newest]
    while (base := members[-1].base) is not None:
        above = members[-1]

        def broken(why: str, above: Manifest = above) -> Broken:
            name = "" if above.base is None else above.base.name
            return Broken(
                f"snapshot {newest.name} cannot be read: it is put over {name}, whose "
                f"{names.MANIFEST} {why}. Take another snapshot, or bring {name} back "
                "from a copy.",
                f"{name}/{names.MANIFEST}",
                tuple(one.name for one in members),
            )

        try:
            found = read(base.name)
        except SnapshotError as error:
            raise broken(f"cannot be read ({error})") from error
        if found.crc32c != base.crc32c:
            raise broken(
                f"ends in the checksum {found.crc32c:08x}, expected "
                f"{base.crc32c:08x}: it is of another snapshot of that name"
            )
        if why := _unlike(above, found):
            raise broken(why)
        members.append(found)
    return tuple(members)


def _unlike(above: Manifest, base: Manifest) -> str:
    """Why one cannot be put over the other; empty if it can."""
    if above.param_set != base.param_set:
        return f"is of optimizer {base.param_set}, expected {above.param_set}"
    if not (base.commit < above.commit and base.number < above.number):
        return f"is not older: commit {base.commit}, number {base.number}"
    if above.average_decay != base.average_decay:
        return f"has averages of decay {base.average_decay}"
    tables, below = (list(map(_lasting, one.tables)) for one in (above, base))
    return "" if tables == below else "has other tables"


def _lasting(table: Table) -> Table:
    """A table without what may change between two snapshots: options, as the rate."""
    opened = None if table.open is None else OpenTable()
    rule = Rule(table.rule.kind)
    return dataclasses.replace(table, step=0, rule=rule, open=opened)


@dataclass(frozen=True)
class Found:
    """A snapshot that was committed.

    Attributes:
        name: of its directory.
        manifest: what it consists of; ``None`` if that file is damaged.
        damage: why it cannot be read: that, or what its chain lacks.
        members: the snapshots that it needs, itself first, then the base of each; of a
            broken chain those that are there.
    """

    name: str
    manifest: Manifest | None
    damage: SnapshotError | None = None
    members: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[int, int, bool]:
        """Sorts by when they were committed.

        One that was put together from a chain is of the same moment as its newest
        member, and stands before it.
        """
        manifest = self.manifest
        if manifest is None:
            return (0, 0, False)
        return (manifest.commit, manifest.number, manifest.base is None)


def arranged(
    manifests: Mapping[str, Manifest],
    damaged: Sequence[Found],
    param_set: int | None = None,
) -> list[Found]:
    """Snapshots of one place, the newest first, and those that cannot be read behind.

    Args:
        manifests: that can be read, by name.
        damaged: the others.
        param_set: those of one of the run's optimizers; damaged ones may be of any.
    """
    broken_off = {one.name: one.damage for one in damaged}

    def read(name: str) -> Manifest:
        if name in manifests:
            return manifests[name]
        raise broken_off.get(name) or SnapshotError("it is not there")

    whole, broken = [], []
    for name, manifest in manifests.items():
        if param_set is not None and manifest.param_set != param_set:
            continue
        try:
            chain = chain_of(manifest, read)
        except Broken as error:
            broken.append(Found(name, manifest, error, error.members))
        else:
            members = tuple(one.name for one in chain)
            whole.append(Found(name, manifest, None, members))
    for found in (whole, broken):
        found.sort(key=lambda one: one.order, reverse=True)
    return [*whole, *broken, *damaged]


def unreadable(there: Sequence[Found]) -> list[Found]:
    """Those whose manifest the file system does not let be read: it may be whole."""
    return [
        one
        for one in there
        if one.manifest is None
        and one.damage is not None
        and isinstance(one.damage.__cause__, OSError)
    ]


def _may_be_below(name: str, above: str) -> bool:
    """Whether one may be what another one is put over, by their names alone.

    Those with a name of the user's have all rows. What was made here is put over what
    the same run has committed before.
    """
    number, limit = names.number_of(name), names.number_of(above)
    if number is None or limit is None:
        return False
    return number < limit and names.same_origin(name, above)


def superfluous(
    there: Sequence[Found], count: int, spared: Collection[str] = ()
) -> list[str]:
    """Which snapshots go where the newest ``count`` stay, and what they are put over.

    Those that cannot be read do not count, and those that a user named neither count
    nor go. Where the file system does not let a manifest be read, what that one is put
    over is not known: older ones of its run stay, as only those may be it.

    Args:
        there: those of one optimizer.
        count: at least 1.
        spared: names of others that stay.

    Returns:
        Names; a base behind all that is put over it.
    """
    found = [one for one in there if one.manifest is not None]
    made_here = [one for one in found if names.number_of(one.name) is not None]
    kept = [one for one in made_here if one.damage is None][: max(count, 1)]
    # What cannot be read may be brought back, if it is newer than what stays.
    limit = kept[-1].order if len(kept) == max(count, 1) else (0, 0, False)
    staying = [*kept, *(one for one in found if one not in made_here)]
    staying += [one for one in made_here if one.damage and one.order > limit]
    staying += [one for one in made_here if one.name in spared]
    needed = {name for one in staying for name in one.members}
    unknown = [one.name for one in unreadable(there)]
    old = [
        one
        for one in made_here
        if one.name not in needed
        and not any(_may_be_below(one.name, above) for above in unknown)
    ]
    order = {one.name: one.order for one in found}
    old.sort(key=lambda one: one.order, reverse=True)
    old.sort(key=lambda one: order.get(one.members[-1], one.order))
    return [one.name for one in old]
