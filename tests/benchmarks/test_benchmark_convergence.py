# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``convergence`` of the benchmark: plan, file of runs, judgement."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# The benchmark is run as a script: its modules are found beside run.py.
sys.path.insert(0, str(BENCHMARKS))

import plot_convergence  # noqa: E402
import run as benchmark  # noqa: E402
from cases import convergence  # noqa: E402
from cases.cnn import LaunchFailedError  # noqa: E402
from convergence_plan import PARTS, PUSH_EVERY, Run, plan  # noqa: E402


@pytest.fixture
def args(tmp_path: Path):
    for name in ("flights.tar.gz", "text"):
        (tmp_path / name).touch()
    told = ["--data", str(tmp_path / "flights.tar.gz"), "--epochs", "1"]
    told += ["--text", str(tmp_path / "text"), "--runs", str(tmp_path / "r" / "runs")]
    return benchmark.parse(["convergence", *told])


def figures(quality: float, **others: object) -> dict[str, object]:
    points = [
        {"samples": 10 * i, "seconds": 1.0 * i, "loss": 1 / i, "auc": quality}
        for i in (1, 2, 3)
    ]
    return {
        **{"quality": quality, "loss": 0.3, "points": points, "samples": 30},
        **{"samples_per_s": 10.0, "bytes_per_sample": 7.0},
        "staleness": {"steps_mean": 1.5, "steps": {"0": 1, "1": 2, "2-3": 1}},
        **others,
    }


def test_every_strategy_is_planned_for_every_number_of_trainers() -> None:
    runs = list(plan("strategies", "flights", 3))
    assert len(runs) == len(set(runs)) == 3 * 3 * 8
    for trainers in (1, 2, 4):
        rows = {one.row.partition(":")[0] for one in runs if one.trainers == trainers}
        named = {"sync", "half_async", "async", "geo", "allreduce", "reduce", "hybrid"}
        assert rows == named
    assert {one.seed for one in plan("noise", "word2vec", 3)} == {1, 2, 3, 4, 5}
    sweep = {one.row for one in plan("geo", "flights", 1)}
    assert sweep == {"sync", *(f"geo:push_every={every}" for every in PUSH_EVERY)}
    found = {(one.trainers, one.row) for one in plan("intervals", "word2vec", 2)}
    rows = [f"geo:push_every={every}" for every in (10, 50, 100, 400)]
    assert found == {(1, "sync"), *((n, row) for n in (2, 4) for row in rows)}
    merges = {(one.row, one.merge) for one in plan("merge", "word2vec", 1)}
    geo = {(f"geo:merge_rule={rule}", "sum") for rule in ("sum", "mean")}
    assert merges == {("sync", "sum"), ("sync", "mean")} | geo


@pytest.mark.parametrize("workload", ["flights", "word2vec"])
@pytest.mark.parametrize("part", PARTS)
def test_every_run_has_a_command_and_one_process_to_compare(args, part, workload):
    runs = list(plan(part, workload, 1))
    for one in runs:
        words = one.command(args, Path("out"))
        assert Path(words[5]).is_file()
        assert words[words.index("--seed") + 1] == str(one.seed)
        assert words[words.index("--strategy") + 1] == one.row.partition(":")[0]
        assert one.layout().trainers == one.trainers
        assert words[words.index("--batch-size") + 1] == str(one.batch)
    planned = {other for name in PARTS for other in plan(name, workload, 1)}
    assert {convergence.one_process(one) for one in runs} <= planned


def test_fields_reach_the_run_as_variables() -> None:
    rows = {one.row: one for one in plan("strategies", "flights", 1)}
    variables = rows["hybrid:dense=local_sgd"].layout().variables
    assert variables == {"CPUDIST_HYBRID_DENSE": "local_sgd"}
    groups = rows["half_async:group=0+1/2+3"].layout().variables
    assert groups == {"CPUDIST_HALFASYNC_GROUP": "0,1;2,3"}
    [rule, _, _, _] = [one for one in plan("merge", "flights", 1) if one.trainers > 1]
    assert rule.layout().variables == {"CPUDIST_COMMUNICATOR_MERGE_RULE": "sum"}


def test_parts_and_data_are_checked(args) -> None:
    with pytest.raises(ValueError, match="found 'nonesuch'"):
        list(plan("nonesuch", "flights", 1))
    args.given = {"case", "runs", "lr", "batch"}
    with pytest.raises(ValueError, match="--batch, --lr would change nothing"):
        convergence.run(args)
    args.given = set()
    args.text = "/nowhere"
    with pytest.raises(ValueError, match="--text: expected the place of gcide"):
        convergence.run(args)
    args.workloads = ["sums"]
    with pytest.raises(ValueError, match="--workloads: expected flights, word2vec"):
        convergence.run(args)


def test_runs_are_kept_and_not_trained_again(args, monkeypatch, capsys) -> None:
    trained = []

    def launch(layout, args, words_of, read):
        trained.append(layout.about)
        if len(trained) == 2:
            raise LaunchFailedError("ended with 3: a reason")
        return figures(0.7 + len(trained) / 1000)

    monkeypatch.setattr(convergence, "launch", launch)
    args.parts = ["noise"]
    args.workloads = ["flights"]
    row, failed = convergence.run(args)
    assert len(trained) == 5
    assert row["seeds"] == 4
    assert failed["failed"]
    assert "a reason" in failed["missing"]
    # What was cut by an end of the process is trained again, and the one that failed.
    path = Path(args.runs)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], lines[-1][:20]]))  # no newline at the end
    convergence.run(args)
    assert len(trained) == 7
    [row] = convergence.run(args)
    assert len(trained) == 7
    assert row["seeds"] == 5
    args.epochs = 2
    with pytest.raises(ValueError, match="pass another --runs"):
        convergence.run(args)
    assert "seed 3" in capsys.readouterr().err


