# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What pages show of programs' output, against what these print: all but the numbers.

A block of a page that follows ``<!-- printed: NAME -->`` is output. The test that runs
the program, on small data, hands what it has printed to ``check``.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"<!-- printed: ([\w-]+) -->\n```\w+\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"[-+]?(?:(?<![\w.])nan\b|\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)")
# Where a user's files are is not of the program.
FILE = re.compile(r"[^\s=\"]*\.(png|ckpt|npy|tsv)\b")
SNAPSHOT = re.compile(r"\bsnap-[\w-]+")
# Left out of the page: within a line, or lines.
LEFT_OUT = "…"


def pages() -> list[Path]:
    """All pages that may show output."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> dict[str, str]:
    """The output that pages show, by name.

    Raises:
        ValueError: a name is there twice.
    """
    found: dict[str, str] = {}
    for page in pages():
        for name, text in BLOCK.findall(page.read_text()):
            if name in found:
                raise ValueError(f"{page.name}: printed: {name} is there twice")
            found[name] = text
    return found


def shape(text: str) -> list[str]:
    """The lines with numbers and paths taken out; of equal neighbours one."""
    lines: list[str] = []
    for line in text.splitlines():
        named = SNAPSHOT.sub("SNAPSHOT", FILE.sub(r"FILE.\1", line))
        kept = " ".join(NUMBER.sub("#", named).split())
        # Among equal ones it does not matter which are left out.
        if lines[-1:] == [LEFT_OUT] and lines[-2:-1] == [kept]:
            lines.pop()
        if kept and lines[-1:] != [kept]:
            lines.append(kept)
    return lines


def difference(shown: str, printed: str) -> str | None:
    """Say how a page differs from what was printed; ``None`` if it does not.

    Lines of a page may be wrapped.

    Args:
        shown: block of the page.
        printed: by the program.
    """
    found, wanted = " ".join(shape(printed)), " ".join(shape(shown))
    pattern = "".join(
        r"(?: .*)?"
        if word == LEFT_OUT
        else " " + re.escape(word).replace(LEFT_OUT, ".*")
        for word in wanted.split()
    )
    if re.fullmatch(pattern, f" {found}"):
        return None
    return f"expected, but for numbers:\n{wanted}\nfound:\n{found}"


def check(name: str, printed: str) -> None:
    """Fail the test unless the page shows what was printed."""
    different = difference(blocks()[name], printed)
    assert different is None, f"printed: {name}: {different}"
