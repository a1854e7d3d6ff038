# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who runs the optimizer once the gradients of replicas are summed.

- ``OwnedUpdate``: each owner steps its own parameters; the calling thread all of them,
  where an optimizer may look at several at once.
- ``CopiedUpdate``: every replica steps its own copies.
- ``ServedUpdate``: a ``DistributedOptimizer`` steps; copies are refreshed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist.errors import UnsupportedOptimizerError
from torch_cpudist.log import logger
from torch_cpudist.ops.tables import TablesStep
from torch_cpudist.optimizer.distributed import DistributedOptimizer
from torch_cpudist.replicas import steppers
from torch_cpudist.replicas.models import ReplicaModels
from torch_cpudist.replicas.rows import OwnedRows, RowStep, RowTable, row_steps
from torch_cpudist.replicas.steppers import divisible, groups_of, likeness
from torch_cpudist.rules.fused import step_fused
from torch_cpudist.rules.groups import needs_closure


class Update:
    """Runs the optimizers of an executor. Not thread-safe."""

    def __init__(self, optimizers: Sequence[Optimizer], models: ReplicaModels) -> None:
        """Updates the parameters of ``models`` by ``optimizers``."""
        self.optimizers = list(optimizers)
        self.models = models
        self.apart = [False] * len(self.optimizers)

    def _divide(self) -> None:
        """Looks anew which optimizers step parts of their parameters.

        Step hooks and parameters may have come since the last step.

        Raises:
            UnsupportedOptimizerError: see ``check_parameters``.
        """
        check_parameters(self.optimizers, {id(p) for p in self.models.parameters})
        self.apart = divisible(self.optimizers)

    def prepare(self, at_once: bool) -> None:
        """Takes what has changed in the optimizers; before ``by_owner``.

        Args:
            at_once: owners update what they have summed without anybody looking at it
                before; else all sums are in the model by now.
        """

    def sums_itself(self, index: int) -> bool:
        """Whether ``by_owner`` sums the gradients of a parameter."""
        return False

    def wants_sorted(self, index: int) -> bool:
        """Whether rows of a summed gradient are to be in the order of their keys."""
        return True

    def by_owner(self, owner: int) -> None:
        """Steps what an owner has; run by its thread, once its sums are in the model.

        Sums of other owners may not be there yet.
        """

    def by_replica(self, replica: int) -> None:
        """The rest of a replica's part; run by its thread, when all sums are there."""

    def by_caller(self, samples: int | None) -> None:
        """Steps as a whole what cannot be divided; before ``by_replica``."""
        for optimizer, apart in zip(self.optimizers, self.apart, strict=True):
            if not apart:
                optimizer.step()

    @property
    def in_replicas(self) -> bool:
        """Whether ``by_replica`` has anything to do."""
        return False

    def finish(self) -> None:
        """Tells schedulers that a step was taken."""
        for optimizer in self.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]


