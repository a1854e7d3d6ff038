# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots of trainers that step by themselves and exchange what they moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim import Optimizer

from torch_cpudist.drivers.queued_saving import queued_answer
from torch_cpudist.drivers.saving import CutAnswer
from torch_cpudist.drivers.served_saving import ServedSaving
from torch_cpudist.model.dense_memory import Weights
from torch_cpudist.model.device import state_beside
from torch_cpudist.served import state_exchange
from torch_cpudist.served.local import LocalParameterSet

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run
    from torch_cpudist.snapshot.choice import Plan
    from torch_cpudist.snapshot.reading import Snapshot
    from torch_cpudist.snapshot.staging import Stage


class Moving(Protocol):
    """Steps by itself, and exchanges what it has moved.

    Attributes:
        servers_lead: a snapshot is being loaded there: what stands here goes.
    """

    servers_lead: bool

    def hand_on_and(self, do: Callable[[Sequence[int]], None]) -> None:
        """Begins an exchange of everything, then calls ``do`` with dense addresses."""

    def progress(self) -> dict[str, int]:
        """Counters."""

    def go_on(self, progress: Mapping[str, int]) -> None:
        """Takes them over."""


class GeoSaving(ServedSaving):
    """The servers' values, and each trainer's own optimizer state.

    A trainer that marks hands on all of its movement first, also what it would have
    kept to hand it on later: its mark stands behind that in the queue of exchanges.
    """

    comes_and_goes = True
    deltas = False  # every row that is here may have moved

    def __init__(
        self,
        driver: Moving,
        parameters: LocalParameterSet,
        run: Run,
        inners: Sequence[Optimizer],
    ) -> None:
        """Saves ``parameters``, which ``driver`` trains by ``inners``."""
        super().__init__(parameters, run, together=False)
        self.asks_first = self.waits_at_once = False
        self._driver = driver
        self._local = parameters
        self._inners = inners

    def mark(
        self, number: int, name: str, wait_ms: int, base: int = 0, hold_ms: int = 0
    ) -> CutAnswer | None:
        """Begins an exchange of everything and queues the mark; the answer comes later.

        Cost: an exchange that is under way is ended, and all rows that this trainer has
        moved and not handed on wholly are packed.
        """
        local = self._local
        if local.alone:  # servers have what it began with, or was last flushed
            local.store()
            with Weights(local.placement.dense) as weights:
                local.exchange.mark_cut(weights, number, name, wait_ms, hold_ms)
        else:
            self._driver.hand_on_and(
                lambda weights: local.exchange.mark_cut(
                    weights, number, name, wait_ms, hold_ms
                )
            )
        return None

    def answer(self) -> CutAnswer | None:
        """The queue's."""
        return queued_answer(self._local.exchange.cut_answer())

    # -- what trainers keep ------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """Counters, and optimizer state: of tables that of rows that have any.

        Cost: a copy of it.
        """
        return {
            "progress": self._driver.progress(),
            "tables": {
                table.placed.found.name: table.trained_rows()
                for table in self._local.tables
            },
            "dense": {
                entry.name: {
                    key: value.detach().to(device="cpu", copy=True)
                    if isinstance(value, torch.Tensor)
                    else value
                    for key, value in inner.state.get(entry.parameter, {}).items()
                }
                for entry, inner in self._dense()
            },
        }

    def _dense(self) -> list[tuple[Any, Optimizer]]:
        owners = {
            id(parameter): inner
            for inner in self._inners
            for parameter in state_exchange.indexed_parameters(inner)
        }
        entries = self._local.placement.dense
        return [(entry, owners[id(entry.parameter)]) for entry in entries]

    def restore_own_state(
        self, tree: Mapping[str, Any], own: bool, plan: Plan
    ) -> list[str]:
        """Puts it back; who has saved none goes on with trainer 0's."""
        if plan.whole:
            self._driver.go_on(tree.get("progress") or {})
        missing = []
        tables, dense = tree.get("tables") or {}, tree.get("dense") or {}
        for table in self._local.tables:
            taken = plan.taken.get(table.placed.found.name)
            if taken is None:
                continue
            rows = tables.get(taken.source)
            if not table.load_rows(rows):
                missing.append(table.placed.found.name)
        for entry, inner in self._dense():
            taken = plan.taken.get(entry.name)
            if taken is None:
                continue
            inner.state.pop(entry.parameter, None)
            state = dense.get(taken.source)
            if state is None:
                missing.append(entry.name)
            elif state:
                inner.state[entry.parameter] = state_beside(
                    inner, entry.parameter, state
                )
        told = [
            f"the optimizer's state of {name!r} is not in it and begins anew"
            for name in missing
        ]
        return told + (self._restore_movement(tree, plan) if own and plan.whole else [])

    def _restore_movement(self, tree: Mapping[str, Any], plan: Plan) -> list[str]:
        """Puts back what a trainer had not handed on, where exchanges are rounds."""
        if not (tree.get("since") or {}).get("steps"):
            return []
        return [
            "what this trainer had moved since its last exchange, under Geo(outer=), "
            "is not taken"
        ]

    def load(self, snapshot: Snapshot, plan: Plan, stage: Stage) -> None:
        """Has every server read its rows, and sends dense blocks."""
        self._driver.servers_lead = True
        super().load(snapshot, plan, stage)

    def take_in(self, plan: Plan) -> None:
        """The servers' values take the place of this trainer's."""
        super().take_in(plan)
        self._driver.servers_lead = False
