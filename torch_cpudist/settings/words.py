# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Words in a store that whoever reaches it can write to: signed where there is a key.

A signature is of the key of the run, of the name that the word is under and of what it
belongs to, so that a word is good in one place only. It keeps nobody from removing a
word, or from putting an earlier one of the same place back.
"""

from __future__ import annotations

from torch_cpudist import _core
from torch_cpudist.errors import AuthenticationError

_MARK = "signed:"
_HEX = 64
_SAME_KEY = (
    "Give every process of the run the same key (CPUDIST_SECRET_FILE, CPUDIST_SECRET). "
    "If they have it, somebody else writes to the store: SECURITY.md."
)


class Words:
    """Of one process. Thread safety: any thread."""

    def __init__(self, secret: _core.Secret | None = None, of: str = "") -> None:
        """Without a key words are as they are.

        Args:
            secret: the run's key.
            of: what all of them belong to, which their names do not say.
        """
        self._secret = secret
        self._of = of

    def sign(self, name: str, text: str) -> str:
        """What to write in the place of ``text``.

        Args:
            name: the word is written under.
            text: of the word.
        """
        if self._secret is None:
            return text
        return f"{_MARK}{self._secret.sign(self._data(name, text)).hex()}:{text}"

    def read(self, name: str, found: str | bytes) -> str:
        """The text of a word that was found.

        Args:
            name: it was found under.
            found: what is there.

        Raises:
            AuthenticationError: nobody with this process's key has written it there.
        """
        word = found if isinstance(found, str) else found.decode(errors="replace")
        is_signed = word.startswith(_MARK)
        if self._secret is None:
            if is_signed:
                raise self._refused(name, "no key here: it is signed with one")
            return word
        if not is_signed:
            raise self._refused(name, "no key there: it is not signed")
        mac, _, text = word.removeprefix(_MARK).partition(":")
        if not self._proven(mac, self._data(name, text)):
            raise self._refused(
                name, "wrong key: another one has signed it, or it was changed"
            )
        return text

    def _proven(self, mac: str, data: bytes) -> bool:
        if self._secret is None or len(mac) != _HEX:
            return False
        try:
            return self._secret.has_signed(data, bytes.fromhex(mac))
        except ValueError:
            return False

    def _data(self, name: str, text: str) -> bytes:
        parts = (self._of, name, text)
        encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
        return b"".join(b"%d:%b" % (len(part), part) for part in encoded)

    def _refused(self, name: str, why: str) -> AuthenticationError:
        return AuthenticationError(
            f"the store's word {name[:200]!r} is refused, {why}. {_SAME_KEY}"
        )
