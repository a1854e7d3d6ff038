# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The batch file of the example on a real Slurm: Debian's, two nodes on loopback."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import launch_page
import pytest
from patience import PATIENCE_S
from programs import ROOT, Launcher
from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.integrations, pytest.mark.processes]
BATCH_FILE = ROOT / "examples/slurm/train.sh"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as folder:
        one = SlurmCluster(Path(folder))
        try:
            one.start()
            yield one
        finally:
            one.end()


def submitted(
    cluster: SlurmCluster, launch: Launcher, folder: Path, options: str, script: Path
) -> tuple[int, str]:
    """The status of a job, and what it has printed."""
    program = launch(
        f"sbatch --wait --output=job.txt {options} '{script}'",
        **cluster.variables,
        CPUDIST_THREADS=1,
    )
    status = program.wait(PATIENCE_S)
    assert "Submitted batch job" in program.text(), program.text() + cluster.logs()
    return status, (folder / "job.txt").read_text()


def test_sbatch_trains_on_two_nodes(
    cluster: SlurmCluster, launch: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(launch_page.script())
    options = "--ntasks-per-node=1"  # the file's own four would be eight ranks here
    status, said = submitted(cluster, launch, tmp_path, options, BATCH_FILE)
    assert status == 0, said + cluster.logs()
    lines = re.findall(r"trainer (\d) of 2, servers 2, step 20, weights (\S+)", said)
    assert sorted(rank for rank, _ in lines) == ["0", "1"], said
    assert lines[0][1] == lines[1][1]


def test_srun_without_a_place_to_meet_is_refused(
    cluster: SlurmCluster, launch: Launcher, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\nunset MASTER_ADDR MASTER_PORT\n"
        "srun python -c 'import torch_cpudist; torch_cpudist.init()'\n"
    )
    options = "--nodes=1 --ntasks=2 --cpus-per-task=1"
    status, said = submitted(cluster, launch, tmp_path, options, script)
    assert status != 0
    assert "MASTER_ADDR and MASTER_PORT are not set" in said, said


def test_a_process_of_a_batch_script_is_a_world_of_one(
    cluster: SlurmCluster, launch: Launcher, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\npython -c 'import torch_cpudist as cpudist; cpudist.init(); "
        'print(f"world of {cpudist.trainer_count()}"); cpudist.shutdown()\'\n'
    )
    options = "--nodes=2 --ntasks-per-node=2 --cpus-per-task=1"
    status, said = submitted(cluster, launch, tmp_path, options, script)
    assert status == 0, said
    assert said.splitlines()[-1] == "world of 1"
