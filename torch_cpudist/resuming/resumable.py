# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What an optimizer keeps for snapshots, before and after ``resume``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_cpudist.errors import InvalidArgumentError, SnapshotError
from torch_cpudist.log import logger
from torch_cpudist.resuming.paces import Often
from torch_cpudist.resuming.snapshots import Snapshots
from torch_cpudist.resuming.subject import Started, Subject

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run

# For what is being written when the optimizer is closed.
_LAST_SNAPSHOT_S = 600.0


class Resumable:
    """Of one optimizer. From the thread that steps.

    Attributes:
        snapshots: those of it, after ``resume``.
    """

    def __init__(self, run: Run, model: nn.Module) -> None:
        """Before ``resume``.

        Args:
            run: this trainer's, in which the optimizer does not take part yet.
            model: the wrapped one.
        """
        self._run = run
        self._model = model
        self._number = len(run.participants())
        self._generators: list[torch.Generator] = []  # of replicas
        self.snapshots: Snapshots | None = None

    def subject(self, **others: Any) -> Subject:
        """Whose snapshots they are; the rest of it is the caller's."""
        return Subject(
            run=self._run,
            model=self._model,
            generators=self._generators,
            number=self._number,
            **others,
        )

    def resume(
        self,
        subject: Subject,
        begun: bool,
        path: object,
        often: Often,
        state: object,
        staging: object = None,
        load: bool = True,
    ) -> Started:
        """See ``DistributedOptimizer.resume``. Collective.

        Args:
            subject: from ``subject``.
            begun: a step was taken.
            path: where snapshots are.
            often: how often, and how many stay.
            state: objects of the script.
            staging: where they are first, if ``path`` is a URL.
            load: goes on from the newest there.
        """
        if self.snapshots is not None or begun:
            raise InvalidArgumentError(
                "resume() comes once, after wrapping and before the first step. To go "
                "back later call load_snapshot(name)."
            )
        snapshots = Snapshots(subject, path, often, state, staging)
        started = snapshots.resume(load)
        self.snapshots = snapshots
        return started

    def resumed(self, what: str) -> Snapshots:
        """Those of it, for a call ``what``.

        Raises:
            InvalidArgumentError: ``resume`` was not called.
        """
        if self.snapshots is None:
            raise InvalidArgumentError(
                f"{what}: call resume() first, which says where snapshots are."
            )
        return self.snapshots

    def before_step(self, counted: Mapping[str, int]) -> None:
        """The next step begins."""
        if self.snapshots is not None:
            self.snapshots.before_step(counted)

    def after_step(self, counted: Mapping[str, int]) -> None:
        """A step is over."""
        if self.snapshots is not None:
            self.snapshots.after_step(counted)

    def save_last(self, counted: Mapping[str, int]) -> None:
        """This trainer is about to end, before its time. What fails is told."""
        if self.snapshots is None:
            return
        try:
            name = self.snapshots.save(None, counted)
        except SnapshotError as error:
            logger.warning("SIGTERM: no snapshot was saved: %s", error)
        else:
            logger.warning("SIGTERM: snapshot %s was saved.", name)

    def leaving(self, counted: Mapping[str, int]) -> None:
        """This trainer is about to leave, or comes to a barrier."""
        if self.snapshots is not None:
            self.snapshots.leaving(counted)

    def settle(self) -> None:
        """No step comes for a while."""
        if self.snapshots is not None:
            self.snapshots.settle()

    def add_generators(self, generators: Sequence[torch.Generator]) -> None:
        """Takes those of replicas, which may have been saved already."""
        self._generators[:] = generators
        if self.snapshots is not None:
            self.snapshots.seed_replicas()

    def stats(self) -> dict[str, Any]:
        """``snapshot`` of ``DistributedOptimizer.stats``, after ``resume``."""
        return {} if self.snapshots is None else {"snapshot": self.snapshots.stats()}

    def observed(self) -> dict[str, Any]:
        """As ``stats``, for any thread."""
        snapshots = self.snapshots
        return {} if snapshots is None else {"snapshot": snapshots.observed()}

    def close(self, tell_servers: bool) -> None:
        """The end: what is being written is written, where servers are still there."""
        if self.snapshots is not None:
            self.snapshots.close(_LAST_SNAPSHOT_S if tell_servers else 0.0)
