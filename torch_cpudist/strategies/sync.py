# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of the Sync strategy."""

from __future__ import annotations

from typing import ClassVar

from torch_cpudist.config import settings
from torch_cpudist.strategies.base import Strategy


@settings
class Sync(Strategy):
    """Every step is a round: servers average all members' gradients and update once.

    Equals one process on the joined batch, bit for bit the same from run to run. Cost
    per step: one push and its reply per server, and one pull per server and lookup.
    Fields: see ``Strategy``.
    """

    name: ClassVar[str] = "sync"
