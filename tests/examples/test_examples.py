# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The examples: quickstart learns, AUC is AUC, and the report judges two runs."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import flights
import numpy as np
import printed
import pytest
from lazily import Lazily
from patience import PATIENCE_S
from programs import Launcher

from torch_cpudist import strategies

flights_report = Lazily("flights_report", importlib.import_module)  # matplotlib

ROOT = Path(__file__).resolve().parents[2]
IN_TURN = ROOT / "tests" / "support" / "examples_in_turn.py"
QUICKSTART = ROOT / "examples" / "quickstart" / "quickstart.py"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [(1, ["sync"]), (2, ["async", "reduce", "hybrid"])],
    ids=["alone", "torchrun"],
)
def test_quickstart_learns(
    ranks: int, strategies: list[str], launch: Launcher, launch_forks: Launcher
) -> None:
    script = f"'{IN_TURN}' '{QUICKSTART}' {' '.join(strategies)}"
    if ranks == 1:
        program = launch(f"python {script}", CPUDIST_THREADS=1)
    else:
        options = f"--standalone --nproc-per-node={ranks}"
        program = launch_forks(f"torchrun {options} {script}", CPUDIST_THREADS=1)
    assert program.wait(PATIENCE_S) == 0, program.text()
    losses = re.findall(r"trainer (\d): log loss (\d\.\d+)", program.text())
    numbers = [str(rank) for rank in range(ranks)]
    assert sorted(rank for rank, _ in losses) == sorted(numbers * len(strategies))
    assert all(float(loss) < 0.6 for _, loss in losses)
    # Beside warnings of torch.
    said = re.findall(r"^trainer \d: .*$", program.text(), re.MULTILINE)
    printed.check("quickstart", "\n".join(said))


def test_quickstart_fits_on_a_screen() -> None:
    text = QUICKSTART.read_text()
    assert text.count("\n") <= 60


@pytest.mark.parametrize("levels", [3, 1000])
def test_auc_is_the_share_of_pairs_in_order(levels: int) -> None:
    generator = np.random.default_rng(levels)
    scores = generator.integers(0, levels, 200).astype(np.float32)
    labels = (generator.random(200) < 0.3).astype(np.float32)
    late, early = scores[labels > 0.5], scores[labels < 0.5]
    pairs = np.subtract.outer(late, early)
    expected = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert flights.auc(scores, labels) == pytest.approx(expected, abs=1e-12)


