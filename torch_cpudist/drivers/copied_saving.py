# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots of parameters that every trainer has: trainer 0 writes its copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_cpudist.collective.copied import CopiedParameters, inner_state
from torch_cpudist.collective.state import share_state
from torch_cpudist.drivers.saving import CutAnswer, Saving, Written
from torch_cpudist.model.device import state_beside
from torch_cpudist.model.placement import DenseParameter
from torch_cpudist.served.described import DTYPES, row_width, rule_of
from torch_cpudist.served.state_exchange import indexed_parameters
from torch_cpudist.snapshot.choice import Plan, Target
from torch_cpudist.snapshot.dense_file import Values, write_dense
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.manifest import Block, Dense, Rule, Version
from torch_cpudist.snapshot.whole import values_of

if TYPE_CHECKING:
    from torch_cpudist.snapshot.reading import Snapshot
    from torch_cpudist.snapshot.staging import Stage

_WHAT = "agreeing on a snapshot"


class CopiedSaving(Saving):
    """Of trainers that average among themselves. A mark is one small collective.

    What torch keeps of the parameters goes into trainers' own files: into trainer 0's
    where it is equal on all, else into everybody's.
    """

    together = True
    on_servers = False

    def __init__(
        self,
        parameters: CopiedParameters,
        progress: Callable[[], dict[str, Any]],
        go_on: Callable[[Mapping[str, Any]], None],
        equal: bool,
    ) -> None:
        """Saves ``parameters``.

        Args:
            parameters: of the driver.
            progress: counters of the driver, and what else it has itself.
            go_on: takes them back.
            equal: state of the optimizer is equal on all trainers.
        """
        self._copied = parameters
        self._group = parameters.group
        self._progress = progress
        self._go_on = go_on
        self._equal = equal
        # By cut, on trainer 0: steps and values of its moment; where they go.
        self._values: dict[int, tuple[int, dict[str, Values]]] = {}
        self._places: dict[int, tuple[Path, Files]] = {}

    def count(self, steps: int, rounds: int) -> int:
        """Steps, which are everybody's."""
        return rounds

    def mark(
        self, number: int, name: str, wait_ms: int, base: int = 0, hold_ms: int = 0
    ) -> CutAnswer | None:
        """Sees that trainer 0 can take it, and that all mean the same. Collective."""
        return self.agree(number, name, busy=False)

    def agree(self, number: int, name: str, busy: bool) -> CutAnswer:
        """Marks this moment, whose values trainer 0 copies. Collective.

        Args:
            number: of the cut.
            name: of the snapshot.
            busy: this trainer still waits for something of the last one.
        """
        busy = busy or bool(self._values)
        told = torch.tensor([number, int(busy)], dtype=torch.int64, device="cpu")
        if not self._group.alone:
            found = self._group.gather(told, _WHAT)
            numbers = sorted({int(one[0]) for one in found})
            busy = any(bool(one[1]) for one in found)
            if len(numbers) > 1:
                reason = f"trainers mark different moments: {numbers}"
                return CutAnswer(number, False, name, reason)
        if busy:
            reason = "the one before is still being written"
            return CutAnswer(number, False, name, reason)
        if self._group.rank == 0:
            values = {
                entry.name: _own_copy(entry.parameter).reshape(-1).numpy()
                for entry in self._entries
            }
            self._values[number] = (self._progress()["steps"], values)
        return CutAnswer(number, True, name)

    def begin(self, number: int, folder: Path, files: Files) -> None:
        """Notes where the values go."""
        self._places[number] = (folder, files)

    def poll(self, number: int) -> Written | None:
        """Writes them, in the thread that asks."""
        steps, values = self._values[number]
        try:
            folder, files = self._places[number]
            file = write_dense(folder, values, files)
        finally:
            self.abandon(number)
        rules = self._copied.placement.rules
        return Written(
            version=Version(steps, 0, steps),
            servers=1,
            members=tuple(range(self._group.size)),
            tables=(),
            dense=tuple(
                _described(entry, rule_of(rules[entry.group]), steps)
                for entry in self._entries
            ),
            files=(file,),
        )

    @property
    def _entries(self) -> list[DenseParameter]:
        return self._copied.entries

    def abandon(self, number: int) -> None:
        """Drops the copies."""
        self._values.pop(number, None)
        self._places.pop(number, None)

    # -- the optimizer's own state -----------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """Counters, and what torch keeps, where it is this trainer's to save."""
        tree: dict[str, Any] = {"progress": self._progress(), "state": None}
        if not self._equal or self._group.rank == 0:
            inners = self._copied.inners
            tree["state"] = {
                entry.name: {
                    key: _own_copy(value) if isinstance(value, torch.Tensor) else value
                    for key, value in inner_state(inners, entry.parameter).items()
                }
                for entry in self._entries
            }
        return tree

    def restore_own_state(
        self, tree: Mapping[str, Any], own: bool, plan: Plan
    ) -> list[str]:
        """Puts both back. Collective where state is equal on all."""
        progress = tree.get("progress")
        if progress is not None and plan.whole:
            self._go_on(progress)
        missing = []
        if not self._equal or self._group.rank == 0:
            missing = self._put_state(tree.get("state") or {}, plan)
        if self._equal:
            share_state(self._group, self._copied.inners, self._entries)
        return missing

    def _put_state(
        self, saved: Mapping[str, Mapping[str, Any]], plan: Plan
    ) -> list[str]:
        missing = []
        for inner in self._copied.inners:
            mine = {id(parameter) for parameter in indexed_parameters(inner)}
            for entry in self._entries:
                taken = plan.taken.get(entry.name)
                if id(entry.parameter) not in mine or taken is None:
                    continue
                inner.state.pop(entry.parameter, None)
                if not taken.state:
                    continue
                state = saved.get(taken.source)
                if state is None:
                    missing.append(
                        f"the optimizer's state of {entry.name!r} is not in it and "
                        "begins anew"
                    )
                elif state:
                    inner.state[entry.parameter] = state_beside(
                        inner, entry.parameter, state
                    )
        return missing

    # -- loading -----------------------------------------------------------------------

    def targets(self) -> list[Target]:
        """Everybody's own."""
        rules = self._copied.placement.rules
        return [
            Target(
                entry.name,
                False,
                tuple(entry.shape),
                None,
                rule_of(rules[entry.group]).kind,
                dtype=DTYPES[entry.dtype],
            )
            for entry in self._entries
        ]

    def load(self, snapshot: Snapshot, plan: Plan, stage: Stage) -> None:
        """Takes the values over here; ``take_in`` sends them to the others."""
        fitting = [entry for entry in self._entries if entry.name in plan.taken]
        # All is read before anything is changed.
        values = {
            entry.name: values_of(snapshot, plan.taken[entry.name].source)
            for entry in fitting
        }
        with torch.no_grad():
            for entry in fitting:
                found = torch.from_numpy(np.array(values[entry.name]))
                entry.parameter.copy_(found.reshape(entry.shape))
        self._copied.accept_changes()

    def take_in(self, plan: Plan) -> None:
        """Makes trainer 0's values everybody's."""
        self._copied.broadcast()


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device="cpu", copy=True).contiguous()


def _described(entry: DenseParameter, rule: Rule, steps: int) -> Dense:
    size = entry.shape.numel()
    return Dense(
        name=entry.name,
        shape=tuple(entry.shape),
        dtype=DTYPES[entry.dtype],
        row_width=row_width(entry),
        rule=rule,
        state=(),
        blocks=(Block(entry.name, 0, size, 0, steps),),
    )
