# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What trainers tell each other with the gradients of a step, as numbers that add up.

Every trainer learns the sum over all. The numbers are small enough for float32 to hold
every sum exactly, so that they can travel behind gradients: at most ``MOST_TRAINERS``
summands of 8 bits stay below 2**24, and so do squares of 4 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch_cpudist.collective.rows import Rows

MOST_TRAINERS = 65_535
_BY_SAMPLES, _AGAIN, _WEIGHT = 0, 1, 2
_WEIGHT_DIGITS, _WEIGHT_BITS = 7, 8  # samples are below 2**53
_DIGEST = _WEIGHT + _WEIGHT_DIGITS
_DIGEST_DIGITS, _DIGEST_BITS = 12, 4
_FIXED = _DIGEST + 2 * _DIGEST_DIGITS
# One trainer tells a number of rows, the others add 0.
_COUNT_DIGITS, _COUNT_BITS = 2, 24

Presence = Sequence[object | None]


def digest(lines: Sequence[str]) -> int:
    """A number that is another one, as good as always, for other lines."""
    made = hashlib.blake2b("\n".join(lines).encode(), digest_size=6)
    return int.from_bytes(made.digest(), "little")


def _digits(number: int, count: int, bits: int) -> list[float]:
    mask = (1 << bits) - 1
    return [float(number >> (bits * i) & mask) for i in range(count)]


def _number(digits: Sequence[float], bits: int) -> int:
    return sum(int(digit) << (bits * i) for i, digit in enumerate(digits))


@dataclass(frozen=True)
class Header:
    """The sum of what all trainers told.

    Attributes:
        by_samples: how many trainers weigh by samples.
        again: how many sent what is not their gradient.
        weight: of all.
        agreed: whether all have the same digest.
        dense: indices of the dense parameters for which some trainer has a gradient.
        tables: the same of tables.
        counts: by table, how many rows each trainer has.
    """

    by_samples: int
    again: int
    weight: int
    agreed: bool
    dense: list[int]
    tables: list[int]
    counts: list[list[int]]


class HeaderForm:
    """Where each number of a header stands, for one model and number of trainers."""

    def __init__(self, dense: int, tables: int, trainers: int, rank: int) -> None:
        """For so many parameters and tables; trainer ``rank`` of ``trainers``."""
        self._dense, self._tables = dense, tables
        self._trainers, self._rank = trainers, rank
        self.size = _FIXED + dense + tables + tables * trainers * _COUNT_DIGITS

    def tell(
        self,
        *,
        samples: int | None,
        again: bool,
        number: int,
        dense: Presence,
        rows: Sequence[Rows | None],
    ) -> list[float]:
        """This trainer's summand, ``[size]``.

        Args:
            samples: its weight; ``None`` is 1, which the others must pass, too.
            again: it sent what is not its gradient.
            number: a digest of what must be equal.
            dense: by index, ``None`` where there is no gradient.
            rows: by table, keys and rows; ``None`` where there is no gradient.
        """
        told = [float(samples is not None), float(again)]
        weight = 1 if samples is None else samples
        told += _digits(weight, _WEIGHT_DIGITS, _WEIGHT_BITS)
        parts = _digits(number, _DIGEST_DIGITS, _DIGEST_BITS)
        told += parts
        told += [part * part for part in parts]
        told += [float(grad is not None) for grad in dense]
        told += [float(one is not None) for one in rows]
        for one in rows:
            counts = [0.0] * (self._trainers * _COUNT_DIGITS)
            if one is not None:
                begin = self._rank * _COUNT_DIGITS
                digits = _digits(len(one[0]), _COUNT_DIGITS, _COUNT_BITS)
                counts[begin : begin + _COUNT_DIGITS] = digits
            told += counts
        return told

    def read(self, sums: Sequence[float]) -> Header:
        """Reads the sum of all trainers' numbers, ``[size]``."""
        d, t, n = self._dense, self._tables, self._trainers
        tables = _FIXED + d
        counts = tables + t
        width = n * _COUNT_DIGITS
        return Header(
            by_samples=int(sums[_BY_SAMPLES]),
            again=int(sums[_AGAIN]),
            weight=_number(sums[_WEIGHT:_DIGEST], _WEIGHT_BITS),
            agreed=self._agreed(sums),
            dense=[i for i in range(d) if sums[_FIXED + i]],
            tables=[i for i in range(t) if sums[tables + i]],
            counts=[
                [
                    _number(sums[begin : begin + _COUNT_DIGITS], _COUNT_BITS)
                    for begin in range(first, first + width, _COUNT_DIGITS)
                ]
                for first in range(counts, counts + t * width, width)
            ],
        )

    def _agreed(self, sums: Sequence[float]) -> bool:
        """Equal in all trainers iff the variance of every digit is 0."""
        digits = range(_DIGEST, _DIGEST + _DIGEST_DIGITS)
        return all(
            self._trainers * int(sums[i + _DIGEST_DIGITS]) == int(sums[i]) ** 2
            for i in digits
        )
