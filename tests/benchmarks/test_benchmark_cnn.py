# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``cnn`` of the benchmark: its rows, what they say, and the picture."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from patience import PATIENCE_S

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# The benchmark is run as a script: its modules are found beside run.py.
sys.path.insert(0, str(BENCHMARKS))

import plot_cnn  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
from cases import cnn  # noqa: E402


def options(*arguments: str):
    return run.parse(["cnn", *arguments])


def measured(*accuracies: float, seconds: float = 10.0) -> cnn.Launch:
    epochs = [
        {"seconds": seconds + i, "cpu_s": 4.0, "accuracy": accuracy}
        for i, accuracy in enumerate(accuracies)
    ]
    return {"trainers": 2, "epochs": epochs}


def test_all_rows_are_run_unless_some_are_named() -> None:
    assert tuple(cnn.select(options())) == cnn.ROWS
    chosen = cnn.select(options("--rows", "torch16,local_sgd-shm", "--trainers", "4"))
    assert chosen["torch16"].threads == 16
    assert chosen["torch16"].script == cnn.TORCH
    ours = chosen["local_sgd-shm"]
    assert (ours.script, ours.trainers, ours.torchrun) == (cnn.OURS, 4, True)
    assert ours.variables == {
        **{"CPUDIST_STRATEGY": "local_sgd", "CPUDIST_BACKEND": "shm"},
    }
    assert all(layout.script.is_file() for layout in chosen.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "torch0"], "found 'torch0'"),
        (["--rows", "allreduce-tcp"], "found 'allreduce-tcp'"),
        (["--rows", "-gloo"], "found '-gloo'"),
        (["--trainers", "3"], "multiple of --trainers 3, found 512"),
        (["--reference", "nonesuch"], "--reference: expected one of torch1, "),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], words: str) -> None:
    first, *rest = arguments
    with pytest.raises(ValueError, match=words):
        cnn.select(options("=".join([first, *rest])))


def test_every_row_makes_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPUDIST_BACKEND", "mpi")
    monkeypatch.setenv("CPUDIST_LOG", "debug")
    monkeypatch.setenv("WORLD_SIZE", "7")
    args = options("--data", "some", "--batch", "64", "--epochs", "2", "--bf16")
    for name, layout in cnn.select(args).items():
        words = cnn.command(layout, args, tmp_path / "r.json")
        told = words[words.index(str(layout.script)) + 1 :]
        data = str(Path("some").resolve())
        assert told == [
            *("--epochs", "2", "--batch-size", "64"),
            *("--results", str(tmp_path / "r.json"), "--data", data, "--bf16"),
        ]
        assert ("--nproc-per-node=2" in words) == layout.torchrun
        found = cnn.environment(layout)
        threads = "2" if name == "torch2" else "1"
        assert found["OMP_NUM_THREADS"] == found["CPUDIST_THREADS"] == threads
        assert found.get("CPU_NUM") == ("2" if name == "replicas" else None)
        assert not {"WORLD_SIZE", "CPUDIST_LOG"} & found.keys()
        backend = name.partition("allreduce-")[2] or None
        assert found.get("CPUDIST_BACKEND") == backend
        assert found["PYTHONPATH"].split(os.pathsep)[0] == str(cnn.ROOT)


def test_a_row_has_medians_over_epochs_and_the_last_accuracy() -> None:
    args = options("--epochs", "2")
    layout = cnn.layout_of("ddp", 2)
    launches = [measured(0.5, 0.8), measured(0.6, 0.9, seconds=20.0)]
    row = cnn.make_row("ddp", layout, args, [*launches, measured(0.7, 0.85)])
    assert (row["epoch_s_min"], row["epoch_s"], row["epoch_s_max"]) == (10, 11, 21)
    assert row["cpu_s"] == 8.0
    assert (row["accuracy_min"], row["accuracy"], row["accuracy_max"]) == (
        *(0.8, 0.85, 0.9),
    )
    assert row["accuracy_by_epoch"] == [0.6, 0.85]


def make_rows(*accuracies: float) -> list[report.Row]:
    args = options("--epochs", "1")
    rows = [
        cnn.make_row(
            name, cnn.layout_of(name, 2), args, [measured(accuracy, seconds=s)]
        )
        for name, accuracy, s in zip(cnn.ROWS, accuracies, (20.0, 10.0), strict=False)
    ]
    rows.append({"case": "cnn", "name": "allreduce-ccl", report.MISSING: "no oneCCL"})
    return rows


