# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where pages of metrics are, as people write it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from typing import NamedTuple

from torch_cpudist.errors import AddressError, InvalidArgumentError

_FORM = re.compile(
    r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/]+):([0-9]{1,5})(?:-([0-9]{1,5}))?"
)
# A thread asks several of them; beyond so many a Prometheus is the better tool.
MOST = 512


class Address(NamedTuple):
    """One page's."""

    host: str
    port: int

    def __str__(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"{name}:{self.port}"


def read(texts: Iterable[str]) -> list[Address]:
    """The addresses that these name, in order, each once.

    Args:
        texts: ``host:port`` or ``host:first-last``; a numeric IPv6 host in brackets.

    Raises:
        InvalidArgumentError: one is no address, or they are too many.
    """
    found: dict[Address, None] = {}
    for text in texts:
        match = _FORM.fullmatch(text)
        if match is None:
            raise InvalidArgumentError(
                f"expected HOST:PORT or HOST:FIRST-LAST, found {text!r}; as "
                "127.0.0.1:9400-9403, or [::1]:9400."
            )
        first = int(match[2])
        last = int(match[3]) if match[3] else first
        if not 0 < first <= last < 65536:
            raise InvalidArgumentError(
                f"{text!r}: expected ports from 1 to 65535, the first one first."
            )
        host = match[1].removeprefix("[").removesuffix("]")
        if last - first >= MOST:
            raise InvalidArgumentError(_too_many(last - first + 1))
        found |= dict.fromkeys(Address(host, port) for port in range(first, last + 1))
    if len(found) > MOST:
        raise InvalidArgumentError(_too_many(len(found)))
    return list(found)


def _too_many(count: int) -> str:
    return (
        f"{count} addresses: expected at most {MOST}. Show a part of the ranks, or "
        "have Prometheus scrape them."
    )


def numeric(address: Address) -> Address:
    """The same by a number, so that nobody is asked for names later.

    Raises:
        AddressError: the host's name is not known.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(
            f"{address}: the host {address.host!r} cannot be found: "
            f"{getattr(error, 'strerror', None) or error}."
        ) from error
    return Address(str(found[0][4][0]), address.port)
