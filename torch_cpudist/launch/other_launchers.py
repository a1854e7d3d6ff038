# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What launchers other than torchrun say of a process, in torchrun's words.

A pure function of a mapping. Each process of ``srun`` or ``mpirun`` would be a world of
one to who knows torchrun's variables only: what says that there are several is
understood here, or an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch_cpudist.errors import ConfigurationError

# Of these, the address and the port are often set where nothing is launched.
LAUNCHED_BY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class _Launcher:
    """Names of the variables of one launcher; those that need not be there last."""

    name: str
    size: str
    rank: str
    local_rank: str
    local_size: str = ""
    host: str = ""
    how: str = ""  # MASTER_ADDR reaches all processes


_OPEN_MPI = _Launcher(
    "mpirun",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    how="mpirun -x MASTER_ADDR=... -x MASTER_PORT=29500 ...",
)
_HYDRA = _Launcher(
    "mpirun",
    "PMI_SIZE",
    "PMI_RANK",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    how="mpirun -genv MASTER_ADDR ... -genv MASTER_PORT 29500 ...",
)
_SRUN = _Launcher(
    "srun",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    host="SLURM_NODEID",
    how="export both before srun",
)
_PMI = _Launcher(
    "a launcher with PMI", "PMI_SIZE", "PMI_RANK", "", how="export both before it"
)


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name)
    if text is None or not (text.isascii() and text.isdecimal()):
        raise ConfigurationError(
            f"{name}={text!r}: expected a whole number. Start the script with torchrun."
        )
    return int(text)


def _launcher(variables: Mapping[str, str]) -> _Launcher | None:
    """Who has started this process as one of several, if it was no torchrun.

    mpirun starts its own helpers with srun, whose variables its processes have, too.
    """
    if _OPEN_MPI.size in variables:
        return _OPEN_MPI
    if _HYDRA.size in variables and _HYDRA.local_size in variables:
        return _HYDRA
    # A batch script and a shell of salloc have the job's variables, but are no step,
    # or one of a single task.
    if "SLURM_STEP_ID" in variables and _SRUN.size in variables:
        if _number(variables, _SRUN.size) > 1:
            return _SRUN
    return _PMI if _PMI.size in variables else None


def _tasks_here(variables: Mapping[str, str]) -> int | None:
    """How many tasks of a step this host has: of ``2(x3),1`` the entry of the host."""
    counts: list[int] = []
    for entry in variables.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    host = variables.get(_SRUN.host, "")
    if not host.isdecimal() or int(host) >= len(counts):
        return None
    return counts[int(host)]


def _refuse(variables: Mapping[str, str]) -> None:
    """Raises for what says that there are others, but not where and how many."""
    if "TRAINING_ROLE" in variables and "CPUDIST_ROLE" not in variables:
        raise ConfigurationError(
            f"TRAINING_ROLE={variables['TRAINING_ROLE']!r} is Paddle's (its launcher "
            "and PaddleJob of Kubeflow set it), and says nothing here: this process "
            "would be a world of one. Start the script with torchrun and "
            "--role=server or --role=trainer, or as a PyTorchJob (docs/launch.md); or "
            "unset TRAINING_ROLE for a single process."
        )
    text = variables.get("PET_NNODES", "1").strip()
    if text.rpartition(":")[2] not in ("", "1"):
        raise ConfigurationError(
            f"PET_NNODES={text!r} (a TrainJob or PyTorchJob of Kubeflow sets it) is "
            "for torchrun, which did not start this process: it would be a world of "
            "one. Let the container's command be torchrun train.py; or unset "
            "PET_NNODES for a single process."
        )


def as_torchrun(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Adds torchrun's variables where another launcher has started several processes.

    Args:
        variables: ``os.environ`` or the like.

    Returns:
        The same where torchrun's are there, or the process is alone.

    Raises:
        ConfigurationError: there are several, and what is needed to meet is missing.
    """
    if any(name in variables for name in LAUNCHED_BY):
        return variables
    found = _launcher(variables)
    if found is None:
        _refuse(variables)
        return variables
    count = _number(variables, found.size)
    if count == 1:
        return variables
    missing = [name for name in _MEETING if not variables.get(name, "").strip()]
    if missing:
        raise ConfigurationError(
            f"{found.size}={count}: {found.name} has started {count} processes, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. "
            "Set MASTER_ADDR to the host of rank 0, by a name or address that all "
            f"hosts reach, and MASTER_PORT to a free port there ({found.how}); or "
            f"unset {found.size} where each process is to train alone."
        )
    said = {"WORLD_SIZE": count, "RANK": _number(variables, found.rank)}
    if found.local_rank in variables:
        local = None
        if found.local_size in variables:
            local = _number(variables, found.local_size)
        elif found is _SRUN:
            local = _tasks_here(variables)
        said["LOCAL_RANK"] = _number(variables, found.local_rank)
        if local is not None:
            said["LOCAL_WORLD_SIZE"] = local
    if found.host in variables:
        said["GROUP_RANK"] = _number(variables, found.host)
    return {**variables, **{name: str(value) for name, value in said.items()}}
