# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which keys of a table without a vocabulary get a row."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch_cpudist.errors import InvalidArgumentError

# Of one counter, which saturates there.
MOST_COUNTED = 15
# A cache line; as many as no memory has.
_LEAST_SKETCH, _MOST_SKETCH = 64, 2**40 - 64


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class CountFilter:
    """A key gets its row with the ``n``-th push that names it.

    It counts once per trainer and push, however often it stands in the batch; a push
    without weight (``step(samples=0)`` in a round of others' samples) does not. The
    push that makes the row is applied; what came before is counted as ``filtered`` and
    dropped. Keys are counted in a sketch, which may count one too often (it is then
    admitted earlier), and never too seldom until counters are halved, after every
    ``2 * sketch_bytes`` that were counted. Under Sync the same pushes admit the same
    keys in every run. A key that was evicted has to be counted again. With lossy pushes
    (``Communicator(push_dtype=)``) the part of a dropped gradient that rounding held
    back goes with the key's next push.

    Cost: ``sketch_bytes`` on every server, two counters a byte, and some nanoseconds
    for each key of a push that has no row.

    Attributes:
        n: 1 to 15; 1 admits every key.
        sketch_bytes: of counters, per server and table, at least 64. A sketch of twice
            as many bytes as there are keys without a row seldom counts too much.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    n: int
    sketch_bytes: int = field(default=64 << 20, metadata={"unit": "bytes"})

    def __post_init__(self) -> None:
        """Checks the values."""
        if not is_whole(self.n) or not 1 <= self.n <= MOST_COUNTED:
            raise InvalidArgumentError(
                f"CountFilter: n must be a whole number from 1 to {MOST_COUNTED}, as "
                f"counters have 4 bits, got {self.n!r}"
            )
        size = self.sketch_bytes
        if not is_whole(size) or not _LEAST_SKETCH <= size <= _MOST_SKETCH:
            raise InvalidArgumentError(
                f"CountFilter: sketch_bytes must be {_LEAST_SKETCH} to {_MOST_SKETCH}, "
                f"got {size!r}"
            )


@dataclass(frozen=True)
class Probability:
    """A key gets a row with this probability, decided once for each key.

    By the table's seed and the key alone: no memory, and the same keys whenever and
    wherever they come. The pushes of others are counted as ``filtered`` and dropped.

    Attributes:
        p: the share of keys that get a row, above 0 and at most 1.

    Raises:
        InvalidArgumentError: it is out of range.
    """

    p: float

    def __post_init__(self) -> None:
        """Checks the value."""
        number = isinstance(self.p, (int, float)) and not isinstance(self.p, bool)
        if not number or not math.isfinite(self.p) or not 0 < self.p <= 1:
            raise InvalidArgumentError(
                f"Probability: p must be > 0 and <= 1, got {self.p!r}"
            )


#: What a table's ``admission`` may be.
Admission = CountFilter | Probability