def test_flights_refuses_an_unknown_strategy_before_reading_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["flights.py", "--data", "none", "--strategy", "no"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        flights.main()
    assert ended.value.code == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert "argument --strategy: invalid choice: 'no'" in sentence
    # LocalSGD alone trains no tables.
    names = set(strategies.names()) - {"local_sgd"}
    assert all(name in sentence for name in names)
    assert "local_sgd" not in sentence


def make_run(
    path: Path,
    trainers: int,
    auc: float,
    whole: bool = True,
    strategy: str = "sync",
    pushes: int = 0,
) -> Path:
    totals = {
        **{"strategy": strategy, "whole": whole},
        "staleness": {"pushes": pushes, "steps_mean": 1.256, "steps_max": 9},
        **{"trainers": trainers, "servers": trainers, "samples": 10, "busy_s": 2.0},
        **{"samples_per_s": 1000.0 * trainers, "bytes_per_sample": 9.0, "wait_s": 0.5},
        "epoch_aucs": [auc],
    }
    point = {"samples": 10, "loss": 0.5, "auc": auc}
    path.write_text(f"{json.dumps(point)}\n{json.dumps(totals)}\n")
    return path


@pytest.mark.parametrize(
    ("strategy", "auc", "whole", "words"),
    [
        ("sync", 0.7135, True, ""),
        ("sync", 0.7040, True, "is 0.7040, below 0.705"),
        ("sync", 0.7040, False, ""),
        ("sync", 0.7161, True, "differs from one process by 0.0031 > 0.003"),
        ("async", 0.7073, True, ""),
        ("async", 0.7201, True, "differs from one process by 0.0071 > 0.007"),
    ],
)
def test_report_judges(
    strategy: str,
    auc: float,
    whole: bool,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    single_auc = 0.7130 if auc > 0.705 else auc
    distributed = make_run(tmp_path / "two.jsonl", 2, auc, whole, strategy)
    single = make_run(tmp_path / "one.jsonl", 1, single_auc, whole)
    picture = tmp_path / "flights.png"
    arguments = [str(distributed), str(single), "--picture", str(picture)]
    monkeypatch.setattr(sys, "argv", ["flights_report.py", *arguments])
    assert flights_report.main() == (1 if words else 0)
    screen = capsys.readouterr()
    assert words in screen.err
    assert bool(words) == bool(screen.err)
    line = f"{strategy}, 2 trainers on 2 server(s): AUC {auc:.4f}, 2,000 samples/s"
    assert line in screen.out
    assert "staleness" not in screen.out
    assert "samples/s x 2.00" in screen.out
    if strategy == "sync":
        printed.check("flights", screen.out)
        printed.check("demo", screen.out.splitlines()[-1])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_report_tells_how_late_gradients_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.jsonl"
    distributed = make_run(path, 2, 0.7135, strategy="async", pushes=1253)
    single = make_run(tmp_path / "one.jsonl", 1, 0.713)
    arguments = [str(distributed), str(single), "--picture", str(tmp_path / "a.png")]
    monkeypatch.setattr(sys, "argv", ["flights_report.py", *arguments])
    assert flights_report.main() == 0
    *_, staleness, comparison = capsys.readouterr().out.splitlines()
    assert staleness == (
        "staleness of trainer 0's 1,253 gradients: 1.26 steps on average, 9 at most"
    )
    assert comparison.startswith("async, 2 trainers on 2 server(s): AUC 0.7135, ")
    assert "| one process: AUC 0.7130" in comparison


@pytest.mark.parametrize(
    ("started", "line"),
    [
        ({"name": "snap-7", "step": 1207}, "snapshot snap-7 at step 1,207"),
        ({"name": None, "step": 0}, "snapshot None at step 0"),
        ({"name": "snap-7", "step": 0}, "snapshot snap-7 at step 0"),
        (None, "snapshot None at step 0"),
    ],
)
def test_report_tells_a_resumed_run_from_one_that_began_anew(
    started: dict[str, Any] | None,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    distributed = make_run(tmp_path / "two.jsonl", 2, 0.7135)
    single = make_run(tmp_path / "one.jsonl", 1, 0.713)
    point, totals = distributed.read_text().splitlines()
    if started is not None:
        totals = json.dumps(json.loads(totals) | {"started": started})
    distributed.write_text(f"{point}\n{totals}\n")
    arguments = [str(distributed), str(single), "--picture", str(tmp_path / "a.png")]
    monkeypatch.setattr(sys, "argv", ["flights_report.py", *arguments])
    assert flights_report.main() == 0  # without --killed nobody asks
    assert "went on from" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--killed"])
    good = started is not None and started["step"] > 0
    assert flights_report.main() == (0 if good else 1)
    screen = capsys.readouterr()
    assert f"went on from {line}\n" in screen.out
    assert ("the run began anew" in screen.err) is not good


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_only_sync_is_compared_after_a_quick_try(
    strategy: str, whole: bool, tmp_path: Path
) -> None:
    distributed = make_run(tmp_path / "two.jsonl", 2, 0.72, whole, strategy)
    single = make_run(tmp_path / "one.jsonl", 1, 0.71, whole)
    runs = flights_report.read_run(distributed), flights_report.read_run(single)
    found = flights_report.problems(*runs)
    assert bool(found) == (whole or strategy == "sync")


def test_report_refuses_a_run_that_did_not_finish(tmp_path: Path) -> None:
    results = tmp_path / "cut.jsonl"
    results.write_text('{"samples": 1, "loss": 0.5, "auc": 0.7}\n')
    with pytest.raises(SystemExit, match="did not finish"):
        flights_report.read_run(results)
