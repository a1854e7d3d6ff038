# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Words at a meeting point, asked for from elsewhere: a trainer's part of a meeting.

A connection for each request, so that nobody holds one, and whoever keeps the point may
come back. No wait is longer than the caller has time; all of them look several times a
second whether it has.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch_cpudist import _core
from torch_cpudist.errors import (
    AddressError,
    AuthenticationError,
    ClosedError,
    InvalidArgumentError,
    OperationTimeoutError,
    ProtocolError,
)
from torch_cpudist.launch.meeting.frames import (
    ANSWER_MAX_BYTES,
    REQUEST_MAX_BYTES,
    VERSION,
    Frame,
    FrameReader,
    fields_of,
    written,
)
from torch_cpudist.launch.meeting.proof import Conversation
from torch_cpudist.launch.meeting.visitor import ANSWER, WELCOME
from torch_cpudist.settings.jobs import SeparateJob

_PAUSE_S = 0.1
_SLICE_S = 0.1
_SAME_KEY = (
    "Give every process of the run the same key (CPUDIST_SECRET_FILE, CPUDIST_SECRET) "
    "and the same CPUDIST_RENDEZVOUS: SECURITY.md."
)
_ERRORS = {"AddressError": AddressError, "ProtocolError": ProtocolError}


@dataclass(frozen=True)
class Clocks:
    """How long a request may take.

    Attributes:
        attempt_s: before it is made again, on another connection.
        least_s: in any case, also where the caller has no time left.
    """

    attempt_s: float = 3.0
    least_s: float = 0.5


class _NoAnswer(Exception):
    """Nobody has answered; the text says in what way."""

    def __init__(self, text: str, nobody: bool = False) -> None:
        super().__init__(text)
        self.nobody = nobody  # no process listens there


