# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which sources the build compiles, what they say of themselves, and which as one.

Sources that cost little next to the headers and templates they share are compiled
together, by a file that includes them; their names in unnamed namespaces then differ.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path

from toolchain import write_if_changed

NOTE_LINES = 20


def sources_in(*folders: Path) -> list[Path]:
    """Return every .cpp file below the folders, in a fixed order."""
    return [path for folder in folders for path in sorted(folder.rglob("*.cpp"))]


def note_of(source: Path, name: str) -> str | None:
    """Return the rest of a line `// name: rest` among a source's first lines."""
    with source.open(encoding="utf-8") as lines:
        for _, line in zip(range(NOTE_LINES), lines, strict=False):
            if line.startswith(f"// {name}:"):
                return line.split(":", 1)[1].strip()
    return None


def file_flags(source: Path) -> list[str]:
    """Return the flags that a source asks for, on x86-64: `// build-flags: -mavx2`."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    return (note_of(source, "build-flags") or "").split()


def tests_threads(source: Path) -> bool:
    """Return whether a race can be in what a test runs: unless it says there is none.

    `// threads: none` is for tests of pure functions in the thread that runs the test.
    """
    return note_of(source, "threads") != "none"


def merged(output: Path, sources: Iterable[Path]) -> Path:
    """Write one source that includes others, and return it."""
    write_if_changed(output, [f'#include "{source}"' for source in sources])
    return output


def merged_by_word(sources: Iterable[Path], folder: Path, root: Path) -> list[Path]:
    """Return what to compile in place of sources: one file for those of a word.

    Those are the sources of one folder whose names begin with the same word, as
    tcp_socket.cpp and tcp_channel.cpp. Alone stays a source without another of its
    word, and one with flags of its own. The files are written below `folder`, at the
    places that their sources have below `root`.
    """
    groups: dict[Path, list[Path]] = {}
    for source in sources:
        word = source.name if file_flags(source) else source.stem.split("_")[0]
        groups.setdefault(source.parent / word, []).append(source)
    units = []
    for place, group in groups.items():
        if len(group) > 1:
            output = folder / place.relative_to(root)
            group = [merged(output.with_name(f"{output.name}.cpp"), group)]
        units += group
    return units
