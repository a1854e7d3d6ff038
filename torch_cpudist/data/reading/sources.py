# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files that Python opens for the readers: gzip and zstd.

Decompression releases the GIL; the bytes go to the parser of a reader thread.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from torch_cpudist.data.reading import remote
from torch_cpudist.errors import ConfigurationError, DataFileError

_PIECE_BYTES = 1 << 20
_COMPRESSED_BYTES = 64 << 10  # that become so many more
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}


def compression(path: str) -> str | None:
    """How a file is compressed, by its first bytes: ``"gzip"``, ``"zstd"`` or not.

    Raises:
        DataFileError: it cannot be read, or its name says otherwise than its bytes.
    """
    try:
        head = remote.head(path, 4)
    except OSError as error:
        raise DataFileError(f"{path}: {error.strerror or error}") from error
    found = None
    if head.startswith(_GZIP):
        found = "gzip"
    elif head == _ZSTD:
        found = "zstd"
    named = _SUFFIXES.get(Path(path).suffix)
    if named is not None and found != named:
        raise DataFileError(
            f"{path}: expected {named} data, as its name says, found "
            f"{'an empty file' if not head else 'something else'}"
        )
    return found


def decompressed(path: str, kind: str) -> Iterator[bytes]:
    """Yields the content of a compressed file, of one member or several.

    Raises:
        DataFileError: it cannot be read, is cut off or damaged.
        ConfigurationError: the package that reads zstd is not installed.
    """
    pieces = _gzip(path) if kind == "gzip" else _zstd(path)
    try:
        with remote.failures_of(path):
            try:
                yield from pieces
            except EOFError as error:
                raise _cut_off(path, kind) from error
    except DataFileError:
        raise
    except (OSError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise DataFileError(f"{path}: {why}") from error


def _cut_off(path: str, kind: str) -> DataFileError:
    far = remote.is_remote(path)
    size = remote.size_bytes(path) if far else Path(path).stat().st_size
    return DataFileError(
        f"{path}: the {kind} data end before their end mark: the file was cut off at "
        f"{size} bytes"
    )


def _gzip(path: str) -> Iterator[bytes]:
    with remote.opened(path) as packed, gzip.open(packed, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _zstd(path: str) -> Iterator[bytes]:
    # Not its stream reader, which takes a file that was cut off for a whole one.
    try:
        import zstandard
    except ImportError as error:
        raise ConfigurationError(
            "reading zstd files needs the package zstandard: pip install zstandard"
        ) from error
    decoder = None
    with remote.opened(path) as file:
        while data := file.read(_COMPRESSED_BYTES):
            while data:
                if decoder is None:
                    decoder = zstandard.ZstdDecompressor().decompressobj()
                try:
                    piece = decoder.decompress(data)
                except zstandard.ZstdError as error:
                    raise DataFileError(
                        f"{path}: damaged zstd data before byte {file.tell()}: {error}"
                    ) from error
                if piece:
                    yield piece
                data = decoder.unused_data
                if decoder.eof:
                    decoder = None
    if decoder is not None:
        raise _cut_off(path, "zstd")


def plain(path: str) -> Iterator[bytes]:
    """Yields the content of a file that is not compressed.

    Raises:
        DataFileError: it cannot be read.
    """
    try:
        with remote.failures_of(path), remote.opened(path) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise DataFileError(f"{path}: {error.strerror or error}") from error
