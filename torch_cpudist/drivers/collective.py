# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What drivers have in common whose trainers average among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from torch_cpudist.collective.copied import CopiedParameters
from torch_cpudist.drivers.base import Driver
from torch_cpudist.drivers.guard import InnerGuard
from torch_cpudist.errors import ModelChangedError
from torch_cpudist.model.gradients import hidden_gradients, read_dense_gradient
from torch_cpudist.rules.fused import fused
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served import local_state

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run


class CollectiveDriver(Driver):
    """What strategies have in common whose trainers average among themselves."""

    def __init__(
        self,
        parameters: CopiedParameters,
        guard: InnerGuard,
        states: States,
        others: Sequence[torch.Tensor],
    ) -> None:
        """Drives ``parameters``.

        Args:
            parameters: with trainer 0's values.
            guard: keeps others from stepping the wrapped optimizers.
            states: of their parameters, from before.
            others: parameters of theirs that are not stepped here.
        """
        super().__init__(parameters)
        self._copied = parameters
        self._group = parameters.group
        self._dense = [entry.parameter for entry in parameters.placement.dense]
        self._guard = guard
        self._others = others
        self._steps = 0
        self._averages = 0
        self._said_left = False
        local_state.adopt([], parameters.inners, self._of_placed(states))

    def _of_placed(self, states: States) -> States:
        placed = [entry.parameter for entry in self._copied.entries]
        return {p: states[p] for p in placed if p in states}

    def _gradients(self) -> list[torch.Tensor | None]:
        return [
            None
            if entry.parameter.grad is None
            else read_dense_gradient(entry.name, entry.parameter.grad, entry.dtype)
            for entry in self._copied.placement.dense
        ]

    def _step_inners(self) -> None:
        try:
            hidden = hidden_gradients(self._others)
            with self._guard.stepping(), hidden, fused(self._copied.inners):
                for inner in self._copied.inners:
                    inner.step()
        finally:
            self._copied.accept_changes()

    def _take_part(self) -> None:
        if self._said_left:
            self._group.tell_left("")
            self._said_left = False

    def settle(self) -> None:
        """Values are here when ``step`` returns."""

    def check_overwrite(self) -> None:
        """Refuses to drop what was written: nobody else keeps this trainer's values.

        Raises:
            ModelChangedError: the model was written.
        """
        if names := self._copied.changed():
            raise ModelChangedError(
                f"flush(overwrite=True): {len(names)} parameters that trainers average "
                f"among themselves were written (first: {names[0]!r}), and no server "
                "has their values to go back to. All is as before. Write the earlier "
                "values back, or call opt.store_model() on every trainer, which makes "
                "trainer 0's everybody's."
            )

    def flush(self, pull: str, overwrite: bool = False) -> None:
        """Values are here; see ``check_overwrite``."""
        self.check_overwrite()

    def leave(self) -> None:
        """Tells the others, who cannot go on alone."""
        self._group.tell_left("has left")
        self._said_left = True

    def join(self) -> None:
        """Takes part again."""
        self._take_part()

    def before_barrier(self) -> None:
        """Tells the others, for the case that they are somewhere else."""
        self.leave()
        self._group.barriers += 1

    def stats(self) -> dict[str, Any]:
        """``collective``: counters; see docs/strategies.md."""
        return {
            "collective": {
                "averages": self._averages,
                "sent_bytes": self._group.sent_bytes,
                "wait_s": self._group.wait_s,
            }
        }

    # -- optimizer state ---------------------------------------------------------------

    def fetch_state(self, inners: Sequence[Optimizer]) -> list[dict[str, Any]]:
        """Returns this trainer's own state; no messages."""
        return local_state.collect([], inners)

    def put_state(self, run: Run, inners: Sequence[Optimizer], states: States) -> None:
        """Takes every trainer's own state; weights as ``store_model``."""
        local_state.drop_and_adopt([], inners, self._of_placed(states))
        self.store_model(run, inners, all_rows=False)

    def store_model(
        self, run: Run, inners: Sequence[Optimizer], all_rows: bool
    ) -> None:
        """Makes trainer 0's values everybody's."""
        self._copied.check_kept()
        run.barrier()
        self._copied.broadcast()
        self._copied.check_agreement()

    def give_back_state(self, inners: Sequence[Optimizer]) -> None:
        """State is where torch has it."""
