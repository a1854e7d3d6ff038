# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The flights example with its tables on the servers only."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import flights
import flights_report
import printed
import pytest
import torch
from flights_archive import make_archive
from patience import PATIENCE_S
from programs import ROOT, Launcher

LAUNCHER = ["torchrun", "--standalone", "--nproc-per-node=3"]
DAYS = 300


def archive(folder: Path) -> Path:
    """Flights of which one carrier is late, on days that train and that test."""
    rows = [
        {
            **{"day": 1 + i % 28, "carrier": "AA" if i % 3 else "UA"},
            **{"arr_delay": 60 if i % 3 else -5, "tailnum": f"N{i % 7}"},
        }
        for i in range(DAYS)
    ]
    return make_archive(folder / "flights.tar.gz", rows)


def test_rows_are_on_the_server_and_not_on_trainers(
    launch_forks: Launcher, tmp_path: Path
) -> None:
    script = [str(ROOT / "examples/flights/flights.py")]
    script += ["--data", str(archive(tmp_path))]
    options = ["--remote", "--batch-size", "16", "--epochs", "2"]
    results = tmp_path / "two.jsonl"
    program = launch_forks(
        [*LAUNCHER, *script, *options, "--results", str(results)],
        CPUDIST_SERVERS=1,
        CPUDIST_THREADS=1,
    )
    assert program.wait(PATIENCE_S) == 0, program.text()
    trainers = re.findall(
        r"trainer (\d): ([\d,]+) MB of memory, with none of the 2,000,000,000 rows",
        program.text(),
        re.MULTILINE,
    )
    assert sorted(rank for rank, _ in trainers) == ["0", "1"]
    # Static tables of so many rows take 84 GB.
    assert all(int(memory.replace(",", "")) < 2_000 for _, memory in trainers)
    (rows,) = re.findall(
        r"server 0: .* (\d+) rows that have had a gradient",
        program.text(),
        re.MULTILINE,
    )
    # In any order, and perhaps behind the progress bar, which is trainer 0's.
    lines = re.findall(r"(?:trainer|server) \d: [^\r\n]*", program.text())
    lines.sort(reverse=True)
    printed.check("flights-remote", "\n".join(lines))
    data = json.loads((tmp_path / "flights-2.json").read_text())
    # Both tables; the rows of values that no flight to train has begin, and stay.
    assert data["table_rows"] < int(rows) < 2 * data["table_rows"]
    run = flights_report.read_run(results)
    assert run.remote
    assert run.name == "sync, 2 trainers on 1 server(s), remote tables"
    assert run.auc > 0.99


def test_no_two_ids_have_the_same_row() -> None:
    ids = torch.arange(100_000)
    rows = flights.rows_of(ids, remote=True)
    assert rows.unique().numel() == len(ids)
    assert 0 <= int(rows.min()) <= int(rows.max()) < flights.HASHED_ROWS
    assert torch.equal(flights.rows_of(ids, remote=False), ids)


@pytest.mark.parametrize("name", ["allreduce", "reduce"])
def test_strategies_with_tables_on_trainers_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["flights.py", "--data", "none", "--remote", "--strategy", name]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        flights.parse_arguments()
    assert ended.value.code == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert "--remote trains with sync, half_async, async, geo, hybrid" in sentence
    assert name in sentence


def run_of(remote: bool, auc: float, whole: bool) -> flights_report.Run:
    totals = {"strategy": "sync", "remote": remote, "whole": whole}
    layout = {"trainers": 1, "servers": 1, "epoch_aucs": [auc]}
    return flights_report.Run([], totals | layout)


def test_rows_that_begin_otherwise_are_compared_once_they_have_learned() -> None:
    single = run_of(False, 0.72, whole=False)
    assert flights_report.problems(run_of(False, 0.71, whole=False), single)
    assert not flights_report.problems(run_of(True, 0.71, whole=False), single)
    assert flights_report.problems(run_of(True, 0.71, whole=True), single)
    assert run_of(True, 0.7, whole=True).name != single.name == "one process"
