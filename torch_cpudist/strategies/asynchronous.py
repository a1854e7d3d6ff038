# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of the Async strategy."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from torch_cpudist.errors import ConfigurationError
from torch_cpudist.settings.communicator import QUEUE_FIELDS, Communicator
from torch_cpudist.settings.delay_compensation import DelayCompensation
from torch_cpudist.settings.fields import MAX_BYTES, settings
from torch_cpudist.settings.updates import Trainers, Updates
from torch_cpudist.strategies.base import Strategy

_MAX_MERGE = 2


@settings
class Async(Strategy):
    """Trainers push and go on; servers apply each push as it comes.

    Every gradient is applied exactly once. No trainer waits for another, unless
    ``max_staleness`` makes it. Cost per step: that of ``Sync``.

    Attributes:
        communicator: queue, merging, pulling and the wire of a trainer; a dict is
            accepted.
        max_staleness: updates by which a gradient may be late, at least the number of
            trainers less one. A push that would make another trainer's gradient older
            waits on the server, and each step waits for its own update. ``None`` is no
            bound. ``CPUDIST_ASYNC_MAX_STALENESS``.
        delay_compensation: how servers correct gradients for the updates that they
            missed; a dict is accepted. ``None`` is not at all.
    """

    name: ClassVar[str] = "async"
    keeps_averages: ClassVar[bool] = True
    takes_devices: ClassVar[bool] = True
    takes_remote_tables: ClassVar[bool] = True

    communicator: Communicator = field(
        default_factory=Communicator, metadata={"section": True, "only": QUEUE_FIELDS}
    )
    max_staleness: int | None = field(
        default=None, metadata={"least": 0, "most": MAX_BYTES, "unit": "updates"}
    )
    delay_compensation: DelayCompensation | None = field(
        default=None, metadata={"section": DelayCompensation}
    )

    def __post_init__(self) -> None:
        """Checks the fields, and that they fit together."""
        super().__post_init__()
        if not self.communicator.overlap:
            raise ConfigurationError(
                "Async(communicator=Communicator(overlap=False)): pushes of Async wait "
                "in a queue beside training, and no gradient goes before its push. "
                "Leave overlap at True."
            )
        if self.max_staleness is not None and self.communicator.pull_every != 1:
            raise ConfigurationError(
                f"Async(max_staleness={self.max_staleness}) with Communicator("
                f"pull_every={self.communicator.pull_every}): dense values would grow "
                "older than the bound. Leave pull_every at 1, or max_staleness at None."
            )

        if self.delay_compensation is not None and self.max_merge != 1:
            raise ConfigurationError(
                f"Async(delay_compensation=...) with Communicator(max_merge="
                f"{self.max_merge}): gradients that were computed on different values "
                "cannot be corrected as one. Leave max_merge at None, or set it to 1."
            )

    @property
    def max_merge(self) -> int:
        """Waiting pushes that travel as one update, at most."""
        if self.communicator.max_merge is not None:
            return self.communicator.max_merge
        return _MAX_MERGE if self.delay_compensation is None else 1

    @property
    def learns_lookups(self) -> bool:
        """Whether the communicator says so."""
        return self.communicator.learn_lookups

    def updates(self, trainers: Trainers) -> Updates:
        """When the servers apply this strategy's gradients.

        Raises:
            ConfigurationError: fields of ``delay_compensation`` do not fit together.
        """
        if self.delay_compensation is not None:
            self.delay_compensation.check_whole()
        return Updates(
            on_arrival=True,
            max_staleness=self.max_staleness,
            delay_compensation=self.delay_compensation,
            communicator=self.communicator,
        )
