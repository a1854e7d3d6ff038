# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What all strategies have in common: immutable settings under a name."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from torch_cpudist import config
from torch_cpudist.config import Server, Sharding, settings

_SECTIONS = {"sharding": Sharding, "server": Server}


@settings
class Strategy:
    """When a trainer pushes, pulls and waits.

    Attributes:
        sharding: placement of dense parameters; a dict is accepted.
        server: how servers run; a dict is accepted. Servers start in ``init()``, so a
            value other than the default must equal theirs.
    """

    name: ClassVar[str] = ""

    sharding: Sharding = field(default_factory=Sharding, metadata={"section": True})
    server: Server = field(default_factory=Server, metadata={"section": True})

    def __post_init__(self) -> None:
        """Turns dicts into settings and checks the fields."""
        for name, kind in _SECTIONS.items():
            value: Any = config.from_mapping(kind, getattr(self, name))
            object.__setattr__(self, name, value)
        config.check(self)
