# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How both ends of a conversation at a meeting point prove the run's key.

Each message after the first carries an HMAC of all that was said so far, itself
included, and of the address that the two meet at. The first message of either end has
a fresh nonce, and the number of a message says whose it is: what was recorded,
reflected, changed or handed on from another address is no proof.
"""

from __future__ import annotations

import secrets

from torch_cpudist import _core
from torch_cpudist.launch.meeting.frames import NO_PROOF, Frame

_WHAT = "meeting point of torch_cpudist"
_NONCE_BYTES = 16


class Conversation:
    """What was said on one connection. Thread safety: one thread."""

    def __init__(self, secret: _core.Secret | None, address: str) -> None:
        """Begins with nothing said.

        Args:
            secret: the run's key; ``None``: nothing is proven.
            address: that the two meet at, letter by letter.
        """
        self._secret = secret
        self._said = [_WHAT.encode(), address.encode("utf-8", "surrogatepass")]

    def nonce(self) -> str:
        """A fresh one; empty without a key."""
        return "" if self._secret is None else secrets.token_hex(_NONCE_BYTES)

    def begun(self, text: bytes) -> bytes:
        """A first message, which proves nothing, as it is sent."""
        self._said.append(text)
        return Frame(text).packed()

    def heard_first(self, frame: Frame) -> None:
        """A first message has come."""
        self._said.append(frame.text)

    def sealed(self, text: bytes) -> bytes:
        """A message as it is sent.

        Raises:
            AuthenticationError: there is no libcrypto here.
        """
        self._said.append(text)
        if self._secret is None:
            return Frame(text).packed()
        return Frame(text, self._secret.sign(self._data())).packed()

    def proves(self, frame: Frame) -> bool:
        """Whether who sent this has the key; without one, whether it has none."""
        self._said.append(frame.text)
        if self._secret is None:
            return frame.proof == NO_PROOF
        return self._secret.has_signed(self._data(), frame.proof)

    def _data(self) -> bytes:
        # Words are signed with the same key: the first of their parts is never this.
        return b"".join(b"%d:%b" % (len(part), part) for part in self._said)
