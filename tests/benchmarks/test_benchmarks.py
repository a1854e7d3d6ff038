# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark's own parts: planted data, figures, tables, launching and ending."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from patience import PATIENCE_S

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# The benchmark is run as a script: its modules are found beside run.py.
sys.path.insert(0, str(BENCHMARKS))

import ctr_data  # noqa: E402
import launch  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
from cases import ctr, threads  # noqa: E402
from job import DeadlineError, Gate, Job  # noqa: E402
from peers import PEERS, PeerSpec, row_name  # noqa: E402

SMALL = ctr_data.CtrSpec(
    slots=4, rows=1003, dense=3, train_samples=20_000, test_samples=5_000
)


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ctr_data.prepare(SMALL, tmp_path_factory.mktemp("cache"))


def make_job(run_dir: Path, data: Path, **changes: object) -> Job:
    job = Job(
        name="row",
        module="torch_single",
        strategy="",
        run_dir=str(run_dir),
        data_dir=str(data),
        trainers=1,
        servers=0,
        threads=1,
        batch=64,
        dim=4,
        lr=0.05,
        seconds=1.0,
        steps=40,
        warmup_steps=2,
        bf16=False,
        deadline_s=PATIENCE_S,
    )
    return replace(job, **changes)  # type: ignore[arg-type]


# -- data ---------------------------------------------------------------------


def test_ids_of_a_slot_follow_zipf_and_stay_in_their_range(small_data: Path) -> None:
    ids = ctr_data.load(small_data, "train").ids
    begins = [*ctr_data.slot_offsets(SMALL), SMALL.rows]
    for slot, size in enumerate(ctr_data.slot_sizes(SMALL)):
        assert size == begins[slot + 1] - begins[slot]
        local = ids[:, slot] - begins[slot]
        assert local.min() >= 0
        assert local.max() < size
        counts = np.sort(np.bincount(local, minlength=size))[::-1][:20]
        weights = np.arange(1, size + 1, dtype=float) ** -SMALL.exponent
        expected = len(local) * (weights / weights.sum())[:20]
        assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))


def test_frequent_ids_are_not_neighbours(small_data: Path) -> None:
    ids = ctr_data.load(small_data, "train").ids[:, 0]
    top = np.argsort(np.bincount(ids))[::-1][:8]
    assert np.abs(np.diff(np.sort(top))).max() > 8


def test_same_seed_same_bytes_other_seed_other_bytes(
    small_data: Path, tmp_path: Path
) -> None:
    again = ctr_data.prepare(SMALL, tmp_path)
    other = ctr_data.prepare(replace(SMALL, seed=21), tmp_path)
    assert again.name == small_data.name != other.name
    for name in ("train_ids.npy", "test_dense.npy", "test_labels.npy"):
        assert (again / name).read_bytes() == (small_data / name).read_bytes()
        assert (other / name).read_bytes() != (small_data / name).read_bytes()
    assert not list(tmp_path.glob("*partial*"))


def test_prepared_data_is_not_generated_twice(small_data: Path) -> None:
    written = (small_data / "train_ids.npy").stat().st_mtime_ns
    assert ctr_data.prepare(SMALL, small_data.parent) == small_data
    assert (small_data / "train_ids.npy").stat().st_mtime_ns == written


def test_labels_are_planted_and_balanced_as_asked(small_data: Path) -> None:
    facts = json.loads((small_data / "facts.json").read_text())
    labels = ctr_data.load(small_data, "train").labels
    assert 0.8 < facts["test_planted_auc"] < 0.95
    assert abs(facts["train_planted_auc"] - facts["test_planted_auc"]) < 0.02
    assert abs(float(labels.mean()) - SMALL.positive_share) < 0.02


def test_parts_of_trainers_are_disjoint_and_complete(small_data: Path) -> None:
    samples = ctr_data.load(small_data, "train")
    parts = [samples.part(rank, 3) for rank in range(3)]
    assert np.array_equal(np.concatenate([p.ids for p in parts]), samples.ids)
    assert max(len(p.labels) for p in parts) - min(len(p.labels) for p in parts) <= 1


def test_auc_equals_the_share_of_ordered_pairs() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(60) < 0.4).astype(np.float32)
    scores = rng.integers(0, 8, 60).astype(np.float32)
    pairs = scores[labels > 0][:, None] - scores[labels == 0][None, :]
    expected = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert ctr_data.auc(labels, scores) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match="only one kind"):
        ctr_data.auc(np.ones(3, np.float32), scores[:3])


# -- figures ------------------------------------------------------------------


