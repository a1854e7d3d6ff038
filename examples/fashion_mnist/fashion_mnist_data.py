# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fashion-MNIST: 70,000 pictures of clothes, 28 x 28 grey, ten kinds (Zalando, MIT).

Reads the four files in IDX form that Debian's package dataset-fashion-mnist has: a
header of big-endian numbers (magic, then a size per dimension), then one byte per
value. Every file is checked before it is used.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

FOLDER = Path("/usr/share/datasets/fashion-mnist")
PACKAGE = "dataset-fashion-mnist"
SIDE = 28
KINDS = 10
# Of the training pictures, as shares of 255.
MEAN, DEVIATION = 0.2860, 0.3530
BYTES = 0x08  # the code of unsigned bytes in an IDX magic number


class DataError(Exception):
    """A file is missing or not what it should be; the message says what to do."""


@dataclass(frozen=True)
class Pictures:
    """One split.

    Attributes:
        images: uint8 ``[n, 1, 28, 28]``.
        kinds: int64 ``[n]``, 0 to 9.
    """

    images: npt.NDArray[np.uint8]
    kinds: npt.NDArray[np.int64]


def unzipped(path: Path) -> bytes:
    """Return what a gzip file holds.

    Raises:
        DataError: it is missing, cut off, or no gzip file.
    """
    try:
        with gzip.open(path) as file:
            return file.read()
    except FileNotFoundError:
        raise DataError(
            f"{path.name} is not in {path.parent}: get it without root by `apt-get "
            f"download {PACKAGE} && dpkg-deb -x {PACKAGE}_*.deb fashion` and pass "
            f"--data fashion{FOLDER}, or by `apt install {PACKAGE}`"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected a whole gzip file, found: {error}") from None


def read_idx(path: Path, *shape: int | None) -> npt.NDArray[np.uint8]:
    """Read a gzipped IDX file of bytes.

    Args:
        path: the file.
        shape: the sizes that are expected; ``None``: any.

    Raises:
        DataError: the file is not that, with what was expected and found.
    """
    data = unzipped(path)
    header_bytes = 4 + 4 * len(shape)
    if len(data) < header_bytes:
        raise DataError(
            f"{path}: expected a header of {header_bytes} bytes, found {len(data)}"
        )
    magic, *sizes = struct.unpack_from(f">{1 + len(shape)}I", data)
    expected = BYTES << 8 | len(shape)
    if magic != expected:
        raise DataError(
            f"{path}: expected magic number {expected:#010x} (bytes in {len(shape)} "
            f"dimensions), found {magic:#010x}"
        )
    if any(want not in (None, size) for want, size in zip(shape, sizes, strict=True)):
        wanted = ["any" if want is None else want for want in shape]
        raise DataError(f"{path}: expected sizes {wanted}, found {sizes}")
    count = int(np.prod(sizes, dtype=object))
    if len(data) - header_bytes != count:
        raise DataError(
            f"{path}: expected {count} bytes after the header, as its sizes {sizes} "
            f"say, found {len(data) - header_bytes}"
        )
    return np.frombuffer(data, np.uint8, offset=header_bytes).reshape(sizes)


def load(folder: Path, split: str) -> Pictures:
    """Return the split ``"train"`` (60,000 pictures) or ``"t10k"`` (10,000).

    Raises:
        DataError: see ``read_idx``.
    """
    images = read_idx(folder / f"{split}-images-idx3-ubyte.gz", None, SIDE, SIDE)
    path = folder / f"{split}-labels-idx1-ubyte.gz"
    kinds = read_idx(path, len(images))
    if len(kinds) == 0:
        raise DataError(f"{path}: expected pictures, found none")
    if kinds.max() >= KINDS:
        raise DataError(f"{path}: expected kinds 0 to 9, found {kinds.max()}")
    # Copies, because torch wants memory that it may write to.
    return Pictures(images[:, None].copy(), kinds.astype(np.int64))