class OwnedUpdate(Update):
    """Each owner steps its own parameters, in the state that they share."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        models: ReplicaModels,
        owned: Sequence[Sequence[int]],
    ) -> None:
        """``owned``: by owner, indices of its parameters."""
        super().__init__(optimizers, models)
        self._owner_of = {
            id(models.parameters[i]): owner
            for owner, indices in enumerate(owned)
            for i in indices
        }
        self._parts = [[likeness(o) for o in self.optimizers] for _ in owned]
        self._rows: OwnedRows | None = None
        self._at_once = False
        self._divide()
        pairs = zip(self.optimizers, self.apart, strict=True)
        whole = [optimizer for optimizer, apart in pairs if not apart]
        if whole:
            logger.info(
                "ReplicaExecutor: one thread runs step() of %s, which may look at "
                "several parameters at once",
                ", ".join(type(optimizer).__name__ for optimizer in whole),
            )

    def prepare(self, at_once: bool) -> None:
        """Takes the groups' options and what the gradients are."""
        self._at_once = at_once
        self._rows = None
        self._divide()
        steps = row_steps(self.optimizers, self.apart, self.models, not at_once)
        self._rows = OwnedRows(list(steps), self._owner_of, len(self._parts))
        for owner, own in enumerate(self._parts):
            for part, whole in zip(own, self.optimizers, strict=True):
                part.param_groups = groups_of(whole, self._mine(owner))
                part.state = whole.state

    def _mine(self, owner: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
        """What an owner steps for a parameter: it, or nothing."""
        indices = self._rows.indices if self._rows is not None else ()
        dealt = {id(self.models.parameters[index]) for index in indices}

        def mine(parameter: torch.Tensor) -> torch.Tensor | None:
            own = self._owner_of[id(parameter)] == owner and id(parameter) not in dealt
            return parameter if own else None

        return mine

    def sums_itself(self, index: int) -> bool:
        """Rows of tables are summed as they are stepped, if all is done at once."""
        rows = self._rows
        return self._at_once and rows is not None and index in rows.indices

    def by_owner(self, owner: int) -> None:
        """Steps this owner's parameters, and its rows of tables."""
        if self._rows is not None:
            self._rows.step(owner)
        for part, apart in zip(self._parts[owner], self.apart, strict=True):
            if apart:
                step_fused(part)

    def finish(self) -> None:
        """Also: counts the steps of tables, and gives the model their gradients."""
        super().finish()
        rows, self._rows = self._rows, None
        if rows is None:
            return
        rows.finish()
        if self._at_once:
            rows.set_gradients()
            self.models.drop_gradients(rows.indices)


class CopiedUpdate(Update):
    """Every replica steps its own copies; the first one's are the model's.

    What an optimizer steps as a whole is copied afterwards.
    """

    def __init__(self, optimizers: Sequence[Optimizer], models: ReplicaModels) -> None:
        """Gives every replica an optimizer with state of its own."""
        super().__init__(optimizers, models)
        # By replica; nothing where an optimizer steps as a whole.
        self._own: list[list[Optimizer | None]] = [
            [None] * len(self.optimizers) for _ in models.views
        ]
        self._by_row: list[tuple[RowTable, RowStep]] = []
        self._refreshed: list[int] = []
        # What all replicas had after the last step.
        self._common: list[Any] | None = None

    def copies(self) -> list[Optimizer]:
        """The optimizers of all replicas but the first."""
        return [made for own in self._own[1:] for made in own if made is not None]

    def prepare(self, at_once: bool) -> None:
        """Takes the groups' options, and state that others than replicas wrote."""
        self._divide()
        # Loaded, cleared or edited, or stepped by another executor.
        written = self._common is None or self._common != steppers.marks(
            self.optimizers
        )
        # Until ``finish`` replicas may be at different steps.
        self._common = None
        self.models.expect_update()
        steps = row_steps(self.optimizers, self.apart, self.models, not at_once)
        self._by_row = [(table, step) for table, step, _ in steps]
        pairs = zip(self.optimizers, self.apart, strict=True)
        whole = {
            id(parameter)
            for optimizer, apart in pairs
            if not apart
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        parameters = enumerate(self.models.parameters)
        self._refreshed = [i for i, p in parameters if id(p) in whole]
        for replica, own in enumerate(self._own):
            for i, apart in enumerate(self.apart):
                own[i] = self._stepper(replica, i, written) if apart else None

    def _stepper(self, replica: int, index: int, written: bool) -> Optimizer:
        """What steps a replica's parameters, but for rows of tables."""
        whole, own_of = self.optimizers[index], self._own_of(replica)
        own = self._own[replica][index]
        if replica == 0:
            own = likeness(whole)
            own.state = whole.state
        elif own is None or written:
            own = likeness(whole)
            own.state = steppers.copied_state(whole, own_of)
        by_row = {id(table.weight) for table, _ in self._by_row}
        own.param_groups = groups_of(
            whole, lambda p: None if id(p) in by_row else own_of[id(p)]
        )
        return own

    def _own_of(self, replica: int) -> dict[int, nn.Parameter]:
        """By ``id`` of a parameter of the model, what the replica steps for it."""
        ours = self.models.views[replica] if replica else self.models.parameters
        pairs = zip(self.models.parameters, ours, strict=True)
        return {id(parameter): own for parameter, own in pairs}

    def wants_sorted(self, index: int) -> bool:
        """Where torch's sparse operators step."""
        return all(table.index != index for table, _ in self._by_row)

    def by_replica(self, replica: int) -> None:
        """Steps this replica's copies with the common sums."""
        own_of = self._own_of(replica)
        self.models.refresh(replica, self._refreshed)
        if replica:
            for parameter in self.models.parameters:
                own_of[id(parameter)].grad = parameter.grad
        self._step_rows(replica, own_of)
        for stepper in self._own[replica]:
            if stepper is not None:
                step_fused(stepper)

    def _step_rows(self, replica: int, own_of: dict[int, nn.Parameter]) -> None:
        """Steps the rows of this replica's copies of tables, all of them at once."""
        pieces = [table.pieces(self.models, summed=True) for table, _ in self._by_row]
        states: list[Any] = []
        steps = []
        for table, step in self._by_row:
            own = own_of[id(table.weight)]
            stepper = self._own[replica][table.optimizer_index]
            states.append(stepper.state.get(own, {}) if stepper is not None else {})
            steps.append(step.on(own, states[-1]))
        TablesStep(pieces, steps).run(owner=0, owners=1, deal_from=0)
        for (_, step), state in zip(self._by_row, states, strict=True):
            step.count(state)

    @property
    def in_replicas(self) -> bool:
        """Every replica steps."""
        return True

    def finish(self) -> None:
        """Also: copies have taken the same step as the model."""
        super().finish()
        self.models.note_updated()
        self._common = steppers.marks(self.optimizers)
        self._by_row = []


class ServedUpdate(Update):
    """The calling thread steps a ``DistributedOptimizer``: one push for all."""

    def __init__(
        self, served: DistributedOptimizer, models: ReplicaModels, copied: bool
    ) -> None:
        """``copied``: replicas have copies, to be refreshed."""
        super().__init__([served], models)
        self._served = served
        self._copied = copied

    def wants_sorted(self, index: int) -> bool:
        """A push takes keys in any order."""
        return False

    def by_caller(self, samples: int | None) -> None:
        """Steps; ``samples`` weighs this trainer."""
        with self._served.driver.step_of_replicas(len(self.models.views)):
            self._served.step(samples=samples)

    def by_replica(self, replica: int) -> None:
        """Copies the new values."""
        self.models.refresh(replica, range(len(self.models.parameters)))

    @property
    def in_replicas(self) -> bool:
        """Whether there are copies."""
        return self._copied

    def finish(self) -> None:
        """Also: copies are as the model."""
        super().finish()
        if self._copied:
            self.models.note_updated()


# -- which of them ---------------------------------------------------------------------


def _served(optimizers: Sequence[Optimizer]) -> list[DistributedOptimizer]:
    return [o for o in optimizers if isinstance(o, DistributedOptimizer)]


def check_optimizers(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Refuses optimizers that replicas of ``model`` cannot feed.

    Raises:
        UnsupportedOptimizerError: says why.
    """
    if _served(optimizers) and len(optimizers) > 1:
        raise UnsupportedOptimizerError(
            "ReplicaExecutor: a DistributedOptimizer beside another optimizer. Pass "
            "all torch optimizers to one DistributedOptimizer, as a list."
        )
    for optimizer in optimizers:
        if needs_closure(optimizer):
            raise UnsupportedOptimizerError(
                f"ReplicaExecutor: {type(optimizer).__name__}.step() evaluates the "
                "model by a closure, but replicas evaluate it once per step. Use an "
                "optimizer whose step() needs none."
            )
    check_parameters(optimizers, {id(parameter) for parameter in model.parameters()})


def check_parameters(optimizers: Sequence[Optimizer], known: Collection[int]) -> None:
    """Refuses optimizers of parameters whose ``id`` is not known.

    Raises:
        UnsupportedOptimizerError: says what to do.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(id(parameter) not in known for parameter in group["params"]):
                raise UnsupportedOptimizerError(
                    f"ReplicaExecutor: the {type(optimizer).__name__} trains a "
                    "parameter that was not in the model when the executor was made, "
                    "so that replicas cannot have gradients of it. Make it a parameter "
                    "of the model, and a new executor."
                )


def copied(optimizers: Sequence[Optimizer], model: nn.Module, reduce: str) -> set[int]:
    """``id`` of the parameters of which replicas have copies."""
    if reduce != "allreduce":
        return set()
    tables: set[int] = set()
    for served in _served(optimizers):
        # Whole tables would be copied after every step; rows may come from servers.
        placed = served.trained.placement.tables
        tables |= {id(table.found.weight) for table in placed}
    return {id(parameter) for parameter in model.parameters()} - tables


def choose(
    optimizers: Sequence[Optimizer],
    models: ReplicaModels,
    reduce: str,
    owned: Sequence[Sequence[int]],
) -> Update:
    """The update that fits optimizers and mode."""
    copies = reduce == "allreduce"
    for served in _served(optimizers):
        return ServedUpdate(served, models, copies)
    if copies:
        return CopiedUpdate(optimizers, models)
    return OwnedUpdate(optimizers, models, owned)
