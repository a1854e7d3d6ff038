# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Times a link: who listens sends a byte back for every message that it has read.

A message is its length, 8 bytes big-endian, and that many bytes, which nobody looks at.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch_cpudist.errors import AddressError
from torch_cpudist.machine.host import LOOPBACK

_LENGTH = struct.Struct(">Q")
_MOST_BYTES = 1 << 26
_PIECE_BYTES = 1 << 20
_ROUNDS, _TRANSFERS, _TRANSFER_BYTES = 200, 5, 1 << 24
_IDLE_S = 60.0


@dataclass(frozen=True)
class Link:
    """What was measured of a link.

    Attributes:
        round_trip_us: median of messages of one byte.
        bytes_per_s: best of transfers of 16 MiB, one way.
    """

    round_trip_us: float
    bytes_per_s: float


def _read(link: socket.socket, piece: memoryview, count: int) -> bool:
    """Reads so many bytes and drops them; ``False`` at the end of the link."""
    while count:
        got = link.recv_into(piece[: min(count, len(piece))])
        if not got:
            return False
        count -= got
    return True


def answer(link: socket.socket) -> None:
    """Answers messages of one link until it ends."""
    piece = memoryview(bytearray(_PIECE_BYTES))
    with link, contextlib.suppress(OSError):
        link.settimeout(_IDLE_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _read(link, piece, _LENGTH.size):
            (count,) = _LENGTH.unpack(piece[: _LENGTH.size])
            if count > _MOST_BYTES or not _read(link, piece, count):
                return
            link.sendall(b"\x00")


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        AddressError: it cannot.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise AddressError(
            f"doctor: cannot listen at {host} port {port}: {error.strerror or error}. "
            "Choose another port, or an address of this host."
        ) from error


def answer_all(server: socket.socket) -> None:
    """Answers everybody who connects, one thread each, until the socket is closed."""
    with contextlib.suppress(OSError):
        while True:
            link, _ = server.accept()
            threading.Thread(target=answer, args=(link,), daemon=True).start()


@contextlib.contextmanager
def answering(host: str, port: int) -> Iterator[int]:
    """While it is entered, peers are answered there.

    Yields:
        The port.
    """
    with listening(host, port) as server:
        thread = threading.Thread(target=answer_all, args=(server,), daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            # Closing alone does not end a call that waits.
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _send(link: socket.socket, count: int, piece: memoryview) -> float:
    """Sends a message and waits for its answer; seconds."""
    began = time.perf_counter()
    link.sendall(_LENGTH.pack(count))
    left = count
    while left:
        part = min(left, len(piece))
        link.sendall(piece[:part])
        left -= part
    if not link.recv(1):
        raise ConnectionError(
            "it ended the link: is it python -m torch_cpudist doctor?"
        )
    return time.perf_counter() - began


def time_link(host: str, port: int, timeout_s: float = 30.0) -> Link:
    """Times messages to whoever answers there.

    Raises:
        AddressError: nobody does.
    """
    piece = memoryview(bytes(_PIECE_BYTES))
    try:
        with socket.create_connection((host, port), timeout_s) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = [_send(link, 1, piece) for _ in range(_ROUNDS)]
            transfers = [_send(link, _TRANSFER_BYTES, piece) for _ in range(_TRANSFERS)]
    except OSError as error:
        raise AddressError(
            f"doctor: {host} port {port} does not answer: {error.strerror or error}. "
            "Start there: python -m torch_cpudist doctor --listen ADDRESS:PORT, and "
            "let firewalls pass that port."
        ) from error
    return Link(statistics.median(trips) * 1e6, _TRANSFER_BYTES / min(transfers))


def time_loopback() -> Link:
    """Times the loopback of this host."""
    with answering(LOOPBACK, 0) as port:
        return time_link(LOOPBACK, port)
