# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the rules of scripts/tidy.py share: a violation, and which files are which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

PYTHON = {".py", ".pyi"}
NATIVE = {".cpp", ".h"}
CODE = PYTHON | NATIVE | {".sh"}
TEXT = CODE | {".md", ".toml", ".txt"}

# Every checked file: its path from the root, with forward slashes, and its text.
Sources = Mapping[str, str]


@dataclass(frozen=True)
class Violation:
    """One broken rule at one line of one file."""

    path: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        """Return the form that editors can jump to."""
        return f"{self.path}:{self.line}: {self.rule}: {self.what}"


def within(names: Iterable[str], *folders: str) -> Iterator[str]:
    """Yield the names that are below one of these folders, in order."""
    for name in sorted(names):
        if name.startswith(tuple(f"{folder}/" for folder in folders)):
            yield name
