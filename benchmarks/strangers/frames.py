# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Frames of handshakes as ``docs/wire.md`` has them, for who has no key, or misuses it.

A listener has to refuse what is made here; what has a right to be there is the core's.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
from dataclasses import dataclass

from torch_cpudist import _core
from torch_cpudist.errors import Error

AUTH, ERROR = 32, 4
CHALLENGE, PROOF = 1, 3
SERVERS = 1  # what a link is for
SERVER, TRAINER = 1, 2
NOTHING = bytes(32)
_WHO = struct.Struct("<IHHQIIHHI")
_WHAT = struct.Struct("<QQQI")
_HEADER = struct.Struct("<IHHQIIHHIQQQII")
_HEADER_BYTES = 64
_MAGIC = 0x31445043
_NO_SET = 0xFFFFFFFF
_ANSWER_S = 10.0


@dataclass(frozen=True)
class Target:
    """A server of a job, and who somebody says to be that comes there.

    Attributes:
        address: ``tcp:IP:PORT``, as the server publishes it.
        run_id: of the job.
        shard: which server it is.
        rank: of the trainer that a stranger gives itself out for.
        version: of the protocol.
    """

    address: str
    run_id: int
    shard: int
    rank: int
    version: int

    def connect(self) -> socket.socket:
        """A link to it."""
        host, _, port = self.address.removeprefix("tcp:").rpartition(":")
        link = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            link.settimeout(_ANSWER_S)
            link.connect((host.strip("[]"), int(port)))
        except OSError:
            link.close()
            raise
        return link


def spoken_version() -> int:
    """The version that clients of this build speak, as one of them says it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_ANSWER_S)
        client = _core.Client(
            run_id=1,
            trainer_rank=0,
            trainer_count=1,
            servers=[[f"tcp:127.0.0.1:{listener.getsockname()[1]}"]],
            connect_deadline_ms=int(_ANSWER_S * 1000),
        )

        def connect() -> None:
            with contextlib.suppress(Error):
                client.connect()

        thread = threading.Thread(target=connect)
        thread.start()
        try:
            link, _ = listener.accept()
            with link:
                link.settimeout(_ANSWER_S)
                header = _read(link, _HEADER_BYTES)
        finally:
            client.abort("its first words were heard")
            thread.join()
    version: int = _HEADER.unpack(header)[1]
    return version


def _text(words: str) -> bytes:
    """As payloads have them: length, bytes, and zeros up to a multiple of 8."""
    said = words.encode()
    return struct.pack("<I", len(said)) + said + bytes(-(4 + len(said)) % 8)


def auth(to: Target, step: int, nonce: bytes, mac: bytes, address: str = "") -> bytes:
    """A frame of a handshake by the trainer that is given out for."""
    payload = struct.pack("<II", step, SERVERS) + nonce + mac + _text(address)
    header = _WHO.pack(
        _MAGIC, to.version, AUTH, to.run_id, 0, 1, TRAINER, to.rank, _NO_SET
    ) + _WHAT.pack(0, 0, len(payload), _core.crc32c(payload))
    return header + struct.pack("<I", _core.crc32c(header)) + payload


def challenge(to: Target, nonce: bytes) -> bytes:
    """The first frame of a link."""
    return auth(to, CHALLENGE, nonce, NOTHING, to.address)


def proof(to: Target, key: bytes, nonce: bytes, answered: bytes) -> bytes:
    """The third frame, by who has this key."""
    said = b"cpudist connect\0" + struct.pack("<II", SERVERS, 0)
    said += struct.pack("<QIIII", to.run_id, 0, 1, TRAINER, to.rank)
    said += struct.pack("<QIIII", to.run_id, 0, 0, SERVER, to.shard)
    said += nonce + answered + _text(to.address)
    return auth(to, PROOF, NOTHING, hmac.digest(key, said, hashlib.sha256))


def fresh_nonce() -> bytes:
    """Of somebody who is new."""
    return os.urandom(32)


def answer(link: socket.socket) -> tuple[bytes, bytes]:
    """Nonce and MAC of the listener's frame, which is no refusal yet."""
    header = _HEADER.unpack(_read(link, _HEADER_BYTES))
    payload = _read(link, header[11])
    if header[2] != AUTH:
        raise ConnectionError(
            f"a frame of kind {header[2]} in a handshake: {payload!r}"
        )
    return payload[8:40], payload[40:72]


def is_refused(link: socket.socket) -> bool:
    """Whether the listener says so, or closes the link; not where it takes it."""
    try:
        said = link.recv(_HEADER_BYTES)
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return not said or (
        len(said) >= 8 and struct.unpack_from("<H", said, 6)[0] == ERROR
    )


def _read(link: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = link.recv(count - len(found))
        if not more:
            raise ConnectionError("the link was closed")
        found += more
    return found
