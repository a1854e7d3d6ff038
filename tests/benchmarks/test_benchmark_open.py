# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``open``: what it starts, and what it makes of figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from admission import open as case
from cases.cnn import LaunchFailedError
from run import parse

MB = {"every": 1000.0, "count:2": 300.0, "count:3": 150.0, "lru:5": 10.0}
AUC = {"every": 0.75, "count:2": 0.7508, "count:3": 0.7492, "lru:5": 0.7}


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """Command lines that were launched; the figures are those above."""
    told = []

    def launch(layout, args, words_of):
        words = words_of(layout, args, tmp_path / "results.json")
        told.append((layout, args, words))
        name = "every"
        for option, kind in (("--count-filter", "count"), ("--max-rows", "lru")):
            if option in words:
                name = f"{kind}:{words[words.index(option) + 1]}"
        seed = int(words[words.index("--seed") + 1])
        table = {"rows": 10, "bytes": 1e6 * MB[name], "filtered": 3, "evicted": 0}
        return {
            "tables": {"table.weight": table},
            "auc": AUC[name] + (seed - 1.5) * 1e-5,
            "ceiling": 0.8,
            "samples_per_s": 1.0,
        }

    monkeypatch.setattr(case, "launch", launch)
    monkeypatch.setattr(case.Data, "make", lambda self: None)
    return told


def options(*words):
    return parse(["open", *words])


def after(words, option):
    return words[words.index(option) + 1]


def test_rows_of_a_round_train_on_the_same_from_the_same(launches):
    names = "every,count:2,count:3,lru:5"
    rows = case.run(options("--launches", "2", "--rows", names, "--servers", "1"))
    assert [row["name"] for row in rows] == names.split(",")
    assert [row["launches"] for row in rows] == [2] * 4
    seeds = [after(words, "--seed") for *_, words in launches]
    assert seeds == ["1"] * 4 + ["2"] * 4
    for layout, args, words in launches:
        assert "--open" in words
        assert "--nproc-per-node=3" in words
        assert layout.variables["CPUDIST_SERVERS"] == "1"
        assert after(words, "--keys") == "200000000"
        assert after(words, "--epochs") == "1"
        assert args.deadline_s * args.epochs > int(after(words, "--rows")) / 2000
    saved = {row["name"]: row["saved"] for row in rows}
    assert saved == pytest.approx({n: 1 - mb / 1000 for n, mb in MB.items()})
    gaps = {row["name"]: row["gap"] for row in rows}
    assert gaps == pytest.approx({n: auc - 0.75 for n, auc in AUC.items()})
    verified = {row["name"]: row.get("verified") for row in rows}
    # Keys that are let go cost what they cost: only admission has an aim.
    expected = {"every": None, "count:2": True, "count:3": True, "lru:5": None}
    assert verified == expected


@pytest.mark.parametrize(
    ("mb", "auc", "said"),
    [(201.0, 0.75, "saves 79.9% of the memory"), (150.0, 0.7489, "AUC 0.7489")],
)
def test_an_aim_that_is_missed_is_said(launches, monkeypatch, mb, auc, said):
    monkeypatch.setitem(MB, "count:3", mb)
    monkeypatch.setitem(AUC, "count:3", auc)
    _, _, row = case.run(options("--launches", "2"))
    assert row["verified"] is False
    (problem,) = row["problems"]
    assert said in problem
    rows = case.run(options("--launches", "2", "--no-verify"))
    assert "verified" not in rows[-1]


def test_memory_has_an_aim_on_the_data_that_is_the_default_only(launches, monkeypatch):
    monkeypatch.setitem(MB, "count:3", 900.0)
    rows = case.run(options("--launches", "1", "--table-rows", "1000"))
    assert rows[-1]["verified"]
    assert after(launches[-1][-1], "--keys") == "1000"


def test_a_row_that_fails_is_not_tried_again(launches, monkeypatch):
    works, tried = case.launch, []

    def launch(layout, args, words_of):
        words = words_of(layout, args, Path("results.json"))
        if after(words, "--rows") and "--count-filter" in words:
            tried.append(words)
            raise LaunchFailedError("ended with 1")
        return works(layout, args, words_of)

    monkeypatch.setattr(case, "launch", launch)
    every, failed = case.run(options("--launches", "2", "--rows", "every,count:3"))
    assert every["launches"] == 2
    assert failed["failed"]
    assert "ended with 1" in failed["missing"]
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rows count:0", "--rows: expected every, count:2, count:3"),
        ("--rows best", "found 'best'"),
        ("--strategies sync,async", "expected one"),
        ("--dim 8", "--dim would change nothing"),
    ],
)
def test_what_it_cannot_run_is_refused(words, said):
    with pytest.raises(ValueError, match=said):
        case.run(options(*words.split()))
