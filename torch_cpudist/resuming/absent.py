# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Own states of trainers that have no part in a cut: what a snapshot has of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_cpudist.drivers.saving import Saving
from torch_cpudist.errors import SnapshotError
from torch_cpudist.log import logger
from torch_cpudist.snapshot.left_files import LeftFiles
from torch_cpudist.snapshot.manifest import Trainer


class NotOfAll(SnapshotError):
    """Own states are not to be had of some that may still come back.

    Args:
        told: why.
        lost: those of them that servers have lost.
    """

    def __init__(self, told: str, lost: Iterable[int] = ()) -> None:
        super().__init__(told)
        self.lost = frozenset(lost)


@dataclass(frozen=True)
class Brought:
    """States that were copied into a snapshot's directory.

    Attributes:
        left: what trainers have written as they left, by rank.
        kept: from earlier snapshots, of trainers that nobody waits for.
    """

    left: Mapping[int, Trainer] = field(default_factory=dict)
    kept: Mapping[int, Trainer] = field(default_factory=dict)


class Absent:
    """Of one optimizer of one run. From the thread that writes, but ``uncounted``.

    Args:
        saving: of the driver.
        trainers: how many there are; a snapshot is of all of them.
        left: states of those that have left.
        earlier: of a trainer, what snapshots have that the values have grown from:
            their directories and what their manifests say, newest first.
    """

    def __init__(
        self,
        saving: Saving,
        trainers: int,
        left: LeftFiles,
        earlier: Callable[[int], Sequence[tuple[Path, Trainer]]] = lambda rank: (),
    ) -> None:
        self._saving = saving
        self._trainer_count = trainers
        self._left = left
        self._earlier = earlier
        # Steps that servers count and no trainer does: this much is all the difference.
        # None: not known until a snapshot has shown it.
        self.uncounted: int | None = 0
        # Steps in states whose moment was not known, when nobody waited for their
        # trainers any more.
        self._noted: dict[int, int] = {}
        self._told: set[int] = set()

    def bring(self, number: int, folder: Path) -> Brought:
        """Brings states of those that have left, before they may write newer ones.

        Args:
            number: of the cut.
            folder: of the snapshot.

        Raises:
            NotOfAll: one is not there, and its trainer may come back.
        """
        members = self._saving.members(number)
        if members is None:
            return Brought()
        gone = sorted(set(range(self._trainer_count)) - set(members))
        left = {rank: self._left.bring(folder, rank, number) for rank in gone}
        found = {rank: one for rank, one in left.items() if one is not None}
        if not (missing := [rank for rank in gone if rank not in found]):
            return Brought(found)
        self._require_gone(
            missing,
            f"snapshot {folder.name} would have what trainers {missing} have learned, "
            "and not where they are in their data",
            "what they have written of that is not there, or being written anew",
        )
        earlier = {rank: self._bring_earlier(number, folder, rank) for rank in missing}
        kept = {rank: one for rank, one in earlier.items() if one is not None}
        self._tell(missing, kept)
        return Brought(found, kept)

    def settle(
        self,
        number: int,
        folder: Path,
        steps: int,
        trainers: Sequence[Trainer],
        brought: Brought,
    ) -> tuple[Trainer, ...]:
        """Sees that states of those that have left are of the cut, and no later ones.

        A trainer that came back and left again meanwhile has written a newer state. But
        servers count the steps of all trainers, and those of none in these files are
        fewer than at the cut: if the sums are equal, so are all.

        Args:
            number: of the cut.
            folder: of the snapshot.
            steps: of all trainers, as servers have counted them.
            trainers: what the manifest would say.
            brought: of those that had no part in it.

        Returns:
            What it is to say.

        Raises:
            NotOfAll: they are not.
        """
        counted = sum(one.steps for one in trainers)
        if brought.left and self.uncounted != steps - counted:
            self._require_unchanged(folder.name, brought.left, steps, counted)
            newest = dict(brought.left)
            for rank, one in brought.left.items():
                earlier = self._bring_earlier(number, folder, rank, one.steps)
                newest[rank] = earlier or one
            self._tell(newest, newest)
            trainers = [newest.get(one.rank, one) for one in trainers]
        # Who was lost and is back makes some steps again, which servers count.
        self.uncounted = steps - sum(one.steps for one in trainers)
        return tuple(trainers)

    def _require_unchanged(
        self, name: str, left: Mapping[int, Trainer], steps: int, counted: int
    ) -> None:
        """Takes what is as it was before the cut, of trainers that are gone for good.

        Raises:
            NotOfAll: one may have written its state after the cut.
        """
        which = sorted(left)
        if self.uncounted is None:
            doubt = (
                f"snapshot {name}: it cannot be told of which moment the states of "
                f"{which} are, since this trainer or the servers were lost and are back"
            )
        else:
            doubt = (
                f"snapshot {name} has {steps} steps of all trainers, their own states "
                f"{counted + self.uncounted}: some of {which} are of other moments"
            )
        noted, self._noted = self._noted, {}
        self._require_gone(which, doubt, "some were back and have left again")
        self._noted = {rank: one.steps for rank, one in left.items()}
        if noted != self._noted:
            raise NotOfAll(
                f"{doubt}. Servers do not wait for these any more: the next snapshot "
                "takes their states, if they are the same then."
            )

    def _require_gone(self, ranks: Collection[int], doubt: str, left: str) -> None:
        """Sees that servers wait for none of them.

        Args:
            ranks: of trainers.
            doubt: what is wrong with a snapshot without them.
            left: what is wrong with what they have written, if they have left.

        Raises:
            NotOfAll: they do; says why.
        """
        if not self._saving.comes_and_goes:
            raise NotOfAll(
                f"{doubt}: they had left (leave(), barrier() or shutdown()), and "
                f"{left}."
            )
        presence = self._saving.presence()
        lost = sorted(presence.lost.intersection(ranks))
        there = sorted(presence.present.intersection(ranks).difference(lost))
        why = []
        if lost:
            why.append(
                f"{lost} were lost, and until they are back, or servers have waited "
                "their CPUDIST_REJOIN_S for that, none is saved"
            )
        if there:
            why.append(
                f"{there} have left (leave() or barrier()) or are just back, and {left}"
            )
        if why:
            raise NotOfAll(f"{doubt}: {'; '.join(why)}.", lost)

    def is_there(self, rank: int) -> bool:
        """Whether a trainer that has marked a cut may still write its part of it."""
        if not self._saving.comes_and_goes:
            return True  # its loss is everybody's error
        return rank in self._saving.presence().present

    def _bring_earlier(
        self, number: int, folder: Path, rank: int, above: int = -1
    ) -> Trainer | None:
        """The newest state of a trainer in a snapshot, of more steps than ``above``."""
        for source, trainer in self._earlier(rank):
            if trainer.steps <= above:
                return None
            found = self._left.bring_from(source, trainer, folder, number)
            if found is not None:
                return found
        return None

    def _tell(self, ranks: Iterable[int], found: Mapping[int, Trainer]) -> None:
        new = sorted(set(ranks) - self._told)
        self._told.update(new)
        if not new:
            return
        steps = {rank: found[rank].steps for rank in new if rank in found}
        logger.warning(
            "snapshots go on without trainers %s, for which servers do not wait: they "
            "have said goodbye, were lost for longer than the servers' "
            "CPUDIST_REJOIN_S, or have not come since servers came back. Of them "
            "snapshots have the newest states of their own, by trainer of step %s; "
            "what they may have pushed after that is in the values.",
            new,
            steps,
        )
