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
from whole_gradients import check_files, expected

KILLS = int(os.environ.get("CPUDIST_TEST_KILLS", "2"))
SCRIPT = Path(__file__).with_name("train_killed.py")
# Trainers and dedicated servers.
LAYOUTS = {"allreduce": [(2, 0)], "sync": [(2, 0), (2, 1)]}
# By what each trainer's gradients of rows, and of the dense parameter, count.
GROUPS = [0.5, 0.5, 1.0]  # two trainers that share rounds, and one of its own
WHOLE = {
    ("async", 2, 0): ([1.0] * 2, [1.0] * 2),
    ("async", 2, 2): ([1.0] * 2, [1.0] * 2),
    ("async_remote", 2, 2): ([1.0] * 2, [1.0] * 2),
    ("half_async", 3, 0): (GROUPS, GROUPS),
    ("half_async", 3, 2): (GROUPS, GROUPS),
    ("geo_outer", 2, 1): ([0.5] * 2, [0.5] * 2),
    ("sync_remote", 2, 1): ([0.5] * 2, [0.5] * 2),
    ("hybrid", 2, 1): ([1.0] * 2, [0.5] * 2),
}
# More than trainer 0 makes in all lives that are ended.
STEPS = 20 + 16 * KILLS
CASES = [(name, *layout) for name, some in LAYOUTS.items() for layout in some]


def ends_of(launch_forks, folder, strategy, trainers, servers, kills):
    """What every trainer of a job ends with that was killed so often."""
    folder.mkdir()
    words = [
        *("torchrun", "--standalone"),
        *(f"--nproc-per-node={trainers + servers}", f"--max-restarts={kills}"),
        *(str(SCRIPT), str(folder), strategy, str(STEPS), str(kills), "1"),
    ]
    program = launch_forks(
        words,
        PYTHONPATH=os.pathsep.join(sys.path),
        CPUDIST_SNAPSHOT_DIR=folder / "snapshots",
        **({"CPUDIST_SERVERS": servers} if servers else {}),
    )
    assert program.wait(120.0 + 30.0 * kills) == 0, program.text()
    if kills:
        assert len((folder / "killed").read_text().split()) == kills
        assert int((folder / "from-0").read_text()) > 0
    return [
        torch.load(folder / f"trainer-{rank}.pt", weights_only=True)
        for rank in range(trainers)
    ]


@pytest.mark.parametrize(("strategy", "trainers", "servers"), CASES)
def test_ends_where_an_undisturbed_job_ends(
    strategy, trainers, servers, launch_forks, tmp_path
):
    case = (strategy, trainers, servers)
    undisturbed = ends_of(launch_forks, tmp_path / "0", *case, kills=0)
    ended = ends_of(launch_forks, tmp_path / "killed", *case, kills=KILLS)
    for one, other in zip(ended, undisturbed, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(("strategy", "trainers", "servers"), WHOLE)
def test_ends_with_every_gradient_once(
    strategy, trainers, servers, launch_forks, tmp_path
):
    """Saved in chains of changes, and gone on from these."""
    folder, case = tmp_path / "job", (strategy, trainers, servers)
    ended = ends_of(launch_forks, folder, *case, kills=KILLS)
    of_rows, of_dense = WHOLE[case]
    table, _ = expected([STEPS] * trainers, of_rows)
    _, dense = expected([STEPS] * trainers, of_dense)
    for one in ended:
        assert torch.equal(one["table"], table)
        assert torch.equal(one["dense"], dense)
    if of_rows == of_dense:  # and so of each snapshot that is left
        assert check_files(folder / "snapshots", 1.0, of_rows) > 0
