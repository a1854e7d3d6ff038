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


HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ANCHOR = re.compile(r'<a (?:name|id)="([^"]+)">')
LINK = re.compile(r"\]\(([^)\s:#]*)#([^)\s]+)\)")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Names of a page's places that are alike on GitHub and on the site.

    GitHub makes a hyphen of each space, the site one of all that stand together.
    """
    found = set(ANCHOR.findall(text))
    for heading in HEADING.findall(text):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        kept = re.sub(r"[^\w\- ]", "", shown)
        if kept.replace(" ", "-") == re.sub(r"[-\s]+", "-", kept.strip()):
            found.add(kept.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_pages_lead_there_on_github_and_on_the_site(page: Path) -> None:
    gone = []
    for name, anchor in LINK.findall(prose(page)):
        other = page.parent / name if name else page
        if anchor not in anchors(prose(other)):
            gone.append(f"{name}#{anchor}")
    assert gone == []


def test_headings_that_github_and_the_site_name_differently_are_no_place() -> None:
    text = '# With 5 %, and means\n## `step()`\n<a name="delay"></a>\n## A - B\n'
    assert anchors(text) == {"step", "delay"}
