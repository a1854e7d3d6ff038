# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots where each trainer has the optimizer state of its own parts only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_cpudist.collective.copied import CopiedParameters
from torch_cpudist.collective.owned import OwnedParts
from torch_cpudist.drivers.copied_saving import CopiedSaving
from torch_cpudist.snapshot.choice import Plan


class OwnedSaving(CopiedSaving):
    """Values are trainer 0's copy; state is in the files of those who have it."""

    def __init__(
        self,
        parameters: CopiedParameters,
        owned: OwnedParts,
        progress: Callable[[], dict[str, Any]],
        go_on: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Saves ``parameters``, whose state is ``owned``."""
        super().__init__(parameters, progress, go_on, equal=False)
        self._owned = owned
        self._read_all: Callable[[], Sequence[Mapping[str, Any]]] = tuple

    def own_state(self) -> dict[str, Any]:
        """Counters, and the state of this trainer's parts."""
        return {"progress": self._progress(), "parts": self._owned.saved_parts()}

    def states_of_all(self, read: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Keeps it for the case that parts are others' now."""
        self._read_all = read

    def restore_own_state(
        self, tree: Mapping[str, Any], own: bool, plan: Plan
    ) -> list[str]:
        """Puts back the state of this trainer's parts, from whose files have it."""
        progress = tree.get("progress")
        if progress is not None and plan.whole:
            self._go_on(progress)
        parts = tree.get("parts")
        if not own or not self._owned.are_own(parts or []):
            trees = self._read_all()
            parts = [part for one in trees for part in one.get("parts") or []]
        names = {one.source: one.name for one in plan.taken.values() if one.state}
        anew = [one.name for one in plan.taken.values() if not one.state]
        missing = self._owned.put_parts(parts or [], names, anew)
        return [
            f"the optimizer's state of {name!r} is not in it and begins anew"
            for name in sorted(missing)
        ]