def test_a_strategy_is_judged_by_the_noise_of_one_process() -> None:
    one = {Run("flights", "sync", 1, 1024, s): 0.7 + s / 1000 for s in range(1, 6)}
    near = {Run("flights", "async", 2, 1024, s): 0.704 for s in (1, 2, 3)}
    far = {Run("flights", "geo", 2, 1024, s): 0.698 for s in (1, 2, 3)}
    records = {run: figures(quality) for run, quality in {**one, **near, **far}.items()}
    base, good, bad = convergence.rows_of([*one, *near, *far], records)
    assert "gap" not in base
    assert base["sigma"] == pytest.approx(0.0015811, rel=1e-4)
    # The mean of one process over the same three seeds is 0.702.
    assert good["gap"] == pytest.approx(0.002)
    assert good["bar"] == pytest.approx(2 * 0.0015811, rel=1e-4)
    assert good["verified"]
    assert bad["gap"] == pytest.approx(-0.004)
    assert not bad["verified"]
    assert good["staleness"] == 1.5


def test_results_of_both_examples_are_read(tmp_path: Path) -> None:
    flights = [
        *({"samples": n, "seconds": n / 9, "loss": 0.5, "auc": 0.6} for n in (1, 2)),
        {
            **{"epoch_aucs": [0.7], "samples": 2, "samples_per_s": 3.0},
            **{"bytes_per_sample": 4.0, "staleness": {}},
        },
    ]
    path = tmp_path / "flights"
    path.write_text("".join(json.dumps(line) + "\n" for line in flights))
    found = convergence.read_results(Run("flights", "sync", 1, 8, 1), path)
    assert (found["quality"], len(found["points"])) == (0.7, 2)
    words = {
        **{"rho": 0.4, "loss": 2.0, "words": 9.0, "words_per_s": 1.0},
        **{"bytes_per_word": 2.0, "staleness": {}},
        "points": [{"words": 2.0, "seconds": 0.1, "loss": 3.0}],
    }
    path.write_text(json.dumps(words) + "\n")
    found = convergence.read_results(Run("word2vec", "geo", 2, 8, 1), path)
    assert found["quality"] == 0.4
    assert found["points"][0]["samples"] == 4


def test_the_study_is_drawn_and_tabled(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    records = [
        {**one.__dict__, "epochs": 1, "words": 0, **figures(0.7)}
        for workload in ("flights", "word2vec")
        for part in PARTS
        for one in plan(part, workload, 1)
    ]
    path = tmp_path / "runs"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    folder = tmp_path / "pictures"
    assert plot_convergence.main([str(path), str(folder), "--seeds", "1"]) == 0
    names = {picture.name for picture in folder.iterdir()}
    assert names == {
        f"convergence_{name}.png"
        for name in ("curves", "staleness", "batches", "geo", "intervals")
    }
    said = capsys.readouterr().out
    assert "### merge, word2vec" in said
    assert "| `geo:push_every=800` | 2 | 128 | 0.7000 | +0.0000 |" in said
    (tmp_path / "empty").touch()
    with pytest.raises(SystemExit, match="found none"):
        plot_convergence.main([str(tmp_path / "empty"), str(folder)])


def test_a_part_of_the_study_draws_its_own_pictures_only(tmp_path: Path) -> None:
    """Those of the other parts stay as they are."""
    pytest.importorskip("matplotlib")
    geo = Run("word2vec", "geo:push_every=10", 4, 2048, 1)
    unscored = Run("word2vec", "geo:push_every=50", 4, 2048, 1)
    runs = {geo: figures(0.4), unscored: {**figures(0.4), "quality": None}}
    path = tmp_path / "runs"
    path.write_text(
        "".join(
            json.dumps({**one.__dict__, "epochs": 1, "words": 0, **found}) + "\n"
            for one, found in runs.items()
        )
    )
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "convergence_curves.png").write_bytes(b"of another study")
    assert plot_convergence.main([str(path), str(folder)]) == 0
    names = {picture.name for picture in folder.iterdir()}
    assert names == {"convergence_intervals.png", "convergence_curves.png"}
    kept = (folder / "convergence_curves.png").read_bytes()
    assert kept == b"of another study"


def test_intervals_are_drawn_beside_one_process_and_its_bar() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    one = {Run("word2vec", "sync", 1, 2048, s): 0.4 + s / 100 for s in (1, 2, 3)}
    two = {Run("word2vec", "geo", 2, 2048, s): 0.5 for s in (1, 2)}
    four = {Run("word2vec", "geo:push_every=400", 4, 2048, s): s / 10 for s in (1, 2)}
    runs = {**one, **two, **four}
    figure, axes = plt.subplots(1, 2)
    records = {run: figures(quality) for run, quality in runs.items()}
    plot_convergence.draw_intervals(records, axes)
    assert not axes[0].lines
    lines = [
        [list(map(float, points)) for points in line.get_data()]
        for line in axes[1].lines
    ]
    plt.close(figure)
    assert lines[0] == [[0, 0], [0.5, 0.5]]
    assert lines[1] == [[0], [0.5]]
    assert lines[2] == [[4, 4], [0.1, 0.2]]
    assert lines[3] == [[4], [pytest.approx(0.15)]]
    assert lines[4][1] == [pytest.approx(0.42)] * 2
    assert lines[5][1] == [pytest.approx(0.42 - 2 * 0.01)] * 2
