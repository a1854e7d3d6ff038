# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Processes of srun, mpirun and Kubeflow are no worlds of one by accident."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

import torch_cpudist as cpudist
from torch_cpudist.errors import ConfigurationError
from torch_cpudist.launch import environment

MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_RANK": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_RANK": "4",
}
HYDRA = {
    "PMI_SIZE": "6",
    "PMI_RANK": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "3",
}
# A batch script, or a shell of salloc that is no step.
JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "3(x2)",
}
SRUN = JOB | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
# A shell of salloc that is a step, as LaunchParameters=use_interactive_step makes it.
INTERACTIVE = JOB | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}


def numbers(variables):
    made = environment.parse(variables)
    local = (made.local_rank, made.local_world_size)
    return (made.rank, made.world_size, *local, made.group_rank)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (OPEN_MPI, (4, 6, 1, 3, 0)),
        (HYDRA, (4, 6, 1, 3, 0)),
        (SRUN, (4, 6, 1, 3, 1)),
        # mpirun within a step, whose tasks are its helpers.
        (SRUN | OPEN_MPI | {"SLURM_PROCID": "1"}, (4, 6, 1, 3, 0)),
        (SRUN | HYDRA | {"SLURM_PROCID": "1"}, (4, 6, 1, 3, 0)),
        # srun --mpi=pmi2
        (SRUN | {"PMI_SIZE": "6", "PMI_RANK": "4"}, (4, 6, 1, 3, 1)),
        ({"PMI_SIZE": "6", "PMI_RANK": "4"}, (4, 6, 0, 6, 0)),
        (
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5,1", "SLURM_LOCALID": "0"},
            (4, 6, 0, 1, 1),
        ),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "?"}, (4, 6, 1, 6, 1)),
    ],
)
def test_several_processes_are_ranks(variables, expected):
    assert numbers(variables | MEETING) == expected
    made = environment.parse(variables | MEETING)
    assert made.launched
    assert not made.agent_store  # rank 0 keeps the store
    assert (made.master_addr, made.master_port) == ("node0", 29500)


@pytest.mark.parametrize(
    "variables",
    [
        JOB,
        INTERACTIVE,
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
    ],
)
@pytest.mark.parametrize("meeting", [{}, MEETING])
def test_one_process_is_a_world_of_one(variables, meeting):
    made = environment.parse(variables | meeting)
    assert (made.rank, made.world_size, made.launched) == (0, 1, False)


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA, SRUN, JOB])
def test_torchruns_variables_win(variables):
    torchrun = {
        **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        **{"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"},
    }
    assert numbers(variables | torchrun | MEETING) == (1, 2, 1, 2, 0)


@pytest.mark.parametrize(
    ("variables", "size"),
    [
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE=6: mpirun"),
        (HYDRA, "PMI_SIZE=6: mpirun"),
        (SRUN, "SLURM_STEP_NUM_TASKS=6: srun"),
    ],
)
@pytest.mark.parametrize("missing", list(MEETING))
def test_where_they_meet_has_to_be_said(variables, size, missing):
    with pytest.raises(ConfigurationError, match=size) as refused:
        environment.parse(variables | MEETING | {missing: " "})
    assert f"but {missing} is not set" in str(refused.value)
    with pytest.raises(ConfigurationError, match="and MASTER_PORT are not set"):
        environment.parse(variables)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TRAINING_ROLE": "PSERVER"}, "--role=server or --role=trainer"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "command be torchrun train.py"),
        ({"PET_NNODES": "1:4"}, "command be torchrun train.py"),
        ({"PMI_SIZE": "2", **MEETING}, "PMI_RANK=None: expected a whole number"),
        ({"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE='x'"),
    ],
)
def test_what_does_not_say_who_this_is_is_refused(variables, said):
    with pytest.raises(ConfigurationError, match=said):
        environment.parse(variables)


def test_jobs_of_their_own_may_have_paddles_role():
    variables = {
        **{"TRAINING_ROLE": "TRAINER", "CPUDIST_ROLE": "trainer"},
        "CPUDIST_RENDEZVOUS": "node0:29600",
    }
    assert environment.parse(variables).apart.role == "trainer"


def test_ranks_that_init_is_given_need_no_launcher():
    opened = cpudist.init(rank=0, world_size=1, store=HashStore(), variables=SRUN)
    assert opened.trainer_count == 1
    cpudist.shutdown()
    with pytest.raises(ConfigurationError, match="srun"):
        cpudist.init(variables=SRUN)
