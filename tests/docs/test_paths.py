# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every file and every test that a page names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FOLDERS = ("tests", "csrc", "torch_cpudist", "scripts", "examples", "benchmarks")
NAMED = re.compile(rf"`((?:(?:{'|'.join(FOLDERS)})/|::)[^`\s]*)`")


def missing(text: str) -> list[str]:
    """What a page names and nobody has; `::test` is of the file named before it."""
    found, last = [], ""
    for name in NAMED.findall(text):
        path, _, test = name.partition("::")
        last = path or last
        files = [one for one in ROOT.glob(last.rstrip("/")) if one.exists()]
        if not files or (test and not defines(files, test)):
            found.append(name)
    return found


def defines(files: list[Path], test: str) -> bool:
    """Whether one of the files has a test of that name, parameters aside."""
    pattern = re.compile(rf"def {re.escape(test.partition('[')[0])}\b")
    return any(pattern.search(one.read_text(encoding="utf-8")) for one in files)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    # A changelog tells of what was.
    if page.name != "CHANGELOG.md":
        assert missing(page.read_text(encoding="utf-8")) == []


def test_a_name_without_a_file_is_found() -> None:
    this = "tests/docs/test_paths.py"
    assert missing(f"`{this}::test_a_name_without_a_file_is_found`") == []
    assert missing(f"`{this}::test_gone`, `::test_gone_too`") == [
        f"{this}::test_gone",
        "::test_gone_too",
    ]
    assert missing("`csrc/gone/*.cpp`") == ["csrc/gone/*.cpp"]
