# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Threads that bring what C++ cannot open by itself to the reader threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch_cpudist.data.reading.commands import Unwanted
from torch_cpudist.data.reading.dealing import Part
from torch_cpudist.errors import ClosedError

_JOIN_S = 10.0


class Fed(Protocol):
    """A core reader or store whose lanes are fed. Calls wait while a lane is full.

    All return False once it was stopped.
    """

    def feed(self, lane: int, data: bytes, /) -> bool:
        """Takes bytes of the lane's present file."""

    def feed_columns(self, lane: int, records: int, columns: list[Any], /) -> bool:
        """Takes records of the lane's present file, as arrays by slot."""

    def feed_end_of_file(self, lane: int, /) -> bool:
        """Ends the lane's present file."""

    def feed_failure(self, lane: int, message: str, /) -> bool:
        """Ends the lane: the message is raised at this place of the data."""


# Feeds one piece of a part to a lane; false once nothing more is wanted.
Piece = Callable[[Fed, int], bool]
# The pieces of a part, as long as they are wanted.
Open = Callable[[Part, Unwanted], Iterator[Piece]]


class Feeder:
    """One thread per lane, from start to the end of its parts.

    Args:
        fed: what is fed.
        lanes: the parts of each lane.
        first: by lane, the part to begin with.
        open_part: the pieces of a part.
    """

    def __init__(
        self,
        fed: Fed,
        lanes: Sequence[Sequence[Part]],
        first: Sequence[int],
        open_part: Open,
    ) -> None:
        self._fed = fed
        self._failures: dict[int, Exception] = {}
        self._open = open_part
        self._unwanted = Unwanted()
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(lane, parts[begin:]),
                name=f"cpudist-feed-{lane}",
                daemon=True,
            )
            for lane, (parts, begin) in enumerate(zip(lanes, first, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Ends the threads and waits for them; stop what is fed first."""
        self._unwanted.set()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def failure(self) -> Exception | None:
        """What ended a lane, of the first one; ``None`` if all went well."""
        failures = dict(self._failures)
        return failures[min(failures)] if failures else None

    def _run(self, lane: int, parts: Sequence[Part]) -> None:
        try:
            for part in parts:
                for piece in self._open(part, self._unwanted):
                    if not piece(self._fed, lane):
                        return
                if not self._fed.feed_end_of_file(lane):
                    return
        except ClosedError:
            return
        except Exception as error:  # is raised where the lane's batches would come
            self._failures[lane] = error
            self._fed.feed_failure(lane, str(error))
