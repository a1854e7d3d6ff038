# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files mapped into memory, of which nothing is used before its checksum was found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch_cpudist import _core
from torch_cpudist.errors import SnapshotCorruptError
from torch_cpudist.snapshot.checked_json import Malformed
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.tensors import Header, header_bytes, read_header


class Mapped:
    """A file whose size and checksums are known.

    Each chunk is checked when it is looked at first. Thread safety: any number of
    threads; some may check the same chunk.

    Args:
        files: the file system.
        path: the file.
        size_bytes: that it has to have.
        crc32c: of every ``chunk_bytes``, the last of what is left.
        chunk_bytes: bytes that have a checksum of their own.
        table: whose rows it has, for messages.
        kind: what the directory is, for messages.

    Raises:
        SnapshotCorruptError: it is not there, or of another size.
    """

    def __init__(
        self,
        files: Files,
        path: Path,
        size_bytes: int,
        crc32c: Sequence[int],
        chunk_bytes: int,
        table: str = "",
        kind: str = "snapshot",
    ) -> None:
        self._kind = kind
        self.path = path
        self.size_bytes = size_bytes
        self._table = table
        self._crc32c = crc32c
        self._chunk_bytes = chunk_bytes
        self._checked = bytearray(len(crc32c))
        self._header: Header | None = None
        found = files.size(path)
        if found != size_bytes:
            what = "it is not there" if found is None else f"found {found} bytes"
            raise self.damaged(f"expected {size_bytes} bytes, {what}")
        self._memory = files.map(path)
        if len(self._memory) != size_bytes:
            raise self.damaged("its size changes while it is read")

    def damaged(self, what: str) -> SnapshotCorruptError:
        """The error for a file that is not as it was written."""
        of_table = f" of table {self._table!r}" if self._table else ""
        return SnapshotCorruptError(
            f"{self._kind} {self.path.parent.name}: {self.path.name}{of_table} is "
            f"damaged: {what}. Take another {self._kind}, or bring the file back from "
            "a copy.",
            self.path.name,
            self._table,
        )

    def view(self, begin: int, end: int) -> memoryview:
        """Bytes of the file, all chunks of which are right.

        Raises:
            SnapshotCorruptError: one is not.
        """
        if not 0 <= begin <= end <= self.size_bytes:
            raise self.damaged(f"bytes {begin} to {end} of {self.size_bytes}")
        size = self._chunk_bytes
        if begin < end:
            for chunk in range(begin // size, (end - 1) // size + 1):
                if not self._checked[chunk]:
                    self._check(chunk)
        return self._memory[begin:end]

    def _check(self, chunk: int) -> None:
        begin = chunk * self._chunk_bytes
        contents = self._memory[begin : begin + self._chunk_bytes]
        found, expected = _core.crc32c(contents), self._crc32c[chunk]
        if found != expected:
            raise self.damaged(
                f"bytes {begin} to {begin + len(contents)} have the checksum "
                f"{found:08x}, expected {expected:08x}"
            )
        self._checked[chunk] = 1

    @property
    def memory(self) -> memoryview:
        """All of the file, of which nothing is checked: for who checks it."""
        return self._memory

    @property
    def crc32c(self) -> Sequence[int]:
        """The checksums of its chunks."""
        return self._crc32c

    def check_all(self) -> None:
        """Checks every chunk.

        Raises:
            SnapshotCorruptError: one is not what it was.
        """
        self.view(0, self.size_bytes)

    def header(self) -> Header:
        """What the header of a safetensors file says.

        Raises:
            SnapshotCorruptError: it is none.
        """
        if self._header is None:
            try:
                begin = header_bytes(
                    self.view(0, min(8, self.size_bytes)), self.size_bytes
                )
                self._header = read_header(self.view(0, begin), self.size_bytes)
            except Malformed as error:
                raise self.damaged(str(error)) from error
        return self._header
