# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One who has come to a meeting point: hello, one request, one answer."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_cpudist import _core
from torch_cpudist.errors import AddressError, Error, ProtocolError
from torch_cpudist.launch.meeting.board import Board
from torch_cpudist.launch.meeting.frames import (
    ANSWER_MAX_BYTES,
    REQUEST_MAX_BYTES,
    VERSION,
    Frame,
    FrameReader,
    fields_of,
    parsed,
    written,
)
from torch_cpudist.launch.meeting.proof import Conversation

HELLO: dict[str, type] = {"version": int, "nonce": str}
WELCOME: dict[str, type] = {"version": int, "nonce": str, "at": str, "point": str}
ANSWER: dict[str, type] = {"value": object, "error": str, "why": str}
REQUESTS: dict[str, dict[str, type]] = {
    "check": {"op": str, "names": list},
    "get": {"op": str, "name": str},
    "set": {"op": str, "name": str, "text": str},
    "add": {"op": str, "name": str, "amount": int, "token": str},
    "compare_set": {"op": str, "name": str, "expected": str, "text": str},
}
NO_KEY = "no key there"
WRONG_KEY = "wrong key"
_NAMES_MAX = 1024
_TOKEN_MAX = 64


@dataclass(frozen=True)
class House:
    """What visitors find.

    Attributes:
        board: the words.
        secret: the run's key.
        address: that all meet at.
        point: a name of this meeting point, which no other has.
        refuse: hears who has not proven the key, and why that is so.
    """

    board: Board
    secret: _core.Secret | None
    address: str
    point: str
    refuse: Callable[[str, str], None]


class Visitor:
    """One connection. Thread safety: one thread.

    Attributes:
        until_s: when it is to be done.
    """

    def __init__(
        self, connection: socket.socket, who: str, until_s: float, house: House
    ) -> None:
        """Has said nothing yet.

        Args:
            connection: to it, which does not block.
            who: it is, for messages.
            until_s: when it is to be done.
            house: what it finds.
        """
        self._connection = connection
        self._who = who
        self.until_s = until_s
        self._house = house
        self._talk = Conversation(house.secret, house.address)
        self._reader = FrameReader(REQUEST_MAX_BYTES)
        self._out = b""
        self._hear: Callable[[Frame], None] = self._hello
        self._answered = False

    @property
    def writes(self) -> bool:
        """Whether it waits for room to write, not for something to read."""
        return bool(self._out)

    def turn(self) -> bool:
        """Goes on as far as it gets without a wait.

        Returns:
            Whether that was all.

        Raises:
            Error, OSError: the conversation is at an end.
        """
        try:
            if self._out:
                self._out = self._out[self._connection.send(self._out) :]
                return self._answered and not self._out
            data = self._connection.recv(self._reader.wants_bytes)
        except (BlockingIOError, InterruptedError):
            return False
        if not data:
            return True
        frame = self._reader.feed(data)
        if frame is not None:
            self._reader = FrameReader(REQUEST_MAX_BYTES)
            self._hear(frame)
        return False

    def _hello(self, frame: Frame) -> None:
        hello = fields_of("a hello", frame.text, HELLO)
        self._talk.heard_first(frame)
        lacks_key = self._house.secret is not None and not hello["nonce"]
        if lacks_key:
            self._house.refuse(self._who, NO_KEY)
        welcome = {
            "version": VERSION,
            "nonce": self._talk.nonce(),
            "at": self._house.address,
            "point": self._house.point,
        }
        # Whoever cannot go on is told so that it knows why.
        self._out = self._talk.sealed(written(welcome))
        self._answered = lacks_key or hello["version"] != VERSION
        self._hear = self._request

    def _request(self, frame: Frame) -> None:
        if not self._talk.proves(frame):
            if self._house.secret is not None:
                self._house.refuse(self._who, WRONG_KEY)
            raise ProtocolError("not proven")
        answer: dict[str, Any] = {"value": None, "error": "", "why": ""}
        try:
            answer["value"] = carried_out(self._house.board, frame.text)
        except Error as error:
            answer["error"] = type(error).__name__
            answer["why"] = str(error)
        text = written(answer)
        if len(text) > ANSWER_MAX_BYTES:
            raise AddressError(f"an answer of {len(text)} bytes")
        self._out = self._talk.sealed(text)
        self._answered = True


def carried_out(board: Board, text: bytes) -> Any:
    """Does what a request says, and returns what is to be answered.

    Raises:
        AddressError, ProtocolError: it cannot be done, or is no request.
    """
    found = parsed("a request", text)
    op = found.get("op") if isinstance(found, dict) else None
    kinds = REQUESTS.get(op) if isinstance(op, str) else None
    if kinds is None:
        raise ProtocolError("a request of no known kind")
    asked = fields_of("a request", text, kinds)
    del asked["op"]
    names = asked.get("names", [])
    if len(names) > _NAMES_MAX or not all(type(name) is str for name in names):
        raise ProtocolError("a request whose names are none")
    if len(asked.get("token", "")) > _TOKEN_MAX:
        raise ProtocolError("a request whose token is too long")
    return getattr(board, str(op))(**asked)
