# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the files of an export are called."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.machine.urls import is_url

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
#: In a directory whose export has begun and is not there yet.
BEGUN = "export.begun"
_ROWS = re.compile(r"t([0-9]{3,10})-([0-9]{4,10}|gone)\.safetensors")


def folder_of(path: object) -> Path:
    """The directory of an export, as it was given.

    Raises:
        InvalidArgumentError: it is a URL, or no path.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidArgumentError(f"expected the directory of an export, not {path!r}")
    if isinstance(path, str) and is_url(path):
        raise InvalidArgumentError(
            f"{path} is a URL, and exports are directories whose files are mapped into "
            "memory. Pass a path on this host, and copy the directory, its "
            "manifest.json last."
        )
    return Path(os.path.normpath(Path(path).expanduser().absolute()))


def rows_name(table: int, part: int) -> str:
    """A file of rows; parts of a table count from 0."""
    return f"t{table:03d}-{part:04d}.safetensors"


def gone_name(table: int) -> str:
    """The file of keys whose rows went since the base."""
    return f"t{table:03d}-gone.safetensors"


def table_of(name: str) -> int | None:
    """Of which table a file's name says that it is; ``None`` for the model's.

    Raises:
        ValueError: no file of an export is called so.
    """
    if name == MODEL:
        return None
    found = _ROWS.fullmatch(name)
    if found is None:
        raise ValueError(name)
    table, part = int(found.group(1)), found.group(2)
    same = gone_name(table) if part == "gone" else rows_name(table, int(part))
    if name != same:
        raise ValueError(name)
    return table


def is_gone(name: str) -> bool:
    """Whether a file has keys without rows."""
    return name.endswith("-gone.safetensors")


def is_own(text: str) -> bool:
    """Whether a file in the directory of an export is one that is made here."""
    whole = text.removesuffix(".tmp")
    if whole in (MANIFEST, BEGUN):
        return True
    try:
        table_of(whole)
    except ValueError:
        return False
    return True
