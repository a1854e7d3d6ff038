# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The site made of docs/ builds without a warning, and nothing in it is broken."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    """What a page has and what it points to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.targets: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.names.add(value)
            elif name in ("href", "src") and value:
                self.targets.append(value)


def test_every_page_is_reached(site: Path) -> None:
    made = {path.stem for path in site.glob("*.html")} - {"404"}
    assert made == {path.stem for path in (ROOT / "docs").glob("*.md")}
    start = Page(site / "index.html").targets
    for name in made - {"index"}:
        assert f"{name}.html" in start, name


def test_links_and_pictures_are_there(site: Path) -> None:
    pages = {path: Page(path) for path in site.glob("*.html") if path.stem != "404"}
    checked = 0
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            found = (path.parent / unquote(parts.path)) if parts.path else path
            assert found.exists(), (path.name, target)
            if parts.fragment and found.resolve() in pages:
                names = pages[found.resolve()].names
                assert unquote(parts.fragment) in names, (path.name, target)
            checked += 1
    assert checked > 100
