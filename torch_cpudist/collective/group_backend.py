# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which backends the group of a collective strategy has, and what NCCL needs of it."""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from torch_cpudist.errors import BackendUnavailableError, ConfigurationError
from torch_cpudist.launch.backend_choice import spec_for
from torch_cpudist.model.staging import CPU

if TYPE_CHECKING:
    from torch_cpudist.collective.group import CollectiveGroup
    from torch_cpudist.launch.context import Context

# Between looks at a collective of a CUDA device.
_DEVICE_POLL_S = 50e-6
# NCCL ends the process when its own time is up: ours must be up before.
_GRACE_S = 60.0


def check_one_job(context: Context, owner: str) -> None:
    """Refuses trainers in jobs of their own, which have no group together.

    Raises:
        ConfigurationError: says what to do.
    """
    if context.environment.group is not None:
        raise ConfigurationError(
            f"{owner} averages over torch.distributed, whose group is that of one "
            "torchrun job, but CPUDIST_ROLE starts trainers in jobs of their own. "
            "Launch servers and trainers together, or choose a strategy of servers."
        )


def group_spec(context: Context, owner: str, device: torch.device) -> str:
    """The backends of a group that sums tensors of ``device``, and of the CPU.

    Raises:
        BackendUnavailableError, ConfigurationError: there is none, and what to do.
    """
    if context.process_group is None:
        raise BackendUnavailableError(
            f"{owner} averages over torch.distributed, which these trainers have "
            "no group of: they are threads over an in-process network. Start each "
            "as a process, with torchrun or testing.ProcessRanks."
        )
    if device.type != "cpu":
        return spec_for(device, context.environment, context.layout)
    if context.backend == "nccl":
        raise BackendUnavailableError(
            f"{owner} averages parameters on CPUs, but CPUDIST_BACKEND=nccl only "
            "sums on CUDA devices. Set CPUDIST_BACKEND=auto, shm, ccl or gloo, or "
            "move the model to the device with model.to('cuda')."
        )
    if context.backend == "ccl" and context.environment.transport == "c10d":
        raise ConfigurationError(
            f"{owner} needs a group of its own, and oneCCL makes none while the "
            "links of CPUDIST_TRANSPORT=c10d await messages. Set "
            "CPUDIST_TRANSPORT=tcp, or another CPUDIST_BACKEND."
        )
    return context.backend


def group_timeout_s(deadline_s: float, device: torch.device) -> float:
    """The group's own timeout, given when its waits end."""
    return deadline_s if device.type == "cpu" else deadline_s + _GRACE_S


def check_devices_differ(group: CollectiveGroup, owner: str, host: str) -> None:
    """Refuses a device that two trainers share, with which NCCL would fail. Collective.

    Raises:
        ConfigurationError: on every trainer, if any two share one.
    """
    index = group.device.index or 0
    own = torch.tensor([zlib.crc32(host.encode()), index], device=CPU)
    told = [one.tolist() for one in group.gather(own, "comparing devices")]
    for rank, one in enumerate(told):
        first = told.index(one)
        if first == rank:
            continue
        raise ConfigurationError(
            f"{owner}: trainers {first} and {rank} of one host are both on CUDA "
            f"device {int(one[1])}, and NCCL needs a device for each. Move the model "
            "to torch.device('cuda', int(os.environ['LOCAL_RANK']))."
        )


def may_wait(work: dist.Work, on_device: bool, slice_s: float) -> bool:
    """Whether waiting for a collective, at most ``slice_s``, harms nothing.

    NCCL gives a group up when a wait is over before its collective. So one of a device
    is looked at for that long, and waited for when it has ended, which raises what it
    failed with and puts the current stream behind it.
    """
    end = time.monotonic() + slice_s
    while on_device and not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(_DEVICE_POLL_S)
    return True
