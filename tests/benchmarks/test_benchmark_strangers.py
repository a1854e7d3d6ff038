# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``strangers``: a small run, its figures, and that its frames are frames."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

from torch_cpudist import _core

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from run import parse
from strangers import case, frames
from strangers.kinds import KINDS, NOBODY, STAY, HeldLinks, Visitors

KEY = b"a key for strangers to look for!"
ROUND = {
    "alone": 100.0,
    "beside": 97.0,
    "ratio": 0.97,
    "made": 9,
    "refused": 9,
    "counted": 9,
    "most_open": 0,
    "cpu_share": 0.01,
}


@pytest.fixture
def target():
    server = _core.Server(
        run_id=7, shard_id=0, server_count=1, trainer_count=2, secret=_core.Secret(KEY)
    )
    (address,) = server.listen_tcp(unix_socket=False)
    version = frames.spoken_version()
    yield frames.Target(address, 7, 0, 1, version), server
    server.stop()


@pytest.mark.processes
def test_a_small_run_has_figures(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(case, "LEAST_RATIO", 0.0)
    small = ["strangers", "--seconds", "1", "--launches", "1", "--sockets", "5"]
    args = parse([*small, "--folder", str(tmp_path), "--deadline-s", str(PATIENCE_S)])
    rows = list(case.run(args))
    assert not list(tmp_path.iterdir()), "nothing stays"
    assert [row["name"] for row in rows] == [f"sync: {kind}" for kind in KINDS]
    for row in rows:
        assert row["problems"] == []
        assert row["alone"] > 0
        assert (row["made"] > 0) == (not row["name"].endswith(NOBODY))


def test_who_has_the_key_is_let_in(target) -> None:
    """Else strangers would be refused for what they have not got wrong."""
    to, server = target
    nonce = frames.fresh_nonce()
    with to.connect() as link:
        link.settimeout(0.5)
        link.sendall(frames.challenge(to, nonce))
        answered, _ = frames.answer(link)
        link.sendall(frames.proof(to, KEY, nonce, answered))
        assert not frames.is_refused(link)
        assert server.stats()["unauthenticated"] == 0


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in (*STAY, NOBODY)]
)
def test_each_kind_is_refused_and_counted(kind, target, eventually) -> None:
    to, server = target

    def counted() -> float:
        stats = server.stats()
        return stats["unauthenticated"] + stats["turned_away"]

    who = Visitors([to], KEY, 5)
    for number in (1, 2, 3):
        KINDS[kind](who, to, HeldLinks())
        who.visits.made += 1
        assert who.visits.refused == number
    eventually(lambda: counted() >= 3, PATIENCE_S, "three that are counted")


def test_a_row_is_of_all_rounds_and_judged_by_the_median() -> None:
    slow = ROUND | {"beside": 80.0, "ratio": 0.8}
    row = case.figures("sync", "scanner", [ROUND, slow, ROUND], [])
    assert (row["ratio"], row["ratio_min"], row["made"]) == (0.97, 0.8, 27)
    assert row["verified"]
    row = case.figures("sync", "scanner", [slow, slow, ROUND], [])
    assert row["problems"] == ["a pace of 0.800, expected 0.95"]
    missed = ROUND | {"refused": 8}
    row = case.figures("sync", "replay", [missed], [])
    assert row["problems"] == ["of 9 strangers 8 were refused"]
    assert case.figures("sync", "idle", [missed], [])["verified"]
    empty = ROUND | {"made": 0, "refused": 0}
    assert case.figures("sync", "idle", [empty], [])["problems"] == ["no stranger came"]
    assert case.figures("sync", NOBODY, [empty], [])["verified"]


def test_sums_say_whether_each_gradient_was_applied_once() -> None:
    good = {"made": 10, "rows": 20.0 * case.IDS, "dense": 20.0}
    assert case.check_sums([good, good], "async") == []
    assert case.check_sums([good, good], "sync") == []
    problems = case.check_sums([good, good | {"dense": 19.0}], "sync")
    assert problems == ["trainer 1 finds 19 in dense, expected 20"]


def test_a_trainer_may_stop_some_steps_before_another() -> None:
    alone = {"rows": 40.0 * case.IDS, "dense": 40.0}
    found = [alone | {"made": 10}, alone | {"made": 20}]
    assert case.check_sums(found, "sync") == []
    problems = case.check_sums(found, "async")
    assert (
        problems[0]
        == f"trainer 0 finds {40 * case.IDS} in rows, expected {30 * case.IDS}"
    )
    assert len(problems) == 4
