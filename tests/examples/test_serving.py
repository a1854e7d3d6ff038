# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Flights: trained, exported, and scored without a cluster."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import flights
import numpy as np
import printed
import pytest
import torch
from flights_archive import make_archive
from patience import PATIENCE_S
from programs import ROOT, clean_environment
from sync_cases import run

import torch_cpudist as cpudist


def archive(folder: Path) -> Path:
    """Flights of which one carrier is late, on days that train and that test."""
    rows = [
        {
            **{"day": 1 + i % 28, "carrier": "AA" if i % 3 else "UA"},
            **{"arr_delay": 60 if i % 3 else -5, "tailnum": f"N{i % 7}"},
        }
        for i in range(300)
    ]
    return make_archive(folder / "flights.tar.gz", rows)


@pytest.mark.parametrize("remote", [False, True])
def test_an_exported_model_scores_as_in_the_cluster(tmp_path: Path, remote) -> None:
    files = flights.load(archive(tmp_path))

    def body(context: cpudist.Context) -> tuple[np.ndarray, np.ndarray]:
        torch.manual_seed(1)
        model = flights.build(files.table_rows, remote)
        inner = torch.optim.Adagrad(model.parameter_groups())
        opt = cpudist.DistributedOptimizer(inner, model, strategy=cpudist.Sync())
        opt.resume(tmp_path / "snapshots")
        data = flights.loaded(files.train, 32, shuffle=True, seed=1)
        for ids, labels, size in flights.my_batches(data, 7, remote):
            opt.zero_grad()
            if len(labels):
                loss = torch.nn.functional.binary_cross_entropy_with_logits
                loss(model(ids), labels).backward()
            opt.step(samples=size)
        cpudist.export(model, tmp_path / "out")
        return flights.scored(model, flights.loaded(files.test, 64), remote)

    expected, labels = run(body, 2)[0]
    model = flights.build(files.table_rows, remote)
    with cpudist.load_for_inference(model, tmp_path / "out"):
        test = flights.loaded(files.test, 64)
        scores, same = flights.scored(model, test, remote)
    assert np.abs(scores - expected).max() <= 1e-6
    assert np.ptp(scores) > 0.01
    assert (same == labels).all()


@pytest.mark.processes
def test_the_two_programs_agree(tmp_path: Path) -> None:
    said = []
    data = ["--data", str(archive(tmp_path))]
    train = ["examples/flights/flights.py", *data, "--batch-size", "32"]
    out, scores = (
        str(tmp_path / "flights-1"),
        ["--scores", str(tmp_path / "scores.npy")],
    )
    for words in (
        [*train, "--export", out, "--results", str(tmp_path / "r.jsonl"), *scores],
        ["examples/serving/predict.py", out, *data, *scores],
    ):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=clean_environment() | {"CPUDIST_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    import flights_report

    auc = flights_report.read_run(tmp_path / "r.jsonl").auc
    assert f"AUC {auc:.6f}" in said[1]
    printed.check("serving-predict", said[1])


def test_remote_tables_need_a_snapshot(monkeypatch, capsys) -> None:
    words = ["flights.py", "--data", "x", "--remote", "--export", "y"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        flights.parse_arguments()
    assert "add --snapshots DIR" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "--snapshots", "z"])
    assert isinstance(flights.parse_arguments(), argparse.Namespace)
