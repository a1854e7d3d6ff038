# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of the Sync strategy."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from torch_cpudist.settings.communicator import (
    ROUND_FIELDS,
    Communicator,
    check_without_queue,
)
from torch_cpudist.settings.fields import settings
from torch_cpudist.settings.updates import Trainers, Updates
from torch_cpudist.strategies.base import Strategy


@settings
class Sync(Strategy):
    """Every step is a round: servers average all members' gradients and update once.

    Equals one process on the joined batch, bit for bit the same from run to run. Cost
    per step: one push and its reply per server, and one pull per server, or one per
    server and lookup where lookups cannot be foreseen.

    Attributes:
        communicator: what values travel as: all but what is of a
            queue; a dict is accepted.
    """

    name: ClassVar[str] = "sync"
    keeps_averages: ClassVar[bool] = True
    takes_devices: ClassVar[bool] = True
    takes_remote_tables: ClassVar[bool] = True

    communicator: Communicator = field(
        default_factory=Communicator, metadata={"section": True, "only": ROUND_FIELDS}
    )

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        check_without_queue(self, ROUND_FIELDS)

    @property
    def learns_lookups(self) -> bool:
        """Whether the communicator says so."""
        return self.communicator.learn_lookups

    def updates(self, trainers: Trainers) -> Updates:
        """When the servers apply this strategy's gradients."""
        return Updates(communicator=self.communicator)
