# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tree of docs/architecture.md has a line for each folder, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TREE = TREE.partition("## The tree")[2].partition("\n## ")[0]
PARTS = dict(re.findall(r"`(torch_cpudist|csrc)/`:\n\n((?:.+\n)+)", TREE))
SOURCES = {"torch_cpudist": (".py",), "csrc": (".cpp", ".h")}


def folders(part: str) -> set[str]:
    """Folders with sources of their own, `__init__` aside."""
    root = ROOT / part
    files = (one for kind in SOURCES[part] for one in root.rglob(f"*{kind}"))
    homes = {one.parent for one in files if one.stem != "__init__"}
    return {home.relative_to(root).as_posix() for home in homes if home != root}


@pytest.mark.parametrize("part", SOURCES)
def test_every_folder_has_one_line_and_a_line_is_of_a_folder(part: str) -> None:
    lines = PARTS[part].splitlines()
    heads = [line.partition(": ")[0] for line in lines]
    assert [head for head in heads if not head.startswith("- `")] == []
    named = [name for head in heads for name in re.findall(r"`([^`]+)`", head)]
    assert len(named) == len(set(named))
    of_folders = {name.rstrip("/") for name in named if name.endswith("/")}
    assert of_folders >= folders(part)
    assert [name for name in named if not (ROOT / part / name).exists()] == []
