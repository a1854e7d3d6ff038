# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which backend of torch.distributed the trainers use: ``CPUDIST_BACKEND``.

A backend that is named is used or refused, within a second and before any rank waits
for another where that can be known; only ``auto`` looks for one that works.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from torch_cpudist.backends import ccl, shm
from torch_cpudist.backends.loading import load_c10d
from torch_cpudist.errors import BackendUnavailableError
from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Layout
from torch_cpudist.log import logger


@dataclass(frozen=True)
class Choice:
    """The backend of a run.

    Attributes:
        name: ``gloo``, ``shm``, ``ccl``, ``nccl`` or ``mpi``.
        spec: of the default group, as torch.distributed takes it.
        why: in words, for the log.
    """

    name: str
    spec: str
    why: str


def _check_shm() -> None:
    load_c10d(shm.NAME)


def shm_loads() -> bool:
    """Whether ``shm`` can be used on this host."""
    try:
        _check_shm()
    except BackendUnavailableError as error:
        logger.info("backend shm cannot be used: %s", error)
        return False
    return True


def _check_nccl() -> None:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        lacks = "CUDA device" if dist.is_nccl_available() else "NCCL in this torch"
        raise BackendUnavailableError(
            f"CPUDIST_BACKEND=nccl: there is no {lacks}. It needs a CUDA device per "
            "rank and a torch that is built for CUDA; for CPUs set "
            "CPUDIST_BACKEND=auto, shm, ccl or gloo."
        )


def _check_mpi() -> None:
    if not dist.is_mpi_available():
        raise BackendUnavailableError(
            "CPUDIST_BACKEND=mpi: this torch is built without MPI, as all packages of "
            "it are. Build torch from source where an MPI is installed, or set "
            "CPUDIST_BACKEND=auto, shm, ccl or gloo."
        )


CHECKS = {"shm": _check_shm, "ccl": ccl.check, "nccl": _check_nccl, "mpi": _check_mpi}


def check(name: str) -> None:
    """Checks what this process alone can know of a named backend.

    Raises:
        BackendUnavailableError: says what to install or to set.
    """
    if name in CHECKS:
        CHECKS[name]()


def check_early(environment: Environment) -> None:
    """``check``, unless this rank may be a server, which needs no backend."""
    apart = environment.apart
    serves = environment.role_name == "server" or environment.servers
    if not serves and (apart is None or apart.role == "trainer"):
        check(environment.backend)


def _devices_suffice(layout: Layout, rank: int) -> bool:
    """Whether there is a CUDA device for every trainer of this host."""
    here = layout.hosts[rank]
    ranks = sum(layout.hosts[trainer] == here for trainer in layout.trainers)
    return torch.cuda.device_count() >= ranks


def _automatic(layout: Layout, rank: int) -> Choice:
    if not layout.shm:
        name, why = "gloo", "shm does not load on every rank"
    else:
        name, why = "shm", "it loads on every rank"
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if cuda and _devices_suffice(layout, rank):
        return Choice(name, f"cpu:{name},cuda:nccl", f"{why}; nccl for CUDA tensors")
    return Choice(name, name, why)


def spec_for(device: torch.device, environment: Environment, layout: Layout) -> str:
    """The backends of a group that sums tensors of the CPU and of a CUDA device.

    Args:
        device: what gradients are on.
        environment: of this rank.
        layout: of the run.

    Returns:
        As torch.distributed takes it.

    Raises:
        BackendUnavailableError: the run's backend does not sum on ``device``.
    """
    chosen = choose(environment, layout)
    if f"{device.type}:nccl" in chosen.spec:
        return chosen.spec
    if environment.backend == "auto":
        raise BackendUnavailableError(
            f"gradients on {device} are summed by nccl, which needs a torch with NCCL "
            "and a CUDA device for every trainer of a host; this host has "
            f"{torch.cuda.device_count()}. Start one trainer per device, move the "
            "model with model.cpu(), or train dense parameters by servers: Sync()."
        )
    raise BackendUnavailableError(
        f"CPUDIST_BACKEND={environment.backend} sums on CPUs, but the model's "
        f"parameters are on {device}. Set CPUDIST_BACKEND=auto or nccl, or move the "
        "model with model.cpu()."
    )


def choose(environment: Environment, layout: Layout) -> Choice:
    """The backend of the trainers, equal on all of them.

    Raises:
        BackendUnavailableError: a named one that cannot be used here.
    """
    asked, rank = environment.backend, environment.rank
    if asked == "auto":
        return _automatic(layout, rank)
    check(asked)
    if asked == "nccl":
        if not _devices_suffice(layout, rank):
            raise BackendUnavailableError(
                f"CPUDIST_BACKEND=nccl: {torch.cuda.device_count()} CUDA devices, but "
                "more trainers on this host. Start one trainer per device."
            )
        return Choice(asked, "cpu:gloo,cuda:nccl", "CPUDIST_BACKEND")
    return Choice(asked, asked, "CPUDIST_BACKEND")
