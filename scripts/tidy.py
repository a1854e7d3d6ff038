# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks the rules of CONTRIBUTING.md that no formatter knows.

Prints `file:line: rule: what` for every violation and exits 1 if there is one. The
rules are in scripts/tidy_rules, a file for each kind.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tidy_rules import (
    CODE,
    TEXT,
    Sources,
    Violation,
    functions,
    includes,
    layers,
    shape,
)
from tidy_rules import text as texts

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    *("torch_cpudist", "csrc", "tests", "scripts", "examples", "benchmarks"),
    *("docs", ".ci"),
)


def files_in(root: Path) -> Iterator[Path]:
    """Yield every checked file below a root, in a fixed order."""
    yield from sorted(p for p in root.iterdir() if p.is_file() and p.suffix in TEXT)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            generated = "__pycache__" in path.parts or path.name == "_build_info.py"
            named = path.suffix in TEXT or folder == ".ci"
            if path.is_file() and named and not generated:
                yield path


CHECKS: dict[str, tuple[Callable[[str, str], Iterator[Violation]], ...]] = {
    ".py": (functions.check_python, shape.check_packed_calls),
    ".cpp": (functions.check_native,),
    ".h": (functions.check_native,),
    ".md": (texts.check_markdown,),
}


def check_file(name: str, text: str) -> Iterator[Violation]:
    """Check one file.

    Args:
        name: its path from the root, with forward slashes.
        text: its contents.
    """
    yield from texts.check_text(name, text)
    suffix = Path(name).suffix
    if suffix in CODE or name.startswith(".ci/"):
        yield from texts.check_size(name, text)
        yield from texts.check_license(name, text)
    for check in CHECKS.get(suffix, ()):
        yield from check(name, text)


def check_sources(sources: Sources) -> Iterator[Violation]:
    """Check what files have to do with each other.

    Args:
        sources: every file, by its path from the root.
    """
    yield from includes.check_headers(sources)
    yield from includes.check_includes(sources)
    for edges in (layers.python_edges(sources), layers.native_edges(sources)):
        yield from layers.check_layers(edges)
        yield from layers.check_circles(edges)
    yield from shape.check_crowding(sources)
    yield from shape.check_twin_tests(sources)
    yield from shape.check_torn_classes(sources)
    yield from shape.check_privacy(sources)


def check_tree(root: Path) -> Iterator[Violation]:
    """Check every file below a root."""
    # The sources' trees are kept to the end: to look for rubbish among them is in vain.
    collects = gc.isenabled()
    gc.disable()
    try:
        yield from _check_tree(root)
    finally:
        if collects:
            gc.enable()


def _check_tree(root: Path) -> Iterator[Violation]:
    sources = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in files_in(root)
    }
    for name, text in sources.items():
        yield from check_file(name, text)
    yield from check_sources(sources)
    if f"{layers.PACKAGE}/__init__.py" in sources:
        yield from layers.check_rows(sources)
    yield from shape.check_tracked(shape.tracked(root))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    found = list(check_tree(parser.parse_args().root))
    for violation in found:
        print(violation)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
