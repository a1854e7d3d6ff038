# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a table without a vocabulary is told: which rows it has, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.settings.admission import CountFilter, Probability, is_whole
from torch_cpudist.settings.eviction import Evict

_MOST_ROWS = 2**62 - 1
UNKNOWN = ("initial", "zeros")


@dataclass(frozen=True)
class OpenTable:
    """Of one table; see ``Embedding``.

    Attributes:
        unknown: what a key without a row reads: its initial value, or zeros.
        max_rows: of it, over all servers, beyond which an update is refused; ``None``:
            as many as there is memory for.
        admission: which keys get a row; ``None``: every one that is pushed.
        eviction: which rows go again; ``None``: none.

    Raises:
        InvalidArgumentError: a value is none of these, or two exclude each other.
    """

    unknown: str = "initial"
    max_rows: int | None = None
    admission: CountFilter | Probability | None = None
    eviction: Evict | None = None

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.unknown not in UNKNOWN:
            raise InvalidArgumentError(
                f"unknown must be 'initial' or 'zeros', got {self.unknown!r}"
            )
        if not isinstance(self.admission, (CountFilter, Probability, type(None))):
            raise InvalidArgumentError(
                "admission must be a cpudist.CountFilter or Probability, got "
                f"{self.admission!r}"
            )
        if not isinstance(self.eviction, (Evict, type(None))):
            raise InvalidArgumentError(
                f"eviction must be a cpudist.Evict, got {self.eviction!r}"
            )
        most = self.max_rows
        if most is None:
            return
        if not is_whole(most) or not 1 <= most <= _MOST_ROWS:
            raise InvalidArgumentError(
                f"max_rows must be a whole number from 1 to 2**62 - 1, got {most!r}"
            )
        if self.eviction is not None and self.eviction.max_rows is not None:
            raise InvalidArgumentError(
                f"max_rows={most} refuses updates that would make more rows, and "
                f"Evict(max_rows={self.eviction.max_rows}) evicts others for them: "
                "give one of the two"
            )
