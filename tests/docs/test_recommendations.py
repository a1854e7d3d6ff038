# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What docs/strategies.md recommends is not what docs/convergence.md says fails."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

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


Cell = tuple[str, int, int]  # push_every, trainers, epochs


class Interval(NamedTuple):
    """A row of the tables of "Geo's interval"."""

    cell: Cell
    holds: bool
    bytes_each: int


# Each with two and four trainers, one and three epochs; on flights 100 is as 400.
STUDIED = {
    "word vectors": ("None", "10", "50", "100", "400"),
    "flights": ("None", "10", "50", "400"),
}
NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}


def intervals(measured: str) -> dict[str, list[Interval]]:
    """The rows of the tables of `push_every`, by what was trained."""
    found: dict[str, list[Interval]] = {}
    workload = ""
    for line in measured.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "`push_every`":
            workload = "word vectors" if "rho" in cells else "flights"
            assert cells[1:3] == ["trainers", "epochs"]
            assert cells[6] == "holds"
        elif line.startswith("|") and cells[0].strip("`").isalnum() and workload:
            assert cells[6] in ("yes", "**no**"), line
            cell = cells[0].strip("`"), int(cells[1]), int(cells[2])
            row = Interval(cell, cells[6] == "yes", int(cells[7].replace(",", "")))
            found.setdefault(workload, []).append(row)
        elif not line.startswith("|"):
            workload = ""
    return found


def named_as_failing(words: str, workload: str, tried: list[Interval]) -> set[Cell]:
    """Those of the rows of which the paragraph says that they fail."""
    said = re.search(rf"these fail: [^.]*?on {workload}([^.;]*)", words)
    assert said is not None, workload
    found: set[Cell] = set()
    for epochs, text in re.findall(r"after (\w+) epochs?((?:(?!after).)*)", said[1]):
        for low, high, count in re.findall(r"(\d+)(?: to (\d+))? with (\w+)", text):
            for (every, trainers, trained), _, _ in tried:
                if (trainers, trained) != (NUMBERS[count], NUMBERS[epochs]):
                    continue
                if every != "None" and int(low) <= int(every) <= int(high or low):
                    found.add((every, trainers, trained))
    return found


def misnamed(words: str, measured: str) -> set[Cell]:
    """What fails and is not named so, or is named so and holds."""
    wrong: set[Cell] = set()
    for workload, tried in intervals(measured).items():
        fails = {row.cell for row in tried if not row.holds}
        wrong |= fails ^ named_as_failing(words, workload, tried)
    return wrong


def when_of_geo() -> str:
    """The paragraph that says when to take Geo, in one line."""
    when = re.search(
        r"\*\*When\.\*\*(.*?)\n\n", section("strategies.md", "## Geo"), re.DOTALL
    )
    assert when is not None
    return " ".join(when[1].split())


def test_every_interval_that_fails_is_named_where_geo_is_recommended() -> None:
    measured = section("convergence.md", "## Geo's interval")
    tried = intervals(measured)
    for workload, numbers in STUDIED.items():
        cells = set(itertools.product(numbers, (2, 4), (1, 3)))
        assert cells - {row.cell for row in tried[workload]} == set()
    assert sum(not row.holds for row in tried["word vectors"]) >= 10
    assert misnamed(when_of_geo(), measured) == set()


@pytest.mark.parametrize(
    ("row", "cell"),
    [
        ("| `None` | 4 | 1 | 1, 2, 3 | 0.511 0.511;", ("None", 4, 1)),
        ("| 10 | 2 | 1 | 1, 2, 3 | 0.506;", ("10", 2, 1)),
        ("| 100 | 4 | 3 | 1 | 0.543 |", ("100", 4, 3)),
        ("| 100 | 4 | 1 | 1 | 0.7115 |", ("100", 4, 1)),
    ],
)
def test_a_further_interval_that_fails_is_seen(row: str, cell: Cell) -> None:
    measured = section("convergence.md", "## Geo's interval")
    (line,) = (one for one in measured.splitlines() if one.startswith(row))
    planted = measured.replace(line, line.replace("| yes |", "| **no** |"))
    assert planted != measured
    assert misnamed(when_of_geo(), planted) == {cell}


def test_a_text_that_leaves_one_out_is_seen() -> None:
    measured = section("convergence.md", "## Geo's interval")
    words = when_of_geo()
    for one, other in (
        (", after three epochs 400 with four", ""),
        ("5 to 400 with four", "10 to 400 with four"),
        ("50 to 400 with two", "20 to 400 with two"),
    ):
        assert words.count(one) == 1
        assert len(misnamed(words.replace(one, other), measured)) == 1


def test_what_geo_sends_on_click_data_is_what_was_measured() -> None:
    words = when_of_geo()
    flights = intervals(section("convergence.md", "## Geo's interval"))["flights"]
    sent = {row.cell: row for row in flights}
    for trainers, name in ((2, "two"), (4, "four")):
        default, every = sent["None", trainers, 1], sent["100", trainers, 1]
        assert every.holds
        assert re.search(
            rf"{default.bytes_each} against {every.bytes_each}( bytes/sample)? "
            rf"with {name}",
            words,
        )
    assert "`push_every=100`" in words.split("On click data take")[1]


def test_an_interval_of_fluid_is_given_with_where_it_fails() -> None:
    """100 fails for word vectors: no line that gives it leaves that out."""
    text = (DOCS / "migrating_fluid.md").read_text(encoding="utf-8")
    items = [item for item in re.split(r"\n(?=- |\n)", text) if "push_every=" in item]
    given = [item for item in items if item.lstrip().startswith("- ")]
    assert len(given) >= 4
    for item in given:
        assert "convergence.md#geos-interval" in item, item
    after = text.split("strategy=cpudist.Geo(push_every=100)))\n```\n")[1]
    assert "convergence.md#geos-interval" in after.split("\n## ")[0]


def test_the_readme_names_the_strategies_without_snapshots() -> None:
    guaranteed = section("snapshot.md", "## What each strategy guarantees")
    (refused,) = re.findall(r"^\| (.*?) \| refused", guaranteed, re.MULTILINE)
    names = re.findall(r"`[^`]+`", refused)
    assert names
    readme = " ".join((DOCS.parent / "README.md").read_text("utf-8").split())
    said = re.search(r"from the newest snapshot; (.*?) ha(?:s|ve) none", readme)
    assert said is not None
    assert re.findall(r"`[^`]+`", said[1]) == names
    assert said[1] == " and ".join(names)
