# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What all strategies have in common: immutable settings under a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import field
from typing import Any, ClassVar

from torch_cpudist.errors import UnsupportedOptimizerError
from torch_cpudist.settings import fields
from torch_cpudist.settings.average import EMA
from torch_cpudist.settings.clip import Clip
from torch_cpudist.settings.communicator import Communicator
from torch_cpudist.settings.delay_compensation import DelayCompensation
from torch_cpudist.settings.fields import settings
from torch_cpudist.settings.outer import Outer
from torch_cpudist.settings.replicas import Replicas
from torch_cpudist.settings.server import Server
from torch_cpudist.settings.sharding import Sharding
from torch_cpudist.settings.updates import Trainers, Updates

_SECTIONS = {
    "sharding": Sharding,
    "server": Server,
    "communicator": Communicator,
    "replicas": Replicas,
    "outer": Outer,
    "delay_compensation": DelayCompensation,
}


@settings
class Strategy:
    """When a trainer pushes, pulls and waits.

    Attributes:
        sharding: placement of dense parameters; a dict is accepted.
        server: how servers run; a dict is accepted. Servers start in ``init()``, so a
            value other than the default must equal theirs.
        replicas: how a ``ReplicaExecutor`` over the optimizer runs; a dict is accepted.
    """

    name: ClassVar[str] = ""
    # Whether servers update all parameters, and can keep averages of them.
    keeps_averages: ClassVar[bool] = False
    # Whether it trains models that are on a CUDA device.
    takes_devices: ClassVar[bool] = False
    # Whether it trains tables whose rows are on servers only.
    takes_remote_tables: ClassVar[bool] = False
    # Whether servers may refuse such a row a place, or take it away.
    takes_rows_that_go: ClassVar[bool] = True

    sharding: Sharding = field(default_factory=Sharding, metadata={"section": True})
    server: Server = field(default_factory=Server, metadata={"section": True})
    replicas: Replicas = field(default_factory=Replicas, metadata={"section": True})

    def __post_init__(self) -> None:
        """Turns dicts into settings and checks the fields."""
        defaults = {entry.name: entry.default for entry in dataclasses.fields(self)}
        for name, kind in _SECTIONS.items():
            if name not in defaults:
                continue
            if getattr(self, name) is None and defaults[name] is None:
                continue  # switched off
            value: Any = fields.from_mapping(kind, getattr(self, name))
            object.__setattr__(self, name, value)
        fields.check(self)

    @property
    def of_tables(self) -> Strategy:
        """What trains the tables of a model under this strategy."""
        return self

    @property
    def local(self) -> bool:
        """Whether the optimizer of dense parameters runs on the trainer."""
        return False

    @property
    def shows_state(self) -> bool:
        """Whether a wrapped optimizer has its whole state while it is wrapped."""
        return self.local

    @property
    def learns_lookups(self) -> bool:
        """Whether the rows of a forward are asked for before its lookups do."""
        return False

    def check_clip(self, clip: Clip | None) -> None:
        """Refuses clipping that this strategy cannot do.

        Raises:
            UnsupportedOptimizerError: says what there is.
        """

    def check_average(self, average: EMA | None) -> None:
        """Refuses an average that no server can keep.

        Raises:
            UnsupportedOptimizerError: parameters are updated on trainers.
        """
        if average is not None and not self.keeps_averages:
            raise UnsupportedOptimizerError(
                f"average={average} under {type(self).__name__}: servers keep averages "
                "of all parameters, which they update themselves, and here trainers "
                "update some or all. Use Sync, HalfAsync or Async; or, where no table "
                "is remote, average on every trainer, with "
                "torch.optim.swa_utils.AveragedModel(model)."
            )

    @property
    def keeps_state(self) -> bool:
        """Whether optimizer state of some parameter is on the trainer."""
        return self.local

    def updates(self, trainers: Trainers) -> Updates:
        """When the servers apply this strategy's gradients.

        Args:
            trainers: of the run.

        Raises:
            ConfigurationError: the strategy does not fit them.
        """
        return Updates()


def _bare(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "")


def kind_named(name: str, kinds: Iterable[type[Strategy]]) -> type[Strategy] | None:
    """The one of ``kinds`` with this name; case, ``-`` and ``_`` do not matter."""
    return next((kind for kind in kinds if _bare(kind.name) == _bare(name)), None)