def trainer(rank: int, **changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "rank": rank,
        "samples": 1000,
        "steps": 10,
        "seconds": 2.0,
        "cpu_s": 0.5,
        "bytes": 3000.0,
        "wait_s": math.nan,
        "rss_mb": 100.0,
        "quality": 0.7,
        "loss_first": 0.7,
        "loss_last": 0.5,
        "phases_s": {"forward": 1.0, "step": 0.5},
    }
    return {**base, **changes}


def test_figures_are_summed_over_processes() -> None:
    figures = report.launch_figures([trainer(0), trainer(1, seconds=4.0, quality=0.8)])
    assert figures == pytest.approx(
        {
            "samples_per_s": 500.0,
            "cpu_us_per_sample": 500.0,
            "bytes_per_sample": 3.0,
            "rss_mb": 200.0,
            "quality": 0.75,
        }
    )


def test_phases_are_means_per_step_and_say_waiting_when_known() -> None:
    assert report.phases_ms([trainer(0)]) == pytest.approx({"forward": 100, "step": 50})
    known = report.phases_ms([trainer(0, wait_s=0.1), trainer(1, wait_s=0.3)])
    assert known["waiting"] == pytest.approx(20.0)


def test_ratios_are_of_medians_to_the_named_row() -> None:
    def row(name: str, speeds: list[float]) -> report.Row:
        launches = [dict.fromkeys(report.SPREAD, speed) for speed in speeds]
        return {"name": name, **report.spread(launches)}

    rows = [row("a", [1.0, 9.0, 2.0]), row("b", [4.0, 5.0, 3.0])]
    rows.append({"name": "c", report.MISSING: "not here"})
    report.add_ratios(rows, "b")
    assert (rows[0]["samples_per_s_min"], rows[0]["samples_per_s_max"]) == (1.0, 9.0)
    assert rows[0]["ratio_samples_per_s"] == pytest.approx(0.5)
    assert rows[1]["ratio_samples_per_s"] == 1.0
    assert "ratio_samples_per_s" not in rows[2]
    report.add_ratios(rows, "c")
    assert rows[0]["ratio_samples_per_s"] is None


def test_a_result_that_did_not_learn_is_not_verified() -> None:
    assert report.check([trainer(0)], 0.6) == []
    problems = report.check([trainer(0, quality=0.5, loss_last=0.9)], 0.6)
    assert len(problems) == 2
    assert report.check([trainer(0, quality=math.nan, loss_last=math.nan)], 0.6)


def test_table_aligns_and_names_what_did_not_run() -> None:
    rows = [
        {"name": "long-name", "samples_per_s": 12345.6, "verified": True},
        {"name": "b", "samples_per_s": math.nan, "verified": False},
        {"name": "c", report.MISSING: "import torchrec: ..."},
    ]
    columns = {"name": "name", "samples_per_s": "samples/s", "verified": "verified"}
    lines = report.format_table(rows, columns).splitlines()
    assert lines[0] == "name       samples/s  verified"
    assert lines[2] == "long-name     12,346       yes"
    assert lines[3] == "b                  -        NO"
    assert lines[4] == "not run: c: import torchrec: ..."


def test_json_is_strict_and_one_line() -> None:
    line = report.json_line({"a": math.nan, "b": {"c": [1.5, math.inf]}})
    assert "\n" not in line
    assert json.loads(line) == {"a": None, "b": {"c": [1.5, None]}}


# -- selection and launching --------------------------------------------------


def test_rows_are_selected_by_name_and_unknown_ones_refused() -> None:
    chosen = run.parse(["ctr", "--strategies", "sync,geo", "--peers", "torch1,world1"])
    assert list(ctr.select(chosen)) == [
        "cpudist-sync",
        "cpudist-geo",
        "torch1",
        "cpudist-world1",
    ]
    with pytest.raises(ValueError, match="found 'nonesuch'"):
        ctr.select(run.parse(["ctr", "--peers", "nonesuch"]))


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_has_its_module(name: str) -> None:
    assert (BENCHMARKS / "peers" / f"{PEERS[name].module}.py").is_file()


def test_a_peer_that_cannot_be_imported_says_why_and_how_to_have_it() -> None:
    spec = PeerSpec("m", "", "plain", requires=("nonesuch_pkg",), install="pip x")
    reason = launch.missing_reason(spec)
    assert reason is not None
    assert "No module named 'nonesuch_pkg'; to have it: pip x" in reason
    assert launch.missing_reason(replace(spec, requires=("json",))) is None


