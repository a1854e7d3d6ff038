# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whose snapshots they are, and what a run that resumes is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from torch_cpudist._version import __version__
from torch_cpudist.drivers.base import Driver
from torch_cpudist.resuming.own_state import ReadsAhead
from torch_cpudist.snapshot.manifest import Manifest, Version

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run


@dataclass(frozen=True)
class Started:
    """Where a run goes on, as ``resume`` found it.

    Attributes:
        step: steps that this trainer has made; 0 where there was no snapshot.
        name: of the snapshot; ``None`` if there was none.
        report: what was and what was not taken from it, as sentences.
        taken: tables and dense parameters that have the snapshot's values: names in the
            snapshot by names in the model.
        missing: why not, of the others that were asked for, by name in the model.
        unused: names in the snapshot of which nothing was taken.
    """

    step: int = 0
    name: str | None = None
    report: tuple[str, ...] = ()
    taken: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


class Counters(Protocol):
    """What an optimizer has done."""

    def counters(self) -> dict[str, int]:
        """Steps, samples and rounds."""

    def set_counters(self, counted: Mapping[str, int]) -> None:
        """Goes on from there."""


@dataclass(frozen=True)
class Subject:
    """Whose snapshots they are.

    Attributes:
        run: this trainer's.
        model: the wrapped one.
        groups: parameter groups of the optimizer.
        driver: of its strategy.
        strategy: its name and what it was given, for the manifest.
        average_decay: of the average that is kept; 0 for none.
        counters: of the optimizer.
        readers: what reads datasets ahead, as of when it is asked.
        generators: of replicas, as of then.
        number: which of the run's optimizers it is.
    """

    run: Run
    model: nn.Module
    groups: Sequence[dict[str, Any]]
    driver: Driver
    strategy: tuple[str, Mapping[str, Any]]
    average_decay: float
    counters: Counters
    readers: Sequence[ReadsAhead]
    generators: list[torch.Generator]
    number: int

    def described(self) -> Manifest:
        """A manifest, but for what was written; any thread."""
        kind, options = self.strategy
        return Manifest(
            name="snap",
            number=0,
            strategy=kind,
            version=Version(),
            servers=0,
            options=options,
            average_decay=self.average_decay,
            param_set=self.number,
            package=__version__,
        )
