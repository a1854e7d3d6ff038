# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fetches a page of metrics: whatever answers there, within a time and a size."""

from __future__ import annotations

import re
import socket
import time

from torch_cpudist.errors import AddressError, OperationTimeoutError, ProtocolError
from torch_cpudist.top.addresses import Address

# A rank with a thousand tables has 3 MB.
MOST_BYTES = 8 << 20
_PIECE = 1 << 16
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,12})[ \t]*(?:\r\n|$)", re.I)


def fetch(address: Address, limit_s: float) -> str:
    """The text of the page.

    Args:
        address: numeric.
        limit_s: for all of it: a byte now and then does not extend it.

    Raises:
        AddressError: nobody listens there.
        OperationTimeoutError: the page was not there in time.
        ProtocolError: what came is no page of metrics, or beyond ``MOST_BYTES``.
    """
    until = time.monotonic() + limit_s
    try:
        with socket.create_connection(address, limit_s) as link:
            request = f"GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n"
            link.sendall(request.encode())
            answer = _to_the_end(link, until)
    except TimeoutError:
        raise OperationTimeoutError(f"no page within {limit_s:g} s") from None
    except OSError as error:
        raise AddressError(error.strerror or str(error)) from error
    return _text(answer)


def _to_the_end(link: socket.socket, until: float) -> bytes:
    """What comes until the other end closes, or has sent what it has announced."""
    answer = bytearray()
    whole = MOST_BYTES + 1
    head_seen = False
    while len(answer) < whole:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        link.settimeout(left_s)
        piece = link.recv(_PIECE)
        if not piece:
            return bytes(answer)
        answer += piece
        if not head_seen and (end := answer.find(b"\r\n\r\n", 0, _PIECE)) >= 0:
            head_seen = True
            if announced := _LENGTH.search(bytes(answer[: end + 2])):
                whole = min(whole, end + 4 + int(announced[1]))
    if len(answer) > MOST_BYTES:
        raise ProtocolError(f"sends more than {MOST_BYTES >> 20} MiB")
    return bytes(answer)


def _text(answer: bytes) -> str:
    """The body of an answer over HTTP."""
    head, end, body = answer.partition(b"\r\n\r\n")
    if not answer:
        raise ProtocolError("closes the connection without an answer")
    if not end or not head.startswith(b"HTTP/1."):
        raise ProtocolError("does not speak HTTP")
    status = head[9:12]
    if status != b"200":
        found = status.decode("latin-1")
        raise ProtocolError(f"has no page /metrics: status {found!r}")
    announced = _LENGTH.search(head + b"\r\n")
    if announced and len(body) < int(announced[1]):
        raise ProtocolError(f"ends after {len(body)} of {int(announced[1])} bytes")
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise ProtocolError("sends what is no text") from None
