# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which rows of a table without a vocabulary go again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.settings.admission import is_whole

_U31, _U32, _U62 = 2**31 - 1, 2**32 - 1, 2**62 - 1
_ORDERS = ("lru", "lfu")


@dataclass(frozen=True)
class Evict:
    """Rows that have been of no use for a while go, and make room.

    A row goes when all that is given of ``unseen_steps``, ``unseen_s`` and
    ``min_count`` says so; with ``max_rows``, others go too while there are more. Every
    update looks at some rows, so that one whose time has come may stay for some
    updates; ``opt.shrink()`` looks at all of them. A row of the update under way stays.

    An evicted key has no row: it reads its initial value again, its optimizer state is
    gone, and it has to pass the table's admission again. Under Sync the same pushes
    evict the same rows in every run, but for ``unseen_s``, which asks a clock.

    Attributes:
        unseen_steps: updates of the parameter set since the row's last one.
        unseen_s: seconds since then, by the server's clock.
        min_count: a row with as many updates stays. Not by itself: with
            ``unseen_steps`` or ``unseen_s``, which give a row time to be counted.
        max_rows: of the table, over all servers, each of which has its share.
        order: with ``max_rows``, who goes first: ``"lru"``, whose last update is
            longest ago, or ``"lfu"``, who had the fewest.

    Raises:
        InvalidArgumentError: a value is out of range, or nothing is given.
    """

    unseen_steps: int | None = field(default=None, metadata={"unit": "updates"})
    unseen_s: float | None = field(default=None, metadata={"unit": "s"})
    min_count: int | None = None
    max_rows: int | None = field(default=None, metadata={"unit": "rows"})
    order: str = "lru"

    def __post_init__(self) -> None:
        """Checks the values."""
        _check_whole("unseen_steps", self.unseen_steps, _U31)
        _check_whole("min_count", self.min_count, _U32)
        _check_whole("max_rows", self.max_rows, _U62)
        _check_seconds(self.unseen_s)
        timed = self.unseen_steps is not None or self.unseen_s is not None
        if not timed and self.max_rows is None:
            raise InvalidArgumentError(
                "Evict: expected unseen_steps=, unseen_s= or max_rows=, without which "
                + ("nothing is ever evicted" if self.min_count is None else _TOO_SOON)
            )
        if self.min_count is not None and not timed:
            raise InvalidArgumentError(
                f"Evict: min_count={self.min_count} without unseen_steps= or "
                f"unseen_s=, without which {_TOO_SOON}"
            )
        if self.order not in _ORDERS:
            raise InvalidArgumentError(
                f"Evict: order must be 'lru' or 'lfu', got {self.order!r}"
            )
        if self.order != "lru" and self.max_rows is None:
            raise InvalidArgumentError(
                f"Evict: order={self.order!r} says who goes while there are more than "
                "max_rows=, which is not given"
            )

    @property
    def unseen_ms(self) -> int:
        """``unseen_s`` as servers are told it; 0: not given."""
        return 0 if self.unseen_s is None else max(round(self.unseen_s * 1000), 1)


_TOO_SOON = (
    "a new row would go before its key could come for a second time. Say for how long "
    "it has to be unseen, too"
)


def _check_whole(name: str, value: object, most: int) -> None:
    if value is None:
        return
    if not is_whole(value) or not 1 <= value <= most:  # type: ignore[operator]
        raise InvalidArgumentError(
            f"Evict: {name} must be a whole number from 1 to {most}, got {value!r}"
        )


def _check_seconds(value: object) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 < value <= _U32:  # type: ignore[arg-type, operator]
        raise InvalidArgumentError(
            f"Evict: unseen_s must be seconds above 0 and at most {_U32}, got {value!r}"
        )
