# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files of other file systems (hdfs, object stores), by fsspec, and of this one."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from torch_cpudist.errors import DataFileError, Error, InvalidArgumentError
from torch_cpudist.machine.urls import is_url, system_of


def is_remote(path: str) -> bool:
    """Whether a name is a URL (``hdfs://…``, ``s3://…``) and no path of this system."""
    return is_url(path)


def list_files(pattern: str | os.PathLike[str], **options: Any) -> list[str]:
    """The files that a pattern stands for, sorted: a list for datasets.

    ``list_files("hdfs://name:8020/clicks/2026-11-*/part-*")``. A pattern may have
    ``*``, ``?``, ``[…]`` and ``**``; a folder stands for the files right in it. With a
    scheme (``hdfs://``, ``s3://``, ``memory://`` …) it goes through the package fsspec,
    any other one is of this system. All trainers need the same list: where files come
    while it is made, make it on one of them.

    Args:
        pattern: what to list.
        options: of the file system (``anon=``, ``host=`` …), for this listing. Readers
            open files by fsspec's own configuration (``~/.config/fsspec``,
            ``FSSPEC_*``), which serves both.

    Returns:
        Paths, or URLs that begin as the pattern does.

    Raises:
        ConfigurationError: fsspec or its driver of the scheme is not installed, or the
            scheme is unknown.
        DataFileError: there is no such file, or the file system cannot be reached.
        InvalidArgumentError: options for a path of this system, which has none.
    """
    name = os.fsdecode(pattern)
    if is_remote(name):
        files = _remote_files(name, options)
    elif options:
        raise InvalidArgumentError(
            f"list_files({name!r}): options {sorted(options)}, expected none: it is a "
            "path of this system"
        )
    else:
        folder = Path(name).is_dir()
        found = glob.glob(f"{glob.escape(name)}/*" if folder else name, recursive=True)
        files = [path for path in found if Path(path).is_file()]
    if not files:
        raise DataFileError(f"{name}: expected files, found none")
    return sorted(files)


def _remote_files(name: str, options: dict[str, Any]) -> list[str]:
    name = name.rstrip("/")
    system, path = _system(name, options)
    with failures_of(name):
        if system.isdir(path):
            found = system.ls(path, detail=True)
        else:
            found = system.glob(path, detail=True).values()
    # A driver's names have no scheme, and some no host.
    head = name.removesuffix(path) if name.endswith(path) else None
    return [
        system.unstrip_protocol(one["name"]) if head is None else head + one["name"]
        for one in found
        if one["type"] == "file"
    ]


def opened(path: str) -> IO[bytes]:
    """A file, to be read; the caller closes it.

    Raises:
        OSError: of a file of this system.
        DataFileError, ConfigurationError: of another one; see ``list_files``.
    """
    if not is_remote(path):
        return Path(path).open("rb")
    system, name = _system(path, {})
    with failures_of(path):
        return cast("IO[bytes]", system.open(name, "rb"))


def head(path: str, count: int) -> bytes:
    """The first ``count`` bytes of a file, or all; of another system no more than that.

    Raises:
        OSError: of a file of this system.
        DataFileError, ConfigurationError: of another one; see ``list_files``.
    """
    if not is_remote(path):
        with Path(path).open("rb") as file:
            return file.read(count)
    system, name = _system(path, {})
    with failures_of(path):
        return bytes(system.cat_file(name, start=0, end=count))


def size_bytes(path: str) -> int:
    """The size of a file of another system; 1 where that is not told.

    Raises:
        DataFileError, ConfigurationError: see ``list_files``; it is a folder.
    """
    system, name = _system(path, {})
    with failures_of(path):
        about = system.info(name)
    if about["type"] != "file":
        raise DataFileError(f"{path}: expected a file, found a {about['type']}")
    size = about.get("size")
    return 1 if size is None else int(size)


@contextmanager
def failures_of(path: str) -> Iterator[None]:
    """Raises what a driver of another system raises, of whatever class, as our own.

    What files of this system raise passes.
    """
    try:
        yield
    except Error:
        raise
    except Exception as error:
        if not is_remote(path):
            raise
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataFileError(f"{path}: {why}") from error


def _system(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    return system_of(url, options, DataFileError)