@pytest.mark.processes
def test_two_trainers_learn_and_report(small_data: Path, tmp_path: Path) -> None:
    spec = PeerSpec("torch_single", "", "plain")
    job = make_job(tmp_path, small_data, trainers=2, steps=60)
    reports = launch.launch(spec, job)
    assert [r["rank"] for r in reports] == [0, 1]
    assert all(r["steps"] == 60 for r in reports)
    assert all(0 < r["cpu_s"] < 10 * r["seconds"] for r in reports)
    assert all(r["bytes"] == 0 for r in reports)
    assert report.check(reports, least_quality=0.51) == []


@pytest.mark.processes
def test_replicas_of_one_process_have_a_batch_each(
    small_data: Path, tmp_path: Path
) -> None:
    arguments = ["ctr", "--batch", "64", "--steps", "3", "--warmup-steps", "1"]
    args = run.parse([*arguments, "--peers", "replicas-sync"])
    spec = PEERS["replicas-sync"]
    job = ctr.make_job("replicas", spec, args, str(tmp_path), small_data)
    (one,) = launch.launch(spec, job)
    assert (one["steps"], one["samples"]) == (3, 3 * 2 * 64)
    assert one["loss_last"] > 0
    assert list(one["phases_s"]) == ["data", "all phases"]
    assert [row_name(name) for name in ("replicas", "ddp")] == [
        "cpudist-replicas",
        "ddp",
    ]


def test_layouts_of_threads_are_of_the_machine() -> None:
    assert threads.layouts(2) == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)]
    assert threads.layouts(1) == [(1, 1), (1, 2), (1, 4)]


@pytest.mark.processes
def test_a_failed_launch_shows_the_trainers_own_words(tmp_path: Path) -> None:
    job = make_job(tmp_path, tmp_path, module="nonesuch_peer")
    with pytest.raises(launch.LaunchError, match=r"peers\.nonesuch_peer"):
        launch.launch(PeerSpec("nonesuch_peer", "", "plain"), job)


def test_a_trainer_that_never_comes_to_the_gate_is_named(tmp_path: Path) -> None:
    job = make_job(tmp_path, tmp_path, trainers=2, deadline_s=0.05)
    Gate.create(job)
    with pytest.raises(DeadlineError, match=r"never came: \[1\]"):
        Gate(job, 0).meet()


def test_all_trainers_see_the_last_step_that_one_names(tmp_path: Path) -> None:
    job = make_job(tmp_path, tmp_path, trainers=2, steps=0)
    Gate.create(job)
    first, second = Gate(job, 0), Gate(job, 1)
    assert second.last_step() == 0
    first.stop_after(7)
    assert second.last_step() == first.last_step() > 7


@pytest.mark.processes
def test_a_deadline_ends_a_launch_with_its_grandchildren(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A child that ignores the polite signal and has a child in a session of its own, as
    # torchrun's are.
    code = (
        "import signal, subprocess, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'],"
        " start_new_session=True)\n"
        "pathlib.Path('grandchild').write_text(f'{p.pid}\\n')\n"
        "time.sleep(3600)\n"
    )
    monkeypatch.setattr(launch, "commands", lambda *_: [[sys.executable, "-c", code]])
    monkeypatch.setattr(launch, "GRACE_S", 0.3)
    told = tmp_path / "grandchild"

    def clock() -> float:
        """Stands still until there is a grandchild, however long that takes."""
        there = told.exists() and told.read_text().endswith("\n")
        return time.monotonic() if there else 0.0

    clocks = SimpleNamespace(monotonic=clock, sleep=time.sleep)
    monkeypatch.setattr(launch, "time", clocks)
    with pytest.raises(launch.LaunchError, match=r"not done after 0\.1 s"):
        launch.launch(
            PeerSpec("", "", "plain"), make_job(tmp_path, tmp_path, deadline_s=0.1)
        )
    pid = int(told.read_text())
    state = Path(f"/proc/{pid}/stat")
    limit = time.monotonic() + PATIENCE_S
    while state.exists() and ") Z " not in state.read_text():
        assert time.monotonic() < limit, "the grandchild lives on"
        time.sleep(0.01)


def test_an_absent_peer_is_said_and_absence_of_ours_is_a_failure(
    small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctr, "missing_reason", lambda spec: f"no {spec.module}")
    monkeypatch.setattr(ctr.ctr_data, "prepare", lambda spec, cache: small_data)
    peer, ours = ctr.run(
        run.parse(["ctr", "--strategies", "", "--peers", "ddp,world1"])
    )
    assert peer[report.MISSING] == "no ddp_gloo"
    assert not peer["failed"]
    assert ours["failed"]


@pytest.mark.processes
def test_command_line_errors_name_what_was_expected() -> None:
    command = [sys.executable, str(BENCHMARKS / "run.py"), "ctr", "--trainers", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 2
    assert "--trainers: expected at least 1" in done.stderr
