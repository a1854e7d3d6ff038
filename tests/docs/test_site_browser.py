# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The site in a browser: pages render, the search finds, no link or picture is broken.

Chromium is Debian's (``apt install chromium``), without a window, and sees this host
only.
"""

from __future__ import annotations

import functools
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from chromium import Chromium

pytestmark = [pytest.mark.processes, pytest.mark.integrations]

ROOT = Path(__file__).resolve().parents[2]
PICTURES = """[...document.images].map(
    one => ({from: one.src, width: one.naturalWidth, shown: one.complete}))"""
LINKS = "[...document.querySelectorAll('a[href]')].map(one => one.href)"
PLACES = "[...document.querySelectorAll('[id], [name]')].map(one => one.id || one.name)"
SEARCH = "document.querySelector('[data-md-component=search-query]')"
FOUND = "[...document.querySelectorAll('.md-search-result__link')].map(one => one.href)"


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served, on loopback."""
    handler = functools.partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed: apt install chromium")
    one = Chromium(program, tmp_path_factory.mktemp("chromium"))
    try:
        one.attach()
        yield one
    finally:
        one.close()


def test_the_front_page_renders(browser: Chromium, address: str) -> None:
    browser.open(address)
    assert browser.failures() == []
    assert "torch_cpudist" in browser.evaluate("document.title")
    text = browser.evaluate("document.querySelector('h1').innerText")
    assert text.startswith("torch_cpudist")
    # With its style sheet: the theme's bar is coloured and stays where it is.
    header = "document.querySelector('.md-header')"
    style = f"getComputedStyle({header})"
    assert browser.evaluate(f"{style}.position") == "sticky"
    assert browser.evaluate(f"{style}.backgroundColor") != "rgba(0, 0, 0, 0)"
    box = "document.querySelector('article').getBoundingClientRect()"
    assert browser.evaluate(f"{box}.width") > 300
    assert browser.evaluate(f"{box}.height") > 300


def test_the_search_finds_a_page_by_a_word(browser: Chromium, address: str) -> None:
    browser.open(address)
    browser.evaluate(f"{SEARCH}.focus()")
    browser.type("max_staleness")
    browser.until(f"({FOUND}).length", "results of the search")
    pages = [urldefrag(link).url for link in browser.evaluate(FOUND)]
    assert any("strategies.html" in page for page in pages), pages
    browser.open(browser.evaluate(f"({FOUND})[0]"))
    assert browser.failures() == []
    assert "max_staleness" in browser.evaluate("document.body.innerText")


def named_pictures() -> set[str]:
    """The pictures that the sources of the pages name."""
    texts = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    return set(re.findall(r"!\[[^\]]*\]\((images/[^)]+)\)", "\n".join(texts)))


def test_no_link_and_no_picture_is_broken(
    browser: Chromium, address: str, site: Path
) -> None:
    places: dict[str, set[str]] = {}
    links: list[tuple[str, str]] = []
    pictures = set()
    for path in sorted(site.glob("*.html")):
        if path.stem == "404":
            continue
        page = f"{address}{path.name}"
        browser.open(page)
        assert browser.failures() == [], page
        for one in browser.evaluate(PICTURES):
            assert one["width"] > 0, (page, one)
            pictures.add(one["from"].removeprefix(address))
        places[page] = set(browser.evaluate(PLACES))
        links += [(page, link) for link in browser.evaluate(LINKS)]
    assert len(pictures) > 5
    assert pictures >= named_pictures()
    checked = 0
    for page, link in links:
        target, fragment = urldefrag(link)
        if not target.startswith(address):
            continue
        target = (
            address + "index.html" if target in (address, address + ".") else target
        )
        assert target in places, (page, link)
        assert not fragment or unquote(fragment) in places[target], (page, link)
        checked += 1
    assert checked > 100
