# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots of dense parameters on servers that stand beside tables of another set.

At the end of a round no other can begin before each trainer of it pushes again, so that
one of them alone reads the values and the optimizer's state of that moment, from all
servers: trainer 0, or the first that takes part while that one has left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_cpudist import ranges
from torch_cpudist.drivers.saving import CutAnswer, Saving, Written
from torch_cpudist.drivers.served_saving import ServedSaving
from torch_cpudist.errors import SnapshotError
from torch_cpudist.served import loading
from torch_cpudist.served.described import dense_of
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.served.state_layout import FetchedDense, fetch_dense
from torch_cpudist.snapshot.dense_file import write_dense
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.manifest import Block, Version

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run
    from torch_cpudist.snapshot.choice import Plan, Target
    from torch_cpudist.snapshot.reading import Snapshot
    from torch_cpudist.snapshot.staging import Stage


class FetchedSaving(Saving):
    """Of a parameter set without tables, all of whose trainers step together."""

    together = True
    on_servers = False  # a trainer writes
    goes_on_alone = True

    def __init__(
        self, served: ServedSaving, parameters: ParameterSet, run: Run
    ) -> None:
        """Saves ``parameters``, as ``served`` would if they were alone."""
        self._served = served
        self._parameters = parameters
        self._run = run
        # By cut, on who has read them: the values; where they go.
        self._values: dict[int, dict[str, FetchedDense]] = {}
        self._places: dict[int, tuple[Path, Files]] = {}

    def count(self, steps: int, rounds: int) -> int:
        """Rounds, as one trainer may have left some."""
        return rounds

    def mark(
        self, number: int, name: str, wait_ms: int, base: int = 0, hold_ms: int = 0
    ) -> CutAnswer | None:
        """Has one trainer read the values of now."""
        return self.agree(number, name, busy=False)

    def agree(self, number: int, name: str, busy: bool) -> CutAnswer:
        """Has one trainer read the values of now; whoever else is at this step waits.

        Args:
            number: of the cut.
            name: of the snapshot.
            busy: says nothing here: who commits gives up what is too many.
        """
        if self._reads():
            layout = self._parameters.placement.layout
            with ranges.of(ranges.PULL):
                self._values[number] = {
                    entry.name: fetch_dense(
                        self._parameters, entry, layout.configs[entry.group]
                    )
                    for entry in self._parameters.placement.dense
                }
        return CutAnswer(number, True, name)

    def _reads(self) -> bool:
        """Whether this trainer is the first of those that are at this step."""
        rank = self._run.trainer_rank
        # Who was part of this round stays until it has marked it, too.
        return rank == 0 or rank == min(self._served.taking_part(), default=0)

    def begin(self, number: int, folder: Path, files: Files) -> None:
        """Notes where the values go."""
        self._places[number] = (folder, files)

    def poll(self, number: int) -> Written | None:
        """Writes them, in the thread that asks, as one block of each parameter.

        Raises:
            SnapshotError: this trainer has not read them: who was to do so was lost.
        """
        values = self._values.get(number)
        if values is None:
            self.abandon(number)
            raise SnapshotError(
                f"cut {number}: dense parameters were to be read by a trainer that was "
                "lost or has left before all had marked this moment"
            )
        try:
            folder, files = self._places[number]
            file = write_dense(
                folder,
                {name: one.weight.numpy() for name, one in values.items()},
                files,
                states={
                    name: one.state.numpy()
                    for name, one in values.items()
                    if one.state.numel()
                },
            )
        finally:
            self.abandon(number)
        placement = self._parameters.placement
        dense = tuple(
            replace(
                one,
                blocks=(
                    Block(
                        one.name,
                        0,
                        values[one.name].weight.numel(),
                        0,
                        values[one.name].step,
                    ),
                ),
            )
            for one in dense_of(placement, [0] * len(placement.layout.blocks))
        )
        step = max(one.step for one in values.values())
        members = tuple(range(self._run.trainer_count))
        return Written(Version(step, 0, step), 1, members, (), dense, (file,))

    def abandon(self, number: int) -> None:
        """Drops what was read."""
        self._values.pop(number, None)
        self._places.pop(number, None)

    def own_state(self) -> dict[str, Any]:
        """What lossy pushes of this trainer hold back."""
        return self._served.own_state()

    def restore_own_state(
        self, tree: Mapping[str, Any], own: bool, plan: Plan
    ) -> list[str]:
        """Has it held back again."""
        return self._served.restore_own_state(tree, own, plan)

    def targets(self) -> list[Target]:
        """As servers have them."""
        return self._served.targets()

    def load(self, snapshot: Snapshot, plan: Plan, stage: Stage) -> None:
        """Sends them. Rounds go on from the updates of the parameters."""
        saved = snapshot.manifest
        rounds = max((b.step for one in saved.dense for b in one.blocks), default=0)
        version = replace(saved.version, round=rounds)
        servers = self._run.server_count
        loading.load(self._parameters, snapshot, servers, plan, stage, version)

    def take_in(self, plan: Plan) -> None:
        """Dense values come now."""
        self._served.take_in(plan)
