# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the files of an export are called."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
_ROWS = re.compile(r"t([0-9]{3,10})-([0-9]{4,10}|gone)\.safetensors")


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
    if whole == MANIFEST:
        return True
    try:
        table_of(whole)
    except ValueError:
        return False
    return True