class MeetingStore:
    """The words at one meeting point, a ``WordStore``. Thread safety: any thread.

    A store is of the first point that has answered: one that has come in its place is
    of another run.
    """

    def __init__(
        self,
        apart: SeparateJob,
        secret: _core.Secret | None,
        remaining_s: Callable[[], float],
        clocks: Clocks | None = None,
    ) -> None:
        """Asks nobody yet.

        Args:
            apart: says where it is.
            secret: the run's key.
            remaining_s: how much longer the caller has time, asked all the time.
            clocks: of a request.
        """
        self._apart = apart
        self._secret = secret
        self._remaining_s = remaining_s
        self._clocks = clocks or Clocks()
        self._point = ""
        self._places: list[tuple[Any, ...]] = []
        self._end = ""

    def end(self, reason: str) -> None:
        """Ends every wait, now and later; it takes the reason."""
        self._end = reason or "ended"

    def check(self, names: Sequence[str]) -> bool:
        """Whether all of these were written.

        Raises:
            OperationTimeoutError: nobody has answered.
            AddressError: another meeting point is there, or none any more.
            AuthenticationError: whoever is there has not got this process's key.
            ProtocolError: it is no meeting point.
            ClosedError: ``end`` was called.
        """
        return bool(self._ask(bool, op="check", names=list(names)))

    def get(self, name: str) -> str:
        """Reads a word.

        Raises:
            AddressError: there is none.
            Error: as ``check``.
        """
        return str(self._ask(str, op="get", name=name))

    def set(self, name: str, text: str) -> None:
        """Writes a word; it is there for all when this returns.

        Raises:
            AddressError: there is no room for it.
            InvalidArgumentError: it is too long.
            ProtocolError: it is server 0's.
            Error: as ``check``.
        """
        self._ask(type(None), op="set", name=name, text=text)

    def add(self, name: str, amount: int) -> int:
        """Adds to a count, once, and returns it.

        Raises:
            AddressError: there is no room for it.
            ProtocolError: there is another word.
            Error: as ``check``.
        """
        token = secrets.token_hex(16)
        return int(self._ask(int, op="add", name=name, amount=amount, token=token))

    def compare_set(self, name: str, expected: str, text: str) -> str:
        """Writes a word if it is as expected, and returns what stands there then.

        Raises:
            Error: as ``set``.
        """
        return str(
            self._ask(str, op="compare_set", name=name, expected=expected, text=text)
        )

    # -- one request -------------------------------------------------------------------

    def _ask(self, kind: type, **request: Any) -> Any:
        text = written(request)
        if len(text) > REQUEST_MAX_BYTES:
            raise InvalidArgumentError(
                f"a word of {len(text)} bytes for {self._apart.where}: at most "
                f"{REQUEST_MAX_BYTES} go there. Is CPUDIST_JOB or --rdzv-id that long?"
            )
        least_s = time.monotonic() + self._clocks.least_s
        while True:
            if self._end:
                raise ClosedError(self._end)
            try:
                return self._attempt(text, kind, least_s)
            except _NoAnswer as error:
                if error.nobody and self._point:
                    raise AddressError(
                        f"the meeting point at {self._apart.where} has ended: {error}. "
                        "Does server 0 still run?"
                    ) from error
                if self._remaining_s() <= 0 and not self._end:
                    self._give_up(error)
            time.sleep(_PAUSE_S)

    def _give_up(self, error: _NoAnswer) -> NoReturn:
        raise OperationTimeoutError(
            f"nobody answers at {self._apart.where} ({error}). Start the servers' job "
            "(CPUDIST_ROLE=server) with the same CPUDIST_RENDEZVOUS, or pass a longer "
            "init(timeout_s=...)."
        ) from error

    def _attempt(self, text: bytes, kind: type, least_s: float) -> Any:
        until_s = time.monotonic() + self._clocks.attempt_s

        def may_wait() -> bool:
            now_s = time.monotonic()
            has_time = now_s < least_s or self._remaining_s() > 0
            return now_s < until_s and has_time and not self._end

        last: OSError | None = None
        places, self._places = self._resolved(may_wait), []
        for family, address in places:
            try:
                with _Line(family, may_wait) as line:
                    line.connect(address)
                    answer = self._converse(line, text)
                    self._places = [(family, address)]
                break
            except OSError as error:
                last = error
        else:
            nobody = isinstance(last, ConnectionRefusedError)
            raise _NoAnswer(str(last), nobody) from last
        if answer["error"]:
            known = _ERRORS.get(answer["error"], ProtocolError)
            raise known(f"{self._apart.where}: {answer['why'][:500]}")
        if type(answer["value"]) is not kind:
            self._refuse_rubbish(f"its answer has no {kind.__name__}")
        return answer["value"]

    def _resolved(self, may_wait: Callable[[], bool]) -> list[tuple[Any, ...]]:
        """Families and addresses to try; in a thread, as a resolver has own clocks."""
        if self._places:
            return self._places
        found: list[tuple[Any, ...]] = []
        failed: list[OSError | UnicodeError] = []

        def look_up() -> None:
            apart = self._apart
            try:
                for family, *_, address in socket.getaddrinfo(
                    apart.host, apart.port, type=socket.SOCK_STREAM
                ):
                    found.append((family, address))
            except (OSError, UnicodeError) as error:
                failed.append(error)

        thread = threading.Thread(target=look_up, name="cpudist-names", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise AddressError(
                f"{self._apart.where} cannot be asked: {error}. This process has no "
                "thread left (ulimit -u, the container's limit of processes)."
            ) from error
        while thread.is_alive():
            thread.join(_SLICE_S)
            if thread.is_alive() and not may_wait():
                raise _NoAnswer("its name was not resolved in time")
        if failed:
            raise AddressError(
                f"{self._apart.where}: the name does not resolve on this host "
                f"({failed[0]})."
            ) from failed[0]
        return found

    def _converse(self, line: _Line, text: bytes) -> dict[str, Any]:
        """Says hello, asks, and returns the answer, once both ends are proven."""
        apart = self._apart
        address = f"{apart.host}:{apart.port}"
        talk = Conversation(self._secret, address)
        line.send(talk.begun(written({"version": VERSION, "nonce": talk.nonce()})))
        frame = self._frame(line)
        welcome = self._fields("its welcome", frame, WELCOME)
        proven = talk.proves(frame)
        if welcome["version"] != VERSION:
            self._refuse_rubbish(
                f"it speaks version {welcome['version']} of this protocol, expected "
                f"{VERSION}"
            )
        why = self._unproven(welcome, proven, address)
        if why:
            if self._secret is not None and welcome["nonce"]:
                line.send(talk.sealed(written({})))  # so that it is counted there
            raise AuthenticationError(
                f"whoever answers at {apart.where} is refused, {why}. {_SAME_KEY}"
            )
        if self._point and welcome["point"] != self._point:
            raise AddressError(
                f"another meeting point has come to {apart.where} meanwhile: that of "
                "another run."
            )
        line.send(talk.sealed(text))
        frame = self._frame(line)
        if not talk.proves(frame):
            raise AuthenticationError(
                f"an answer from {apart.where} is refused: it was changed, or another "
                f"key is there. {_SAME_KEY}"
            )
        self._point = welcome["point"]
        return self._fields("its answer", frame, ANSWER)

    def _unproven(self, welcome: dict[str, Any], proven: bool, address: str) -> str:
        if self._secret is None:
            asks = "no key here: the other end asks for one, and this process has none"
            return asks if welcome["nonce"] else ""
        if not welcome["nonce"]:
            return "no key there: this process has one, and the other end has none"
        if welcome["at"] != address:
            return f"another address: it is that of {welcome['at'][:200]!r}"
        return "" if proven else "wrong key: that of the other end is another one"

    def _frame(self, line: _Line) -> Frame:
        try:
            return line.frame()
        except ProtocolError as error:
            self._refuse_rubbish(str(error))

    def _fields(
        self, what: str, frame: Frame, kinds: dict[str, type]
    ) -> dict[str, Any]:
        try:
            return fields_of(what, frame.text, kinds)
        except ProtocolError as error:
            self._refuse_rubbish(str(error))

    def _refuse_rubbish(self, why: str) -> NoReturn:
        raise ProtocolError(
            f"whoever answers at {self._apart.where} is no meeting point of this "
            f"version of torch_cpudist: {why}. Is another program on that port?"
        )


class _Line:
    """A connection all of whose waits end when there is no time left."""

    def __init__(self, family: int, may_wait: Callable[[], bool]) -> None:
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._may_wait = may_wait

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _wait(self, event: int, what: str) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        while not poll.poll(int(_SLICE_S * 1000)):
            if not self._may_wait():
                raise _NoAnswer(what)

    def connect(self, address: Any) -> None:
        """Connects.

        Raises:
            OSError: nobody is there.
        """
        try:
            self._socket.connect(address)
        except BlockingIOError:
            self._wait(select.POLLOUT, "no connection in time")
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error == 0:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return
        # Of the class that goes with the number: ConnectionRefusedError, for one.
        raise OSError(error, os.strerror(error))

    def send(self, data: bytes) -> None:
        """Sends all of it.

        Raises:
            OSError: the connection has ended.
        """
        while data:
            if not self._may_wait():
                raise _NoAnswer("a connection, and no room for a request in time")
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, "a connection, and no room for a request")

    def frame(self) -> Frame:
        """Reads one message.

        Raises:
            OSError: the connection has ended.
            ProtocolError: it is none.
        """
        reader = FrameReader(ANSWER_MAX_BYTES)
        while True:
            if not self._may_wait():
                raise _NoAnswer("a connection, and no whole answer in time")
            self._wait(select.POLLIN, "a connection, and no answer in time")
            data = self._socket.recv(reader.wants_bytes)
            if not data:
                raise ConnectionResetError("the connection was closed")
            frame = reader.feed(data)
            if frame is not None:
                return frame
