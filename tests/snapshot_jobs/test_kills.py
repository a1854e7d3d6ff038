# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs whose processes are killed, and which torchrun starts again.

``CPUDIST_TEST_KILLS=20`` in the environment of pytest kills so often in every layout.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from sync_cases import assert_same_bits

KILLS = int(os.environ.get("CPUDIST_TEST_KILLS", "2"))
SCRIPT = Path(__file__).with_name("train_killed.py")
# Trainers and dedicated servers.
LAYOUTS = {"allreduce": [(2, 0)], "sync": [(2, 0), (2, 1)]}
CASES = [(name, *layout) for name, some in LAYOUTS.items() for layout in some]


@pytest.mark.parametrize(("strategy", "trainers", "servers"), CASES)
def test_ends_where_an_undisturbed_job_ends(
    strategy, trainers, servers, launch_forks, tmp_path
):
    ended = {}
    for kills in (0, KILLS):
        folder = tmp_path / f"{kills}"
        folder.mkdir()
        ranks = trainers + servers
        words = [
            *("torchrun", "--standalone"),
            *(f"--nproc-per-node={ranks}", f"--max-restarts={kills}", str(SCRIPT)),
            *(str(folder), strategy, str(20 + 8 * KILLS), str(kills), "1"),
        ]
        program = launch_forks(
            words,
            PYTHONPATH=os.pathsep.join(sys.path),
            CPUDIST_SNAPSHOT_DIR=folder / "snapshots",
            **({"CPUDIST_SERVERS": servers} if servers else {}),
        )
        assert program.wait(120.0 + 30.0 * kills) == 0, program.text()
        ended[kills] = [
            torch.load(folder / f"trainer-{rank}.pt", weights_only=True)
            for rank in range(trainers)
        ]
    assert len((tmp_path / f"{KILLS}" / "killed").read_text().split()) == KILLS
    assert int((tmp_path / f"{KILLS}" / "from-0").read_text()) > 0
    for found, expected in zip(ended[KILLS], ended[0], strict=True):
        assert_same_bits(found, expected)
