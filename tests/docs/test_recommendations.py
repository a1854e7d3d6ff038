# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What docs/strategies.md recommends is not what docs/convergence.md says fails."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(
        rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)",
        text,
        re.DOTALL | re.MULTILINE,
    )
    assert found is not None, (page, heading)
    return found[1]


def test_geo_is_not_recommended_for_word_vectors_while_it_fails_there() -> None:
    measured = section("convergence.md", "### word2vec")
    rows = re.findall(r"^\| `geo[^`]*` \|.*$", measured, re.MULTILINE)
    assert len(rows) >= 3
    fails = any("**no**" in row for row in rows)
    geo = section("strategies.md", "## Geo")
    when = re.search(r"\*\*When\.\*\*(.*?)\n\n", geo, re.DOTALL)
    assert when is not None
    words = " ".join(when[1].split())
    assert "convergence.md" in words
    if fails:
        recommended = words.split("take Async or Sync")[0]
        assert "word" not in recommended.split("On word vectors")[0].lower()
        assert "take Async or Sync for word and graph embeddings" in words
