# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Asks all ranks again and again, and keeps what they said last."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch_cpudist.errors import Error
from torch_cpudist.top.addresses import Address, numeric
from torch_cpudist.top.figures import Figures, Moment, figures
from torch_cpudist.top.pages import fetch
from torch_cpudist.top.samples import Samples

# Figures are of so many rounds of asking, so that a slow step shows as a slow one.
_ROUNDS = 5
_THREADS = 64


@dataclass(frozen=True)
class Shown:
    """What is known of one rank now.

    Attributes:
        address: as it was asked for.
        figures: of its page; ``None`` without one.
        reason: why there is none, for people.
    """

    address: Address
    figures: Figures | None
    reason: str = ""


@dataclass
class _Watched:
    """One rank."""

    address: Address
    place: Address
    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=_ROUNDS + 1))

    def look(self, limit_s: float) -> Shown:
        """Asks it once more."""
        try:
            samples = Samples(fetch(self.place, limit_s))
        except Error as error:
            self.moments.clear()
            return Shown(self.address, None, str(error))
        now = Moment(time.monotonic(), samples)
        if self.moments and self.moments[-1].samples.who() != samples.who():
            self.moments.clear()  # another run by now
        self.moments.append(now)
        return Shown(self.address, figures(self.moments[0], now))


class Cluster:
    """The ranks that were asked for. Not thread-safe.

    Args:
        addresses: of their pages.
        limit_s: for each answer.

    Raises:
        AddressError: a host's name is not known.
    """

    def __init__(self, addresses: Sequence[Address], limit_s: float) -> None:
        """See the class."""
        self._limit_s = limit_s
        self._ranks = [_Watched(one, numeric(one)) for one in addresses]
        threads = min(len(self._ranks), _THREADS)
        self._threads = ThreadPoolExecutor(threads, "cpudist-top")

    def look(self) -> list[Shown]:
        """Asks all of them, several at once; in the order of their addresses."""
        return list(
            self._threads.map(lambda rank: rank.look(self._limit_s), self._ranks)
        )

    def close(self) -> None:
        """Waits for nobody who has not been asked. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)
