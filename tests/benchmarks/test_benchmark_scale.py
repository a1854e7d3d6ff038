# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks between hosts of one machine: ``scale``, and ``word2vec --rate``."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import ctr_data  # noqa: E402
import hosts  # noqa: E402
import launch  # noqa: E402
import run  # noqa: E402
import usage  # noqa: E402
from cases import cnn, scale, word2vec, word2vec_hosts  # noqa: E402
from job import Gate, Job  # noqa: E402
from peers import common, scale_rank  # noqa: E402

SMALL = ctr_data.CtrSpec(
    slots=4, rows=1003, dense=3, train_samples=2_000, test_samples=500
)
MADE = [hosts.Host(n, f"space-{n}", f"10.0.0.{n + 1}") for n in range(2)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ctr_data.prepare(SMALL, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def job(tmp_path: Path, data: Path) -> Job:
    options = "--strategies async --trainers 1 --servers 1 --batch 32 --dim 4"
    options += " --seconds 0.2 --warmup-steps 2 --step-ms 4 --dilation 2"
    args = run.parse(["scale", *options.split(), "--deadline-s", "300"])
    ((name, spec),) = scale.select(args).items()
    return scale.make_job(name, spec, args, str(tmp_path), data)


# -- scale: one trainer -------------------------------------------------------


def test_a_sleeping_network_gives_the_gradients_of_a_true_backward(job: Job) -> None:
    samples = ctr_data.load(Path(job.data_dir), "train")
    batch = common.to_batch(samples, slice(0, 32))
    plain, sleeping = common.CtrModel(job), scale_rank.SleepingModel(job, batch)
    sleeping.compute = scale_rank.Compute(0.02, 0.03)
    scale_rank.true_step(plain, batch)
    slept = scale_rank.true_step(sleeping, batch)
    assert slept.forward_s >= 0.02
    assert slept.backward_s >= 0.03
    found = dict(sleeping.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad)
    assert sleeping.table.weight.grad is not None
    assert sleeping.table.weight.grad.is_sparse


def test_a_trainer_sleeps_its_steps_and_reports_every_phase(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_rank, "INTERFACE", "lo")
    monkeypatch.setattr(scale_rank, "MEASURED_STEPS", 3)
    Gate.create(job)
    scale_rank.train(job, 0)
    report = json.loads(job.report_path(0).read_text())
    assert report["step_s"] == pytest.approx(0.004)
    assert list(report["phases"]) == ["1"]
    one = report["phases"]["1"]
    assert one["seconds"] >= 0.2
    assert one["samples"] == 32 * one["steps"]
    # Twice as slow a clock: no step is shorter than two sleeps of 4 ms together.
    assert one["steps"] <= one["seconds"] / 0.008
    assert one["servers"] == []
    assert 0 < one["machine_share"] <= 1


# -- scale: figures -----------------------------------------------------------


def phase(**changes: object) -> dict[str, object]:
    base = {"samples": 1000, "seconds": 2.0, "cpu_s": 0.02, "bytes": 4000, "wait_s": 1}
    return {**base, "received": 10_000_000, "sent": 5_000_000, **changes}


def watched(**changes: object) -> dict[str, object]:
    servers = [
        {"cpu_s": 0.5, "received": 25_000_000, "sent": 0},
        {"cpu_s": 0.25, "received": 0, "sent": 12_500_000},
    ]
    return phase(**{"servers": servers, "machine_share": 0.75, **changes})


def test_figures_are_in_the_time_of_the_hosts(job: Job) -> None:
    reports = [{"phases": {"2": watched()}}, {"phases": {"2": phase(seconds=4.0)}}]
    found = scale.figures(reports, 2, job, "1gbit", cores=2)
    assert found == pytest.approx(
        {
            # The clock is twice as slow: 2 x (500 + 250).
            "samples_per_s": 1500.0,
            "trainer_cpu_us_per_sample": 20.0,
            "server_cpu_us_per_sample": 750.0,
            "bytes_per_sample": 4.0,
            "waiting_share": 1 / 3,
            # 12.5 MB/s of the 62.5 that a cable passes by the wall's clock.
            "server_cable": 0.2,
            "trainer_cable": 0.08,
            "server_cpu": 0.25,
            "machine": 0.75,
            "machine_own": 0.1975,
        }
    )


def test_efficiency_is_against_one_trainer_and_the_fullest_is_named(job: Job) -> None:
    def trainer(**changes: object) -> dict[str, object]:
        both = {"1": watched(), "2": watched(machine_share=0.05, **changes)}
        return {"step_s": 0.004, "phases": both}

    rows = scale.make_rows("row", job, "1gbit", [[trainer(), trainer(samples=800)]])
    assert [row["trainers"] for row in rows] == [1, 2]
    assert [row["efficiency"] for row in rows] == pytest.approx([1, 0.9])
    assert rows[0]["fullest"] == "this machine's cores, 75%"
    assert "emulated: sleeps 4.0 ms" in rows[0]["compute"]
    full = {name: 0.1 for name in scale.RESOURCES}
    assert scale.fullest({**full, "server_cable": 0.5}) == "a server's cable, 50%"


def test_phases_are_of_one_trainer_to_all() -> None:
    assert scale_rank.counts(16) == [1, 4, 16]
    assert scale_rank.counts(6) == [1, 6]
    assert scale_rank.counts(1) == [1]


def test_a_slower_clock_slows_cables_and_patience(job: Job) -> None:
    assert scale.dilated("1gbit", 8) == "125000kbit"
    assert scale.dilated("100mbit", 1) == "100000kbit"
    assert launch.environment(job, MADE)["CPUDIST_LIVENESS_MS"] == "6000"
    unchanged = launch.environment(replace(job, dilation=1.0), MADE)
    assert "CPUDIST_LIVENESS_MS" not in unchanged


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--servers of at least 1"),
        (["--servers", "1", "--peers", "ddp"], "no --peers"),
        (["--servers", "1", "--dilation", "0.5"], "--dilation >= 1"),
        (["--servers", "1", "--steps", "5"], "neither --bf16 nor --steps"),
    ],
)
def test_what_scale_cannot_do_is_refused(options: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scale.select(run.parse(["scale", *options]))


def test_ranks_are_told_what_torchrun_would_tell_them(job: Job) -> None:
    (spec,) = scale.select(run.parse(["scale", "--servers", "1"])).values()
    first, second = launch.commands(spec, job, Path("job.json"), MADE)
    assert first[:5] == ["ip", "netns", "exec", "space-0", "env"]
    told = dict(word.partition("=")[::2] for word in second[5:12])
    assert told == {
        **{"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "1", "LOCAL_RANK": "0"},
        **{"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"},
        "MASTER_PORT": str(launch.MASTER_PORT),
    }
    assert second[-1] == "job.json"


def test_bytes_of_an_interface_and_busy_cores_are_the_kernels() -> None:
    received, sent = usage.cable_bytes("self", "lo")
    assert received == sent  # whatever loopback sends it receives
    with pytest.raises(OSError, match="no interface nonesuch"):
        usage.cable_bytes("self", "nonesuch")
    busy, total = usage.machine_ticks()
    assert 0 < busy <= total


# -- word2vec between hosts ---------------------------------------------------


def test_every_host_of_word2vec_has_a_torchrun_of_its_own(tmp_path: Path) -> None:
    args = run.parse(["word2vec", "--rate", "1gbit", "--epochs", "2"])
    layout, optimizer = word2vec.layout_of("geo:push_every=50@sgd", 1)
    found = word2vec_hosts.commands(
        layout,
        optimizer,
        tmp_path / "r.json",
        MADE,
        lambda layout, results, optimizer, meeting: word2vec.command(
            layout, args, results, optimizer, meeting
        ),
    )
    assert [words[:4] for words in found] == [
        ["ip", "netns", "exec", f"space-{n}"] for n in range(2)
    ]
    for number, words in enumerate(found):
        assert {f"--node-rank={number}", "--nnodes=2", "--nproc-per-node=1"} < {*words}
        assert "--master-addr=10.0.0.1" in words
        assert words[-1] == "sgd"
    variables = word2vec_hosts.on_hosts(layout)
    assert variables["CPUDIST_GEO_PUSH_EVERY"] == "50"
    assert variables["GLOO_SOCKET_IFNAME"] == hosts.INTERFACE


def test_rows_of_one_process_have_no_hosts() -> None:
    with pytest.raises(ValueError, match=r"torchrun starts, found \['gensim1'\]"):
        word2vec.run(run.parse(["word2vec", "--rate", "1gbit", "--rows", "gensim1"]))
    with pytest.raises(ValueError, match="no --servers"):
        word2vec.run(run.parse(["word2vec", "--rate", "1gbit", "--servers", "1"]))


def test_without_the_right_to_make_hosts_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts.shutil, "which", lambda program: None)
    with pytest.raises(ValueError, match=r"cannot make hosts here: .*ip \(package"):
        word2vec.run(run.parse(["word2vec", "--rate", "1gbit"]))
    monkeypatch.setattr(scale.ctr_data, "prepare", lambda spec, cache: None)
    with pytest.raises(ValueError, match=r"cannot make hosts here: .*ip \(package"):
        scale.run(run.parse(["scale", "--servers", "1"]))


def test_waiting_is_a_share_of_all_trainers_time() -> None:
    launches = [{"strategy": "geo", "seconds": 5.0, "wait_s": 2.0}] * 3
    assert word2vec_hosts.waiting_share(launches, 4) == pytest.approx(0.1)
    ddp = [{"strategy": "DDP over gloo", "seconds": 5.0, "wait_s": 0.0}]
    assert word2vec_hosts.waiting_share(ddp, 4) is None


def test_commands_run_together_and_one_that_fails_ends_all(tmp_path: Path) -> None:
    def python(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    results = tmp_path / "results.json"
    writes = python("open('results.json', 'w').write('{\"words\": 3}')")
    found = cnn.run_together([writes, python("pass")], {}, results, PATIENCE_S)
    assert found == {"words": 3}
    began = time.monotonic()
    fails = python("print('a reason'); raise SystemExit(3)")
    with pytest.raises(cnn.LaunchFailedError, match="ended with 3: a reason"):
        cnn.run_together(
            [python("import time; time.sleep(60)"), fails], {}, results, 50.0
        )
    assert time.monotonic() - began < 30
    with pytest.raises(cnn.LaunchFailedError, match=r"not done after 0\.3 s"):
        cnn.run_together([python("import time; time.sleep(60)")], {}, results, 0.3)


def test_columns_without_anything_in_them_are_left_out() -> None:
    rows = [{"name": "a", "rate": None}, {"name": "b"}]
    assert run.filled({"name": "name", "rate": "rate"}, rows) == {"name": "name"}
