# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of the Geo strategy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import ClassVar

from torch.optim import SGD, Optimizer

from torch_cpudist.errors import ConfigurationError
from torch_cpudist.settings.communicator import (
    EXCHANGE_FIELDS,
    Communicator,
    check_without_queue,
)
from torch_cpudist.settings.fields import settings
from torch_cpudist.settings.outer import Outer
from torch_cpudist.settings.updates import Trainers, Updates
from torch_cpudist.strategies.base import Strategy

# An interval that follows the steps made is this part of them.
EARLY_PARTS = 10
LONGEST_INTERVAL = 100


@settings
class Geo(Strategy):
    """Trainers step by themselves and exchange what they moved, in the background.

    The optimizer runs on the trainer, so any of ``torch.optim`` will do for dense
    parameters. Cost: every ``push_every`` steps one push and its reply per server, with
    the rows touched meanwhile out, the rows that others changed back, and all dense
    values both ways.

    Attributes:
        push_every: steps of a trainer from one exchange to the next, >= 1; a step of a
            ``ReplicaExecutor`` counts once for each of its replicas. ``None``: a tenth
            of the steps that this trainer has made, from 1 to 100, because trainers
            that part early in training do not come together again; with ``outer`` 100.
            An exchange ends before the next begins. ``CPUDIST_GEO_PUSH_EVERY``.
        exchange_budget: ``None``: steps share the work of an exchange so that it is
            over when the next is due, and the step at which that is waits if it is not,
            but with ``outer`` never for other trainers. A number, from 0.001 to 1: the
            share of a step's time that the training thread spends on an exchange after
            each step until it is over; one that takes longer than ``push_every`` steps
            delays the next, is counted, and warns once.
            ``CPUDIST_GEO_EXCHANGE_BUDGET``.
        outer_step: where movements are averaged, what the servers move by, in means of
            the trainers' movements; with N trainers at most N, which is their sum.
            ``None`` is 1, but of tables under ``merge_rule="auto"`` the square root of
            N. Equal on all trainers. ``CPUDIST_GEO_OUTER_STEP``.
        outer: an optimizer over the mean of the trainers' movements, one step when each
            live trainer has handed one on; a dict is accepted. ``None`` adds each
            trainer's share, whenever it comes.
        cache_bytes: what rows of remote tables that this trainer has updated may take
            here, with their optimizer state. Beyond it the next exchange hands on all
            that the longest untouched ones have moved and gives them up; state of such
            a row begins anew when it is updated again. ``CPUDIST_GEO_CACHE_BYTES``.
        communicator: what values travel as, ``wire_dtype`` and ``pull_dtype``, and
            whether movements add up or are averaged, ``merge_rule``, equal on all
            trainers; a dict is accepted.
    """

    name: ClassVar[str] = "geo"
    takes_remote_tables: ClassVar[bool] = True
    takes_rows_that_go: ClassVar[bool] = False

    push_every: int | None = field(
        default=None, metadata={"least": 1, "most": 2**31 - 1, "unit": "steps"}
    )
    exchange_budget: float | None = field(
        default=None, metadata={"least": 0.001, "most": 1.0, "unit": "step times"}
    )
    outer_step: float | None = field(
        default=None, metadata={"least": 0.01, "most": 1e6, "unit": "means"}
    )
    outer: Outer | None = field(default=None, metadata={"section": Outer})
    cache_bytes: int = field(
        default=256 << 20, metadata={"least": 0, "most": 2**63 - 1, "unit": "bytes"}
    )
    communicator: Communicator = field(
        default_factory=Communicator,
        metadata={"section": True, "only": EXCHANGE_FIELDS},
    )

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_without_queue(self, EXCHANGE_FIELDS)
        if self.outer is not None and self.communicator.merge_rule == "sum":
            raise ConfigurationError(
                "Geo(outer=..., communicator=Communicator(merge_rule='sum')): an outer "
                "optimizer steps on the mean of the movements. Leave merge_rule at "
                "'auto', or outer at None."
            )
        if self.outer_step is not None and self.outer is not None:
            raise ConfigurationError(
                "Geo(outer=..., outer_step=...): an outer optimizer has a step of its "
                "own. Set Outer(lr=...), or leave outer at None."
            )
        if self.outer_step is not None and self.communicator.merge_rule == "sum":
            raise ConfigurationError(
                "Geo(outer_step=..., communicator=Communicator(merge_rule='sum')): "
                "movements that add up have no mean to step by. Set merge_rule='mean', "
                "or leave outer_step at None."
            )

    def interval(self, batches: int) -> int:
        """Steps from an exchange to the next, for a trainer that has made so many."""
        if self.push_every is not None:
            return self.push_every
        if self.outer is not None:
            return LONGEST_INTERVAL
        return min(max(batches // EARLY_PARTS, 1), LONGEST_INTERVAL)

    def averages(self, inners: Iterable[Optimizer], tables: Iterable[str]) -> bool:
        """Whether servers end with the mean of the trainers' movements, not the sum.

        Args:
            inners: the optimizers that are stepped; none by ``Hybrid``, which has
                another part step them.
            tables: for each table the rule that updates its rows, as ``"sgd"``.
        """
        rule = self.communicator.merge_rule
        if rule == "auto":
            adds_up = all(isinstance(inner, SGD) for inner in inners)
            return not (adds_up and all(kind == "sgd" for kind in tables))
        return rule == "mean"

    @property
    def local(self) -> bool:
        """The optimizer runs on the trainer."""
        return True

    def updates(self, trainers: Trainers) -> Updates:
        """When the servers apply this strategy's gradients.

        Raises:
            ConfigurationError: fields of ``outer`` do not fit together.
        """
        if self.outer is not None:
            self.outer.check_whole()
        return Updates(
            on_arrival=self.outer is None,
            exchanges_deltas=True,
            outer=self.outer,
            communicator=self.communicator,
        )
