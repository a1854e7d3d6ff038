# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The files for Slurm and Kubernetes run, as those who read them would start them.

Processes have what Slurm's srun and Kubeflow's operators put into the environment; the
names of their hosts are this one's.
"""

from __future__ import annotations

import re
import shutil

import launch_page
import printed
import pytest
from patience import PATIENCE_S
from ports import free_port
from programs import ROOT

EXAMPLES = ROOT / "examples"
HERE = "127.0.0.1"

# Starts the tasks as srun does on one node.
SRUN = """#!/bin/bash
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$SLURM_NTASKS SLURM_PROCID=$task \\
    SLURM_LOCALID=$task SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=$SLURM_NTASKS "$@" &
done
status=0
for one in $(jobs -p); do wait "$one" || status=$?; done
exit "$status"
"""
SCONTROL = f"#!/bin/bash\necho {HERE}\necho other\n"


@pytest.fixture(autouse=True)
def _script(tmp_path):
    (tmp_path / "train.py").write_text(launch_page.script())


def lines_of(program):
    """What a program has printed, beside warnings of a launcher."""
    return "\n".join(re.findall(r"^trainer \d of .*$", program.text(), re.MULTILINE))


def trainers_of(*programs):
    """What the trainers have said: their numbers, and how many there are of each."""
    for program in programs:
        assert program.wait(PATIENCE_S) == 0, program.text()
    said = "".join(program.text() for program in programs)
    return sorted(re.findall(r"trainer (\d) of (\d), servers (\d)", said))


def test_the_batch_file_of_slurm(launch_forks, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    program = launch_forks(
        f"PATH={folder}:$PATH bash '{EXAMPLES / 'slurm/train.sh'}'",
        **{"SLURM_JOB_ID": free_port() - 10_000, "SLURM_JOB_NODELIST": "n[1-2]"},
        **{"SLURM_NTASKS": 2, "SLURM_PROCID": 0, "CPUDIST_THREADS": 1},
    )
    assert trainers_of(program) == [("0", "2", "2"), ("1", "2", "2")]
    printed.check("slurm", lines_of(program))


def manifests(name):
    yaml = pytest.importorskip("yaml", reason="the extra docs")
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text()))


def variables_of(entries, rendezvous):
    """The ``env`` of a manifest, whose server 0 is met here."""
    found = {entry["name"]: entry["value"] for entry in entries}
    if "CPUDIST_RENDEZVOUS" in found:
        assert found["CPUDIST_RENDEZVOUS"].startswith("clicks-servers-")
        found["CPUDIST_RENDEZVOUS"] = f"{HERE}:{rendezvous}"
    return found


def pods_of_pytorchjob(job, rendezvous):
    """The command of every pod, and what its environment has."""
    assert job["apiVersion"] == "kubeflow.org/v1"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    total = sum(one["replicas"] for one in replicas.values())
    port, rank = free_port(), 0
    for kind in ("Master", "Worker"):
        for _ in range(replicas[kind]["replicas"] if kind in replicas else 0):
            (container,) = replicas[kind]["template"]["spec"]["containers"]
            assert container["name"] == "pytorch"
            operator = {
                **{"PYTHONUNBUFFERED": "1", "MASTER_ADDR": HERE, "MASTER_PORT": port},
                **{"WORLD_SIZE": total, "RANK": rank, "PET_NNODES": total},
                **{"PET_NODE_RANK": rank, "PET_NPROC_PER_NODE": "auto"},
            }
            own = variables_of(container.get("env", []), rendezvous)
            yield container["command"], operator | own
            rank += 1


def pods_of_trainjob(job, rendezvous):
    """As of ``pods_of_pytorchjob``."""
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    trainer = job["spec"]["trainer"]
    port = free_port()
    for node in range(trainer["numNodes"]):
        operator = {
            **{"PET_NNODES": trainer["numNodes"], "PET_NODE_RANK": node},
            **{"PET_NPROC_PER_NODE": trainer["numProcPerNode"]},
            **{"PET_MASTER_ADDR": HERE, "PET_MASTER_PORT": port},
        }
        own = variables_of(trainer.get("env", []), rendezvous)
        yield trainer["command"], operator | own


PODS = {"PyTorchJob": pods_of_pytorchjob, "TrainJob": pods_of_trainjob}


@pytest.mark.parametrize(
    ("name", "trainers", "servers"),
    [
        ("pytorchjob.yaml", 2, 2),
        ("pytorchjob_groups.yaml", 2, 1),
        ("trainjob.yaml", 4, 4),
        ("trainjob_groups.yaml", 2, 1),
    ],
)
def test_the_manifests_for_kubernetes(name, trainers, servers, launch_forks):
    rendezvous = free_port()
    programs = [
        launch_forks(command, **variables, CPUDIST_THREADS=1)
        for job in manifests(name)
        for command, variables in PODS[job["kind"]](job, rendezvous)
    ]
    expected = [(str(rank), str(trainers), str(servers)) for rank in range(trainers)]
    assert trainers_of(*programs) == expected
    if name == "pytorchjob.yaml":
        printed.check("kubernetes", lines_of(programs[0]))


def test_a_trainjob_without_torchrun_is_refused(launch_forks):
    (job,) = manifests("trainjob.yaml")
    ((_, variables), _) = pods_of_trainjob(job, 0)
    program = launch_forks(["python", "train.py"], **variables)
    assert program.wait(PATIENCE_S) != 0
    assert "Let the container's command be torchrun train.py" in program.text()


@pytest.mark.integrations
def test_open_mpi_starts_ranks(launch_forks):
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        pytest.skip("no Open MPI: apt install openmpi-bin")
    meeting = ["-x", "MASTER_ADDR", "-x", "MASTER_PORT", "-x", "CPUDIST_THREADS"]
    command = [mpirun, "--oversubscribe", "-n", "2", *meeting, "python", "train.py"]
    program = launch_forks(
        command,
        **{"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1},
        **{"MASTER_ADDR": HERE, "MASTER_PORT": free_port(), "CPUDIST_THREADS": 1},
    )
    assert trainers_of(program) == [("0", "2", "2"), ("1", "2", "2")]
