# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The flights example when a server of a job of its own is killed, as in the demo."""

from __future__ import annotations

import importlib
import json
import signal
from dataclasses import replace
from pathlib import Path

import flights
import numpy as np
import printed
import pytest
from endings import lose
from flights_archive import make_archive
from flights_survival import Seen, lost_too_much, on_servers, read_seen, uncounted
from lazily import Lazily
from patience import PATIENCE_S
from ports import free_port
from programs import ROOT, Launcher

import torch_cpudist as cpudist

flights_report = Lazily("flights_report", importlib.import_module)  # matplotlib
SERVERS = ROOT / "tests" / "faults" / "return_servers.py"
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node=2"]
# Of which 24 of 28 days train, in steps of 16 flights: long after the kill.
FLIGHTS = 6_000


def archive(folder: Path) -> Path:
    """Flights of which one carrier is late, on days that train and that test."""
    rows = [
        {
            **{"day": 1 + i % 28, "carrier": "AA" if i % 3 else "UA"},
            **{"arr_delay": 60 if i % 3 else -5, "tailnum": f"N{i % 7}"},
        }
        for i in range(FLIGHTS)
    ]
    return make_archive(folder / "flights.tar.gz", rows)


def has_changes(snapshots: Path) -> bool:
    """Whether the newest snapshot has only what has changed."""
    found = sorted(snapshots.glob("*/manifest.json"))
    try:
        return bool(found) and "base" in json.loads(found[-1].read_text())
    except FileNotFoundError:  # it went meanwhile
        return False


def test_trainers_outlive_a_server_and_the_export_scores_as_the_cluster(
    launch_forks: Launcher, eventually, tmp_path: Path
) -> None:
    files = flights.load(archive(tmp_path))
    snapshots, results = tmp_path / "snapshots", tmp_path / "results.jsonl"
    where = {
        "CPUDIST_RENDEZVOUS": f"127.0.0.1:{free_port()}",
        "CPUDIST_SNAPSHOT_DIR": str(snapshots),
        "CPUDIST_STRATEGY": "async",
        "CPUDIST_THREADS": "1",
        "CPUDIST_REJOIN_S": str(int(PATIENCE_S)),
    }
    servers = launch_forks(
        [*TORCHRUN, "--max-restarts=1", str(SERVERS)],
        CPUDIST_ROLE="server",
        CPUDIST_TRAINERS="2",
        **where,
    )
    script = [str(ROOT / "examples/flights/flights.py"), "--strategy", "async"]
    script += ["--data", str(tmp_path / "flights.tar.gz"), "--batch-size", "16"]
    script += ["--remote", "--open", "--snapshots", str(snapshots), "--deltas"]
    script += ["--results", str(results), "--export", str(tmp_path / "out")]
    script += ["--scores", str(tmp_path / "scores.npy")]
    trainers = launch_forks([*TORCHRUN, *script], CPUDIST_ROLE="trainer", **where)

    def changes() -> bool:
        assert trainers.process.poll() is None, trainers.text()
        return has_changes(snapshots)

    eventually(changes, PATIENCE_S, "a snapshot of what has changed")
    lose(int((tmp_path / "server-1.pid").read_text()), signal.SIGKILL)
    assert trainers.wait(PATIENCE_S) == 0, trainers.text()
    assert servers.wait(PATIENCE_S) == 0, servers.text()

    seen = read_seen(results, 2)
    assert [one.trainer for one in seen] == [0, 1]
    assert uncounted(seen, on_servers(tmp_path / "out")) == []
    assert all(one.lost_updates > 0 and one.lost_samples > 0 for one in seen)
    assert flights_report.read_run(results).auc > 0.99
    model = flights.build(files.table_rows, remote=True, open_table=True)
    with cpudist.load_for_inference(model, tmp_path / "out"):
        test = flights.loaded(files.test, 64)
        scores, _ = flights.scored(model, test, remote=True)
    assert np.abs(scores - np.load(tmp_path / "scores.npy")).max() <= 1e-6
    assert np.ptp(scores) > 0.01


# -- the verdicts ------------------------------------------------------------------

GOOD = Seen(
    **{"trainer": 0, "pid": 7, "steps": 100, "all_steps": 100, "interval": 10},
    **{"samples": 1600, "count": 1, "lost_updates": 12, "lost_samples": 192},
    **{"snapshot": "snap-1", "base": "snap-0", "written": 4, "longest": 6},
)
KEPT = 2 * (100 - 12), 2 * (1600 - 192)


def pair(**changes: object) -> list[Seen]:
    return [GOOD, replace(GOOD, trainer=1, **changes)]


def test_what_is_promised_is_no_complaint() -> None:
    assert uncounted(pair(), KEPT) == []
    assert GOOD.most_lost == 10 + 6 + 1
    assert lost_too_much(pair(lost_updates=17)) == []
    # Written for longer than the interval: the next one is due at once.
    assert replace(GOOD, written=20, longest=20).most_lost == 41


@pytest.mark.parametrize(
    ("changes", "kept", "words"),
    [
        ({}, (177, KEPT[1]), "servers have 177 updates of 2816 samples"),
        ({}, (KEPT[0], 2815), "expected 176 of 2816"),
        ({"count": 0}, KEPT, "came back 0 times for trainer 1"),
        (
            {"snapshot": None},
            KEPT,
            "trainer 1 reports 12 lost updates, and no snapshot",
        ),
        ({"snapshot": "snap-2"}, KEPT, "from different snapshots"),
        ({"all_steps": 101}, KEPT, "trainer 1 made 100 of 101 steps"),
    ],
)
def test_what_does_not_add_up_is_named(
    changes: dict[str, object], kept: tuple[int, int], words: str
) -> None:
    assert words in "\n".join(uncounted(pair(**changes), kept))


def test_who_has_lost_too_much_is_named() -> None:
    (sentence,) = lost_too_much(pair(lost_updates=18))
    assert sentence.startswith("trainer 1 lost 18 updates, more than 17: ")


@pytest.mark.parametrize(("auc", "good"), [(0.72, True), (0.71, True), (0.68, False)])
def test_the_report_compares_with_the_undisturbed_run(
    auc: float, good: bool, tmp_path: Path, monkeypatch, capsys
) -> None:
    for name, found in (("disturbed", auc), ("undisturbed", 0.711)):
        totals = {
            **{"samples": 3200, "samples_per_s": 1.0, "bytes_per_sample": 1.0},
            **{"wait_s": 0.0, "busy_s": 1.0, "staleness": {"pushes": 0}},
            **{"strategy": "async", "remote": True, "trainers": 2, "servers": 2},
            **{"epoch_aucs": [found], "whole": True},
        }
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(totals) + "\n")
    for one in pair():
        path = tmp_path / f"disturbed.trainer-{one.trainer}.json"
        path.write_text(json.dumps(one.__dict__))
    version = {"round": "1", "steps": str(KEPT[0]), "samples": str(KEPT[1])}
    (tmp_path / "manifest.json").write_text(json.dumps({"version": version}))
    words = [
        "flights_report.py",
        *(str(tmp_path / f"{n}.jsonl") for n in ("disturbed", "undisturbed")),
    ]
    words += ["--picture", str(tmp_path / "p.png"), "--survived", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    assert flights_report.main() == (0 if good else 1)
    said = capsys.readouterr()
    assert "200 updates made - 24 lost = 176, the servers have 176" in said.out
    assert ("below that of the undisturbed run" in said.err) != good
    printed.check("flights-survive", said.out)