def test_speedup_counts_at_equal_accuracy_only() -> None:
    rows = make_rows(0.9, 0.895)
    cnn.compare(rows, "torch1", True)
    assert [row["speedup"] for row in rows[:2]] == [1.0, 2.0]
    assert all(row["verified"] for row in rows[:2])
    rows = make_rows(0.9, 0.88)
    cnn.compare(rows, "torch1", True)
    assert rows[0]["verified"]
    assert "0.8800, torch1 has 0.9000" in rows[1]["problems"][0]
    rows = make_rows(0.9, 0.88)
    cnn.compare(rows, "allreduce-ccl", True)
    assert rows[0]["speedup"] is None


def test_a_missing_backend_is_said_and_anything_else_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {
        "allreduce-ccl": "x\ncpudist.errors.BackendUnavailableError: no oneCCL\nmore",
        "replicas": "words\nValueError: two\n\ntorch/distributed/elastic/x.py\nlast",
    }

    def launch(layout: cnn.Layout, *_: object) -> cnn.Launch:
        for name, text in said.items():
            if cnn.layout_of(name, 2) == layout:
                raise cnn.failure_of(1, 60.0, text)
        return measured(0.9)

    monkeypatch.setattr(cnn, "launch", launch)
    args = options("--rows", "torch1,allreduce-ccl,replicas", "--epochs", "1")
    first, missing, failed = cnn.run(args)
    assert first["launches"] == args.launches
    assert (missing[report.MISSING], missing["failed"]) == ("no oneCCL", False)
    assert failed[report.MISSING] == "failed: ended with 1: ValueError: two"
    assert failed["failed"]
    shown = capsys.readouterr().err
    assert shown.count("round 1/5") == 3
    assert shown.count("round 2/5") == 1
    assert "not done after 60 s" in str(cnn.failure_of(None, 60.0, ""))
    assert "SIGKILL" in str(cnn.failure_of(-9, 60.0, ""))


def test_a_launch_is_ended_at_its_deadline_and_read_when_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = (
        "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"epochs\": []}')"
    )
    code = {"slow": "import time; time.sleep(60)", "quick": done, "nothing": "1"}
    args = options("--epochs", "1")
    args.deadline_s = 0.5
    layout = cnn.layout_of("torch1", 2)

    def run_as(name: str) -> cnn.Launch:
        monkeypatch.setattr(
            cnn,
            "command",
            lambda _l, _a, to: [sys.executable, "-c", code[name], str(to)],
        )
        return cnn.launch(layout, args)

    with pytest.raises(cnn.LaunchFailedError, match=r"not done after 0\.5 s"):
        run_as("slow")
    args.deadline_s = PATIENCE_S
    assert run_as("quick") == {"epochs": []}
    with pytest.raises(cnn.LaunchFailedError, match="ended with 0"):
        run_as("nothing")


def test_the_picture_and_the_table_show_all_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(0.9, 0.895)
    cnn.compare(rows, "torch1", True)
    path, picture = tmp_path / "rows.jsonl", tmp_path / "images" / "cnn.png"
    path.write_text("".join(report.json_line(row) + "\n" for row in rows))
    assert plot_cnn.main([str(path), str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "|---" * 6 + "|"
    assert (
        lines[3] == "| torch2 | 1 x 1 x 2 | 10.0 (10.0 to 10.0) | 2.00 | 4.0 | 0.8950 |"
    )
    assert lines[-1] == "Not run: allreduce-ccl: no oneCCL"
    ran, _ = plot_cnn.read_rows(path)
    axis = Figure().add_subplot()
    plot_cnn.draw_accuracy([{**one, "accuracy_by_epoch": [0.9]} for one in ran], axis)
    (dots,) = axis.lines  # a curve of one point each would be nothing
    assert list(dots.get_xdata()) == [0.9] * len(ran)
    assert list(dots.get_ydata()) == [one["name"] for one in ran]
    path.write_text(json.dumps({"case": "ctr"}) + "\n")
    with pytest.raises(SystemExit, match="expected rows of"):
        plot_cnn.main([str(path), str(picture)])
