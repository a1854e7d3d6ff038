# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What memory is left on dedicated servers, which nobody can ask while they serve."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch_cpudist.errors import AddressError
from torch_cpudist.machine import memory

if TYPE_CHECKING:
    from torch_cpudist.launch.rendezvous import Rendezvous

# A change that is worth telling.
_CHANGE_BYTES = 16 << 20


def _key(rank: int) -> str:
    return f"memory/{rank}"


class ServerRoom:
    """Tells trainers, through the store, what is left here. Not thread-safe."""

    def __init__(self, rendezvous: Rendezvous | None, rank: int) -> None:
        """Tells nothing yet.

        Args:
            rendezvous: where ranks met; ``None`` where nobody can be told.
            rank: of this server.
        """
        self._rendezvous = rendezvous
        self._rank = rank
        self._told: dict[str, int] = {}

    def tell(self) -> None:
        """Tells it, if it has changed. A store that has ended is no error here."""
        if self._rendezvous is None:
            return
        found = memory.limits()
        left = {limit.key: limit.free_bytes for limit in found}
        if left.keys() == self._told.keys() and all(
            abs(left[key] - told) < _CHANGE_BYTES for key, told in self._told.items()
        ):
            return
        self._told = left
        with contextlib.suppress(AddressError):
            told = [limit.as_json() for limit in found]
            self._rendezvous.show(_key(self._rank), told)


def room_of(rendezvous: Rendezvous, rank: int) -> list[memory.Limit]:
    """What a dedicated server has told last; empty if nothing.

    Raises:
        AddressError: the store does not answer.
    """
    return [memory.Limit(**told) for told in rendezvous.shown(_key(rank)) or []]
