# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``tuning``: its rows, what each sets, and what is not installed."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import launch
from cases import ctr
from job import Job
from peers import PeerSpec
from report import MISSING
from run import CASES, parse
from tuning import knobs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tuning.md"
LAUNCH = {
    "samples": 1000,
    "cpu_s": 0.5,
    "bytes": 0.0,
    "rss_mb": 1.0,
    "quality": 0.8,
    "steps": 2,
    "wait_s": 0.0,
    "loss_first": 0.7,
    "loss_last": 0.5,
    "phases_s": {},
    "rank": 0,
}


def test_what_is_not_installed_is_named_with_what_installs_it() -> None:
    there = knobs.Knob({}, "libc.so.6", "nothing")
    assert knobs.missing(there) is None
    absent = knobs.Knob({}, "libnosuch.so.1", "apt install libnosuch1")
    said = knobs.missing(absent)
    assert said == "libnosuch.so.1 is not there; to have it: apt install libnosuch1"
    assert knobs.missing(knobs.KNOBS["passive"]) is None


def test_rows_of_a_layout_differ_in_variables_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(knobs, "preloaded", lambda library: "tcmalloc" not in library)
    rows = knobs.select(parse(["tuning"]))
    specs = {name: spec for name, (_, spec) in rows.items()}
    assert len(rows) == sum(map(len, knobs.LAYOUTS.values()))
    for layout in knobs.LAYOUTS:
        base: Any = specs[f"{layout}: {knobs.AS_IT_COMES}"]
        assert base.variables == ()
        for name, spec in specs.items():
            if not name.startswith(f"{layout}:") or isinstance(spec, str):
                continue
            assert (spec.launcher, spec.threads) == (base.launcher, base.threads)
            assert (spec.variables != ()) == (name != f"{layout}: {knobs.AS_IT_COMES}")
    assert "apt install libtcmalloc-minimal4" in str(specs["threads: tcmalloc"])
    pinned: Any = specs["processes: pinned"]
    assert pinned.variables == (("CPUDIST_PIN", "1"),)
    kept: Any = specs["threads: jemalloc that keeps"]
    assert dict(kept.variables)["LD_PRELOAD"] == "libjemalloc.so.2"
    chosen = knobs.select(parse(["tuning", "--rows", "threads: passive"]))
    assert list(chosen) == ["threads: as it comes", "threads: passive"]
    for wrong in (["--rows", "threads: pinned"], ["--strategies", "sync,async"]):
        with pytest.raises(ValueError, match="expected"):
            knobs.select(parse(["tuning", *wrong]))


def test_ratios_are_to_the_row_without_a_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(
        rows: dict[str, PeerSpec], args: Any, data: Path
    ) -> tuple[dict[str, Any], dict[str, str]]:
        seconds = {"threads: as it comes": 1.0, "threads: passive": 2.0}
        return {name: [[{**LAUNCH, "seconds": seconds[name]}]] for name in rows}, {}

    monkeypatch.setattr(knobs.ctr_data, "prepare", lambda spec, folder: folder)
    monkeypatch.setattr(ctr, "collect", collect)
    monkeypatch.setattr(knobs, "missing", lambda knob: knob.library and "absent")
    wanted = "threads: passive,threads: iomp"
    first, iomp, passive = knobs.run(parse(["tuning", "--rows", wanted]))
    assert first["ratio_samples_per_s"] == 1.0
    assert iomp[MISSING] == "absent"
    assert passive["ratio_samples_per_s"] == 0.5
    assert passive["case"] == "tuning"


def test_variables_of_a_row_reach_its_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a worker that writes down what it was given."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys; from pathlib import Path\n"
        "names = ('CPUDIST_THREADS', 'OMP_WAIT_POLICY')\n"
        "found = {name: os.environ.get(name) for name in names}\n"
        "folder = json.loads(Path(sys.argv[1]).read_text())['run_dir']\n"
        "(Path(folder) / 'trainer-0.json').write_text(json.dumps(found))\n"
    )
    monkeypatch.setattr(launch, "HERE", tmp_path)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    given = {
        "name": "row",
        "module": "none",
        "strategy": "sync",
        "run_dir": str(tmp_path),
        "data_dir": "",
        "trainers": 1,
        "servers": 0,
        "threads": 3,
        "batch": 1,
        "dim": 1,
        "lr": 0.1,
        "seconds": 1.0,
        "steps": 1,
        "warmup_steps": 1,
        "bf16": False,
        "deadline_s": 60.0,
    }
    job = Job(**json.loads(json.dumps(given)))
    spec = PeerSpec("none", "row", "plain", variables=(("OMP_WAIT_POLICY", "passive"),))
    (report,) = launch.launch(spec, job)
    assert report == {"CPUDIST_THREADS": "3", "OMP_WAIT_POLICY": "passive"}
    assert "OMP_WAIT_POLICY" not in os.environ


def test_benchmarks_of_the_page_take_these_options() -> None:
    joined = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(
        r"python benchmarks/run\.py ([^`…]*?)\s*(?=[`…]|\n\n|\n```)", joined
    )
    assert len(found) >= 9
    for command in found:
        arguments = shlex.split(" ".join(command.split()))
        assert arguments[0] in CASES
        if arguments[-1].startswith("--"):  # what it takes is left to the reader
            arguments.pop()
        parse(arguments)
