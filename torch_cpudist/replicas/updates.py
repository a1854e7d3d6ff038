# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who runs the optimizer once the gradients of replicas are summed.

- ``OwnedUpdate``: each owner steps its own parameters; the calling thread all of them,
  where an optimizer may look at several at once.
- ``CopiedUpdate``: every replica steps its own copies.
- ``ServedUpdate``: a ``DistributedOptimizer`` steps; copies are refreshed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist import optim
from torch_cpudist.errors import UnsupportedOptimizerError
from torch_cpudist.log import logger
from torch_cpudist.optimizer import DistributedOptimizer
from torch_cpudist.optimizer_groups import needs_closure
from torch_cpudist.replicas import own_state
from torch_cpudist.replicas.models import ReplicaModels
from torch_cpudist.replicas.row_parts import OwnersState, RowParts

# What these do to a parameter depends on nothing but its own gradient and state.
_BY_PARAMETER: frozenset[type[Optimizer]] = frozenset(
    {
        optim.FTRL,
        optim.RowWiseAdagrad,
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    }
)
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether parts of an optimizer's parameters may be stepped by themselves."""
    hooked = any(getattr(optimizer, name) for name in _HOOKS)
    return type(optimizer) in _BY_PARAMETER and not hooked


def _likeness(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and options, to be given groups and state."""
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a scheduler's wrapper, of the original
    for name in _HOOKS:
        made.__dict__[name] = OrderedDict()
    return made


def _groups(
    optimizer: Optimizer, own: Callable[[torch.Tensor], torch.Tensor | None]
) -> list[dict[str, Any]]:
    """Groups with today's options, of the parameters that ``own`` gives for theirs."""
    return [
        {
            **group,
            "params": [p for p in map(own, group["params"]) if p is not None],
        }
        for group in optimizer.param_groups
    ]


class Update(ABC):
    """Runs the optimizers of an executor. Not thread-safe."""

    def __init__(self, optimizers: Sequence[Optimizer], models: ReplicaModels) -> None:
        """Updates the parameters of ``models`` by ``optimizers``."""
        self.optimizers = list(optimizers)
        self.models = models

    def prepare(self, at_once: bool) -> None:  # noqa: B027
        """Takes what has changed in the optimizers; before the calls of a step.

        Args:
            at_once: an owner's sums are updated without anybody looking at them before.
        """

    def sums_itself(self, index: int) -> bool:
        """Whether ``by_owner`` sums the gradients of a parameter."""
        return False

    @abstractmethod
    def by_owner(self, owner: int) -> None:
        """Steps what an owner has; run by its thread, once its sums are in the model.

        Sums of other owners may not be there yet.
        """

    @abstractmethod
    def by_replica(self, replica: int) -> None:
        """The rest of a replica's part; run by its thread, when all sums are there."""

    def by_caller(self, samples: int | None) -> None:  # noqa: B027
        """The caller's part, after ``by_owner`` and before ``by_replica``."""

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
        self._parts = [[_likeness(o) for o in self.optimizers] for _ in owned]
        self._tables = _row_parts(self.optimizers, models, len(owned))
        self._dealt: dict[int, RowParts] = {}
        self._apart = all(map(steps_by_parameter, self.optimizers))
        if not self._apart:
            logger.info(
                "ReplicaExecutor: one thread runs step() of %s, which may look at "
                "several parameters at once",
                ", ".join(type(optimizer).__name__ for optimizer in self.optimizers),
            )

    def prepare(self, at_once: bool) -> None:
        """Takes the groups' options, and the state in case that it was loaded."""
        # Step hooks may have come since the last step.
        self._apart = all(map(steps_by_parameter, self.optimizers))
        if not self._apart:
            return
        for table in self._tables:
            table.prepare([own[table.index].grad for own in self.models.views])
        self._dealt = {t.index: t for t in self._tables if t.active and at_once}
        for owner, parts in enumerate(self._parts):
            for part, whole in zip(parts, self.optimizers, strict=True):
                part.param_groups = _groups(whole, self._own(owner))
                dealt = [t for t in self._dealt.values() if t.optimizer is whole]
                part.state = OwnersState(whole.state, dealt, owner)  # type: ignore[assignment]

    def _own(self, owner: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
        """What an owner steps for a parameter: itself, an alias or nothing."""
        alias_of = {id(t.weight): t.aliases[owner] for t in self._dealt.values()}

        def own(parameter: torch.Tensor) -> torch.Tensor | None:
            if id(parameter) in alias_of:
                return alias_of[id(parameter)]
            mine = self._owner_of[id(parameter)] == owner
            return parameter if mine else None

        return own

    def sums_itself(self, index: int) -> bool:
        """Rows of tables are dealt to all owners."""
        return index in self._dealt

    def by_owner(self, owner: int) -> None:
        """Steps this owner's parameters, and its rows of tables."""
        if not self._apart:
            return
        for table in self._dealt.values():
            table.take(owner)
        for part in self._parts[owner]:
            part.step()

    def by_caller(self, samples: int | None) -> None:
        """Steps as a whole what cannot be stepped by owners."""
        if not self._apart:
            for optimizer in self.optimizers:
                optimizer.step()

    def finish(self) -> None:
        """Also: puts what was dealt together again."""
        super().finish()
        for table in self._dealt.values():
            table.finish()
            for own in self.models.views:
                own[table.index].grad = None
        self._dealt = {}

    def by_replica(self, replica: int) -> None:
        """Replicas have no values of their own."""


def _row_parts(
    optimizers: Sequence[Optimizer], models: ReplicaModels, owners: int
) -> list[RowParts]:
    """The tables of a model whose rows owners can deal among themselves."""
    sparse = models.sparse_weights()
    index_of = {id(parameter): i for i, parameter in enumerate(models.parameters)}
    return [
        RowParts(weight, index_of[id(weight)], optimizer, owners)
        for optimizer in optimizers
        if RowParts.fits(optimizer) and owners > 1
        for group in optimizer.param_groups
        for weight in group["params"]
        if id(weight) in sparse
    ]


class CopiedUpdate(Update):
    """Every replica steps its own copies; the first one's are the model's."""

    def __init__(self, optimizers: Sequence[Optimizer], models: ReplicaModels) -> None:
        """Gives every replica an optimizer with state of its own."""
        super().__init__(optimizers, models)
        self._own: list[list[Optimizer]] = []
        # What all replicas had after the last step.
        self._common: list[Any] | None = None

    def copies(self) -> list[Optimizer]:
        """The optimizers of all replicas but the first."""
        return [made for own in self._own for made in own]

    def prepare(self, at_once: bool) -> None:
        """Takes the groups' options, and state that others than replicas wrote."""
        replicas = range(1, len(self.models.views))
        # Loaded, cleared or edited, or stepped by another executor.
        written = self._common is None or self._common != own_state.marks(
            self.optimizers
        )
        # Until ``finish`` replicas may be at different steps.
        self._common = None
        self.models.expect_update()
        if written:
            self._own = [[_likeness(o) for o in self.optimizers] for _ in replicas]
        for replica, own in zip(replicas, self._own, strict=True):
            pairs = zip(self.models.parameters, self.models.views[replica], strict=True)
            view_of = {id(parameter): view for parameter, view in pairs}
            for made, whole in zip(own, self.optimizers, strict=True):
                made.param_groups = _groups(whole, lambda p: view_of[id(p)])  # noqa: B023
                if written:
                    made.state = own_state.copied(whole, view_of)

    def by_owner(self, owner: int) -> None:
        """Nothing: a replica steps when all sums are there."""

    def by_replica(self, replica: int) -> None:
        """Steps this replica's copies with the common sums."""
        if replica == 0:
            for optimizer in self.optimizers:
                optimizer.step()
            return
        for index, view in enumerate(self.models.views[replica]):
            view.grad = self.models.parameters[index].grad
        for optimizer in self._own[replica - 1]:
            optimizer.step()

    @property
    def in_replicas(self) -> bool:
        """Every replica steps."""
        return True

    def finish(self) -> None:
        """Also: copies have taken the same step as the model."""
        super().finish()
        self.models.note_updated()
        self._common = own_state.marks(self.optimizers)


class ServedUpdate(Update):
    """The calling thread steps a ``DistributedOptimizer``: one push for all."""

    def __init__(
        self, served: DistributedOptimizer, models: ReplicaModels, copied: bool
    ) -> None:
        """``copied``: replicas have copies, to be refreshed."""
        super().__init__([served], models)
        self._served = served
        self._copied = copied

    def by_owner(self, owner: int) -> None:
        """Nothing: one thread steps all."""

    def by_caller(self, samples: int | None) -> None:
        """Steps; ``samples`` weighs this trainer."""
        with self._served._driver.step_of_replicas(len(self.models.views)):
            self._served.step(samples=samples)

    def by_replica(self, replica: int) -> None:
        """Copies the new values."""
        self.models.refresh(replica)

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
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if needs_closure(optimizer):
            raise UnsupportedOptimizerError(
                f"ReplicaExecutor: {type(optimizer).__name__}.step() evaluates the "
                "model by a closure, but replicas evaluate it once per step. Use an "
                "optimizer whose step() needs none."
            )
        for group in optimizer.param_groups:
            if any(id(parameter) not in known for parameter in group["params"]):
                raise UnsupportedOptimizerError(
                    f"ReplicaExecutor: the {type(optimizer).__name__} trains a "
                    "parameter that is not in the model, so that replicas cannot have "
                    "gradients of it. Make it a parameter of the model."
                )


def copied(optimizers: Sequence[Optimizer], model: nn.Module, reduce: str) -> set[int]:
    """``id`` of the parameters of which replicas have copies."""
    if reduce != "allreduce":
        return set()
    tables: set[int] = set()
    for served in _served(optimizers):
        # Whole tables would be copied after every step; rows may come from servers.
        placed = served._open().placement.tables
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
