# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The words by which jobs of one run meet: who has taken which number, how it starts.

Nothing is removed. All of them together have a bound.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch_cpudist.errors import AddressError, ProtocolError

# Three words for each of as many trainers as frames have numbers fit.
BYTES_MAX = 64 * 1024 * 1024
# Of a word besides its texts: its place in the dictionary.
_WORD_BYTES = 104
# Whoever hears no answer to a count asks again soon.
_COUNTS_MAX = 4096
_COUNT_MAX = 2**63 - 1


class WordStore(Protocol):
    """Words that several processes read and write."""

    def check(self, names: Sequence[str]) -> bool:
        """Whether all of these were written."""

    def get(self, name: str) -> str:
        """Reads one that was written."""

    def set(self, name: str, text: str) -> None:
        """Writes one, which is there for all when this returns."""

    def add(self, name: str, amount: int) -> int:
        """Adds to a count, which begins with 0, and returns it."""

    def compare_set(self, name: str, expected: str, text: str) -> str:
        """Writes a word if it is as expected (empty: if there is none).

        Returns:
            What stands there then.
        """


class Board:
    """The words themselves, a ``WordStore``. Thread safety: one thread."""

    def __init__(
        self, own: Mapping[str, str] | None = None, bytes_max: int = BYTES_MAX
    ) -> None:
        """Has the words of its owner, which nobody changes.

        Args:
            own: these.
            bytes_max: of memory for all words.
        """
        self._own = dict(own or {})
        self._words: dict[str, str] = dict(self._own)
        self._bytes_max = bytes_max
        self._bytes = sum(_size(name, text) for name, text in self._words.items())
        self._counted: OrderedDict[str, int] = OrderedDict()

    def check(self, names: Sequence[str]) -> bool:
        """Whether all of these were written."""
        return all(name in self._words for name in names)

    def get(self, name: str) -> str:
        """Reads a word.

        Raises:
            AddressError: there is none.
        """
        try:
            return self._words[name]
        except KeyError:
            raise AddressError(f"there is no word {name[:200]!r}") from None

    def set(self, name: str, text: str) -> None:
        """Writes a word.

        Raises:
            AddressError: there is no room for it.
            ProtocolError: it is the owner's.
        """
        if name in self._own:
            raise ProtocolError(f"the word {name!r} is server 0's alone")
        old = self._words.get(name)
        grown = _size(name, text) - (0 if old is None else _size(name, old))
        if self._bytes + grown > self._bytes_max:
            raise AddressError(
                f"the meeting point is full: its words have {self._bytes} bytes of "
                f"{self._bytes_max}. Somebody else may write to it: SECURITY.md"
            )
        self._words[name] = text
        self._bytes += grown

    def add(self, name: str, amount: int, token: str = "") -> int:
        """Adds to a count.

        Args:
            name: of the count.
            amount: to add.
            token: of this request; one that is made again adds nothing more.

        Raises:
            AddressError: there is no room for it.
            ProtocolError: there is another word, or the count is beyond any use.
        """
        if token and token in self._counted:
            return self._counted[token]
        found = self._words.get(name, "0")
        if not (found.isascii() and found.isdigit() and len(found) < 20):
            raise ProtocolError(f"the word {name[:200]!r} is no count")
        count = int(found) + amount
        if not 0 <= count <= _COUNT_MAX:
            raise ProtocolError(f"the count {name[:200]!r} would be beyond any use")
        self.set(name, str(count))
        if token:
            self._counted[token] = count
            if len(self._counted) > _COUNTS_MAX:
                self._counted.popitem(last=False)
        return count

    def compare_set(self, name: str, expected: str, text: str) -> str:
        """Writes a word if it is as expected; see ``WordStore``.

        Raises:
            AddressError: there is no room for it.
            ProtocolError: it is the owner's.
        """
        found = self._words.get(name, "")
        if found != expected:
            return found
        self.set(name, text)
        return text


def _size(name: str, text: str) -> int:
    return _WORD_BYTES + sys.getsizeof(name) + sys.getsizeof(text)
