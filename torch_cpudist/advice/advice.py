# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Advice``: one knob that would help, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Advice:
    """What one thing costs a run, and what to set; ``print`` shows it in words.

    Attributes:
        topic: what it is about: ``threads``, ``replicas``, ``servers``, ``network``,
            ``data`` or ``strategy``.
        text: why, with what was seen, and what to set.
        figures: what was seen, by name; units are last in the names, shares are 0 to 1
            of the time since the warm-up.
    """

    topic: str
    text: str
    figures: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """As one line."""
        return f"{self.topic}: {self.text}"
