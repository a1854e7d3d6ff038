# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer's part in its run: barriers, servers that come back, the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torch_cpudist import _core
from torch_cpudist.drivers.base import Driver
from torch_cpudist.errors import ModelChangedError
from torch_cpudist.launch.baseline import Baseline
from torch_cpudist.launch.run import Participant, Run
from torch_cpudist.log import logger
from torch_cpudist.optimizer.averages import Averages
from torch_cpudist.optimizer.foreseeing import stats_of
from torch_cpudist.optimizer.initial_state import InitialState
from torch_cpudist.optimizer.outliving import Outliving
from torch_cpudist.optimizer.phases import Counted
from torch_cpudist.resuming.resumable import Resumable
from torch_cpudist.served.base import Trained
from torch_cpudist.strategies.base import Strategy
from torch_cpudist.tables.forwards import ForeseenLookups


class Served(Protocol):
    """What a ``DistributedOptimizer`` does itself."""

    strategy: Strategy

    @property
    def trained(self) -> Trained:
        """What is trained."""

    def flush(self, pull: str = "all") -> None:
        """Brings values here."""

    def leave(self) -> None:
        """Ends this trainer's part in rounds."""

    def close(self, tell_servers: bool = True) -> None:
        """Ends it."""

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """What is trained, tables first."""


@dataclass(frozen=True)
class Parts:
    """What an optimizer consists of.

    Attributes:
        run: this trainer's.
        driver: runs the strategy.
        counted: steps, and where their time goes.
        averages: of the model's values.
        foreseen: lookups that are asked for together, if any are.
        initial: state of the wrapped optimizers from before.
        resumable: its snapshots.
        outliving: how it goes on when servers are lost.
        baseline: the end of its warm-up.
    """

    run: Run
    driver: Driver
    counted: Counted
    averages: Averages
    foreseen: ForeseenLookups | None
    initial: InitialState
    resumable: Resumable
    outliving: Outliving
    baseline: Baseline


class TakingPart(Participant):
    """Of one optimizer, from its making until it is closed."""

    def __init__(self, optimizer: Served, parts: Parts) -> None:
        """Does nothing yet.

        Args:
            optimizer: whose part it is.
            parts: what that consists of.
        """
        self.optimizer: Served = optimizer
        self.strategy = optimizer.strategy
        self._its = parts

    # -- barriers ----------------------------------------------------------------------

    def before_barrier(self) -> None:
        """Hands on what it must before everybody has left."""
        its = self._its
        its.averages.check_not_entered("barrier()")
        its.resumable.leaving(its.counted.counters())
        its.driver.before_barrier()
        its.resumable.settle()

    def after_barrier(self) -> None:
        """Joins again, unless the model was written."""
        trained = self.optimizer.trained
        pulled = self._its.driver.pulled
        if pulled is not None:
            pulled.age_rows()
        if trained.bounded and not trained.changed():
            trained.join()

    def round_steps(self) -> dict[str, Any] | None:
        """Steps in rounds since the last barrier, for comparing them there."""
        its = self._its
        if not its.driver.in_rounds:
            return None
        groups = self.optimizer.trained.placement.layout.trainer_groups
        group = groups[its.run.trainer_rank] if groups else 0
        return {**its.counted.since_barrier(), "group": group}

    def begin_counting(self) -> None:
        """A barrier is over: rounds begin anew with everybody."""
        self._its.counted.barrier()

    # -- what others see of it ---------------------------------------------------------

    def global_step(self) -> int:
        """See ``cpudist.global_step``."""
        return self._its.driver.global_step(self._its.counted.rounds)

    def observed(self) -> Mapping[str, Any]:
        """What of ``stats`` is this optimizer's own, for any thread.

        Of snapshots as of when this trainer last looked, of ``exchange`` what is late.
        """
        its = self._its
        return {
            **its.counted.stats(),
            "updates": its.counted.rounds,
            "lookups": stats_of(its.foreseen),
            **its.driver.observed(),
            **its.resumable.observed(),
            **its.outliving.stats(),
        }

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """What is trained, tables first."""
        return self.optimizer.trained_parameters()

    # -- servers that come back --------------------------------------------------------

    def cannot_outlive(self, index: int, rejoins: bool) -> str:
        """Why it cannot; see ``Participant``."""
        its = self._its
        return its.outliving.refusal(index, its.averages.are_here, rejoins)

    def let_go(self) -> None:
        """Gives up the snapshots that were being saved."""
        self._its.outliving.let_go(self._its.counted.steps)

    def learn_losses(self, client: _core.Client) -> None:
        """Learns what was not applied of its steps; see ``Participant``."""
        self._its.outliving.learn_losses(client)

    def go_on_with(self, client: _core.Client, limit_s: float | None) -> None:
        """Goes on with servers that are there again; see ``Participant``."""
        self._its.outliving.go_on_with(client, limit_s)
        self._its.baseline.begin_anew()

    # -- the end -----------------------------------------------------------------------

    def cannot_leave(self) -> str:
        """Why not; see ``Participant``."""
        together = self._its.driver.together
        name = self.strategy.name
        return f"others train together with it under {name}" if together else ""

    def saves(self) -> bool:
        """Whether it has snapshots saved."""
        return self._its.resumable.snapshots is not None

    def save_last(self) -> None:
        """Has a snapshot saved, where this trainer says when; see ``Participant``."""
        its = self._its
        leads = its.run.trainer_rank == 0
        if leads and (not its.driver.together or its.run.trainer_count == 1):
            its.resumable.save_last(its.counted.counters())

    def leave(self) -> None:
        """Ends this trainer's part in rounds: the others go on without it."""
        self.optimizer.leave()

    def take_home(self, pull: str) -> None:
        """Flushes, unless the model was changed after its last step: for shutdown."""
        if self._its.averages.are_here:
            logger.warning(
                "shutdown inside of opt.averaged(): the model keeps the averages of "
                "its dense parameters, and of the rows that were looked up."
            )
            return
        try:
            self.optimizer.trained.check_kept()
            self.optimizer.flush(pull)
            if pull != "all":
                # Rows stay old here: nobody trains them on, so no state either.
                tables = self.optimizer.trained.placement.tables
                self._its.initial.forget_large({id(t.found.weight) for t in tables})
        except ModelChangedError as changed:
            logger.warning("shutdown leaves the model as it is: %s", changed)

    def close(self, tell_servers: bool = True) -> None:
        """Ends it. Idempotent."""
        self.optimizer.close(tell_servers)
