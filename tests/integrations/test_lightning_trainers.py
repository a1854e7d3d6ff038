# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lightning's Trainer on two trainers: ranks, shares, files, means, the loop's bits."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import printed
import pytest
import torch
from flights_archive import make_archive
from lazily import Lazily
from patience import PATIENCE_S
from programs import ROOT, Launcher
from sync_cases import ONE_THREAD

from torch_cpudist.testing import ProcessRanks

cases = Lazily("lightning_cases", load=lambda _: pytest.importorskip("lightning"))
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("in_a_folder"),
]


@pytest.mark.parametrize("servers", [0, 1])
def test_sync_is_the_loop_bit_for_bit(servers):
    with ProcessRanks(
        cases.fit_as_the_loop, 2 + servers, servers=servers, variables=ONE_THREAD
    ) as ranks:
        first, second = [one for one in ranks.results(PATIENCE_S) if one]
    for rank, found in enumerate((first, second)):
        assert found["same_bits"]
        assert found["saved_bits"]
        assert found["state"] == [0, 1, 2]
        assert found["numbers"] == [rank, 2]
        assert found["hosts"] == [2, 1]
        assert found["zero"] == (rank == 0)
        assert len(found["files"]) == 1  # of both, and trainer 0 alone has saved
        assert found["steps"] == 12
        assert found["rank"] == pytest.approx(1.5)
        assert found["val"] == pytest.approx(found["val_alone"], rel=1e-5)
        assert found["open"] == [True]  # the script calls shutdown()
    assert sorted(first["seen"] + second["seen"]) == list(range(cases.SAMPLES))


def test_async_trainers_stop_together_and_have_the_same():
    with ProcessRanks(cases.fit_async, 2, variables=ONE_THREAD) as ranks:
        first, second = ranks.results(PATIENCE_S)
    for found in (first, second):
        assert found["epochs"] == 2
        assert found["text"] == {"of": [0, "a", None]}
        assert found["path"] == "from-0"
        assert "expected numbers, text" in found["refused"]
        assert found["gathered"] == [0.0, 1.0]
        assert found["most"] == 1.0
        assert found["tested"] == pytest.approx(found["val"], rel=1e-6)
    assert first["val"] == second["val"]
    assert first["weights"] == second["weights"]


def test_an_error_on_one_trainer_is_a_loss_for_the_other():
    with ProcessRanks(cases.fail_alone, 2, variables=ONE_THREAD) as ranks:
        broken = ranks.expect(1, "report", PATIENCE_S)["value"]
        lost = ranks.expect(0, "report", PATIENCE_S)["value"]
    assert broken == {"type": "ValueError", "text": "a broken batch"}
    assert lost["type"] == "PeerLostError"


def test_the_example_under_torchrun(launch_forks: Launcher, tmp_path: Path):
    pytest.importorskip("lightning")
    rows = [
        {
            **{"day": 1 + i % 28, "carrier": "AA" if i % 3 else "UA"},
            **{"arr_delay": 60 if i % 3 else -5, "tailnum": f"N{i % 7}"},
        }
        for i in range(300)
    ]
    data = make_archive(tmp_path / "flights.tar.gz", rows)
    script = ROOT / "examples/flights/flights_lightning.py"
    command = ["torchrun", "--standalone", "--nproc-per-node=3", str(script)]
    command += ["--data", str(data), "--batch-size", "16", "--strategy", "async"]
    program = launch_forks(command, CPUDIST_THREADS=1, CPUDIST_SERVERS=1)
    assert program.wait(PATIENCE_S) == 0, program.text()
    (line,) = re.findall(r"^\d trainers, .*$", program.text(), re.MULTILINE)
    assert line.startswith("2 trainers, ")
    printed.check("flights-lightning", line)
    assert float(re.search(r"AUC (0\.\d+|1\.0000)", line)[1]) > 0.9, line
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["best.ckpt"]
    saved = torch.load(tmp_path / "checkpoints/best.ckpt", weights_only=True)
    assert saved["state_dict"]["net.linear.weight"].any()


ALONE = """
import json
import lightning_cases as cases

made = cases.trainer(cases.CpudistStrategy("sync"), gradient_clip_val=0.5)
module = cases.Clicks()
made.fit(module, cases.loader(), cases.loader(8, 2))
made.save_checkpoint("after.ckpt")
(tested,) = made.test(module, cases.loader(8, 2), verbose=False)
found = {
    "rank": made.global_rank,
    "val": made.callback_metrics["val"].item(),
    "tested": tested["val"],
    "bag": module.bag.weight.tolist(),
    "class": type(module.bag).__name__,
}
print("FOUND " + json.dumps(found) + "\\n", end="", flush=True)
"""


def test_without_init_each_call_is_a_run_of_its_own(
    launch_forks: Launcher, tmp_path: Path
):
    pytest.importorskip("lightning")
    (tmp_path / "alone.py").write_text(ALONE)
    command = ["torchrun", "--standalone", "--nproc-per-node=2", "alone.py"]
    folders = [one for one in sys.path if one.startswith(str(ROOT))]
    program = launch_forks(
        command, CPUDIST_THREADS=1, PYTHONPATH=os.pathsep.join([str(ROOT), *folders])
    )
    assert program.wait(PATIENCE_S) == 0, program.text()
    lines = re.findall("FOUND (.*)", program.text())
    first, second = sorted(map(json.loads, lines), key=lambda one: one["rank"])
    assert [first["rank"], second["rank"]] == [0, 1]
    assert first["tested"] == second["tested"] == pytest.approx(first["val"])
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    for found in (first, second):
        assert found["class"] == "EmbeddingBag"
        bag = torch.tensor(found["bag"])
        assert torch.equal(bag, saved["state_dict"]["bag.weight"])
    assert saved["optimizer_states"][0]["state"][0]["sum"].any()
