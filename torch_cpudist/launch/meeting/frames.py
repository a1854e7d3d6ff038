# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Messages at a meeting point, and what is taken for one.

A message is the length of its text (4 bytes, big endian), a proof (32 bytes; zeros
where there is none) and the text: one JSON object. Nothing else is read, and nothing is
read before its length was checked.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_cpudist.errors import ProtocolError

VERSION = 1
PROOF_BYTES = 32
NO_PROOF = bytes(PROOF_BYTES)
REQUEST_MAX_BYTES = 64 * 1024
# What servers say of their run grows with their number.
ANSWER_MAX_BYTES = 1024 * 1024
_LENGTH = struct.Struct("!I")
_HEAD_BYTES = _LENGTH.size + PROOF_BYTES
_READ_BYTES = 64 * 1024


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        text: of it, as it came.
        proof: that came with it.
    """

    text: bytes
    proof: bytes = NO_PROOF

    def packed(self) -> bytes:
        """As it is sent."""
        return _LENGTH.pack(len(self.text)) + self.proof + self.text


class FrameReader:
    """Puts one message together, of pieces as they come. Thread safety: one thread."""

    def __init__(self, most_bytes: int) -> None:
        """Has nothing yet.

        Args:
            most_bytes: that the text may have.
        """
        self._most_bytes = most_bytes
        self._came = bytearray()
        self._whole_bytes = _HEAD_BYTES

    @property
    def wants_bytes(self) -> int:
        """How many to read next, at most: none of what follows this message."""
        return min(self._whole_bytes - len(self._came), _READ_BYTES)

    def feed(self, data: bytes) -> Frame | None:
        """Takes what has come, at most ``wants_bytes``.

        Returns:
            The message, once it is whole.

        Raises:
            ProtocolError: it is longer than any that is due here.
        """
        self._came += data
        if len(self._came) < self._whole_bytes:
            return None
        if self._whole_bytes == _HEAD_BYTES:
            (length,) = _LENGTH.unpack_from(self._came)
            if not 0 < length <= self._most_bytes:
                raise ProtocolError(
                    f"a message of {length} bytes, expected 1 to {self._most_bytes}"
                )
            self._whole_bytes += length
            return None
        came = bytes(self._came)
        return Frame(came[_HEAD_BYTES:], came[_LENGTH.size : _HEAD_BYTES])


def written(values: Mapping[str, Any]) -> bytes:
    """The text of a message."""
    return json.dumps(values, separators=(",", ":")).encode()


def parsed(what: str, text: str | bytes) -> Any:
    """What a JSON text of somebody else says.

    Args:
        what: it is, for the message.
        text: that has come.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"{what} is no JSON text ({type(error).__name__})"
        ) from error


def fields_of(
    what: str, text: str | bytes, kinds: Mapping[str, type]
) -> dict[str, Any]:
    """The object that a message is.

    Args:
        what: it is, for the message.
        text: of it.
        kinds: of what class each of its fields is (``object``: any); no others.

    Raises:
        ProtocolError: it is another one.
    """
    found = parsed(what, text)
    if not isinstance(found, dict):
        raise ProtocolError(f"{what} is of {type(found).__name__}, expected an object")
    for name, kind in kinds.items():
        if name not in found:
            raise ProtocolError(f"{what} has no field {name!r}")
        if kind is not object and type(found[name]) is not kind:
            raise ProtocolError(
                f"{what}: {name!r} is of {type(found[name]).__name__}, expected "
                f"{kind.__name__}"
            )
    if len(found) > len(kinds):
        raise ProtocolError(f"{what} has {len(found) - len(kinds)} fields too many")
    return found
