# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What all strategies have in common: immutable settings under a name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch_cpudist import _core
from torch_cpudist.settings import fields as config
from torch_cpudist.settings.communicator import Communicator
from torch_cpudist.settings.delay_compensation import DelayCompensation
from torch_cpudist.settings.fields import Server, Sharding, settings
from torch_cpudist.settings.outer import Outer
from torch_cpudist.settings.replicas import Replicas

if TYPE_CHECKING:
    from torch_cpudist.launch.layout import Trainers
    from torch_cpudist.settings.clip import Clip

_SECTIONS = {
    "sharding": Sharding,
    "server": Server,
    "communicator": Communicator,
    "replicas": Replicas,
    "outer": Outer,
    "delay_compensation": DelayCompensation,
}


@dataclass(frozen=True)
class Updates:
    """When servers apply gradients.

    Attributes:
        on_arrival: each push as it comes, instead of in rounds.
        max_staleness: updates; no gradient is applied later than so many after the
            values that it was computed on were read. ``None`` is no bound.
        exchanges_deltas: trainers step by themselves; a push says what they moved, and
            its reply what the others did.
        outer: what is done with the mean of deltas, in rounds. ``None`` adds each.
        groups: in rounds, the group of every trainer, by rank, numbered in the order of
            their lowest ranks; each has rounds of its own. Empty: all are one.
        delay_compensation: how late gradients are corrected. ``None``: not at all.
        communicator: of which ``wire_dtype`` and ``pull_dtype`` are read.
    """

    on_arrival: bool = False
    max_staleness: int | None = None
    exchanges_deltas: bool = False
    outer: Outer | None = None
    groups: tuple[int, ...] = ()
    delay_compensation: DelayCompensation | None = None
    communicator: Communicator = field(default_factory=Communicator)

    def served(
        self, rules: Sequence[_core.OptimizerConfig | None]
    ) -> list[_core.OptimizerConfig]:
        """What servers run for each parameter group, given what its optimizer does."""
        if not self.exchanges_deltas:
            return [rule for rule in rules if rule is not None]
        # A push is a negated movement: the update adds it.
        outer = self.outer or Outer()
        rule = _core.OptimizerConfig(
            "sgd", lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov
        )
        return [rule for _ in rules]


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
    # Whether it trains models that are on a CUDA device.
    takes_devices: ClassVar[bool] = False

    sharding: Sharding = field(default_factory=Sharding, metadata={"section": True})
    server: Server = field(default_factory=Server, metadata={"section": True})
    replicas: Replicas = field(default_factory=Replicas, metadata={"section": True})

    def __post_init__(self) -> None:
        """Turns dicts into settings and checks the fields."""
        defaults = {entry.name: entry.default for entry in fields(self)}
        for name, kind in _SECTIONS.items():
            if name not in defaults:
                continue
            if getattr(self, name) is None and defaults[name] is None:
                continue  # switched off
            value: Any = config.from_mapping(kind, getattr(self, name))
            object.__setattr__(self, name, value)
        config.check(self)

    @property
    def local(self) -> bool:
        """Whether the optimizer of dense parameters runs on the trainer."""
        return False

    @property
    def shows_state(self) -> bool:
        """Whether a wrapped optimizer has its whole state while it is wrapped."""
        return self.local

    def check_clip(self, clip: Clip | None) -> None:
        """Refuses clipping that this strategy cannot do.

        Raises:
            UnsupportedOptimizerError: says what there is.
        """

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
