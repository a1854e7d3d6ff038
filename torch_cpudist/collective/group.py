# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one class and the torch.distributed group that it makes
"""A group of all trainers for the collectives of one optimizer, with typed errors."""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from torch_cpudist import _core, ranges
from torch_cpudist.backends import shm
from torch_cpudist.backends.meeting import write
from torch_cpudist.errors import (
    BackendUnavailableError,
    ConfigMismatchError,
    ConfigurationError,
    Error,
    OperationTimeoutError,
    PeerLostError,
)
from torch_cpudist.launch.backend_choice import spec_for
from torch_cpudist.machine.device import CPU

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run

# A wait looks up after so long: for signals, and for trainers that will not come.
_SLICE_S = 0.5
_POLL_S = 0.005
# Their groups do not wait, when they are destroyed, for what is unfinished.
_CLOSES_AT_ONCE = ("shm", "ccl")

# Between looks at a collective of a CUDA device.
_DEVICE_POLL_S = 50e-6
# NCCL ends the process when its own time is up: ours must be up before.
_GRACE_S = 60.0


@dataclass
class Pending:
    """A collective that was started and not waited for.

    Attributes:
        work: of torch.distributed.
        number: of the collective, equal on all trainers.
        on_device: whether it is of a CUDA device; see ``_may_wait``.
    """

    work: dist.Work
    number: int
    on_device: bool


class CollectiveGroup:
    """Collectives among all trainers, in a group of their own.

    Of its own, so that what a script sends over torch.distributed's default group
    cannot come between. Every trainer makes the same calls in the same order; a world
    of one makes none. Not thread-safe.
    """

    def __init__(self, run: Run, owner: str, device: torch.device = CPU) -> None:
        """Makes the group. Collective.

        Args:
            run: this trainer's.
            owner: the strategy that needs it, for messages.
            device: what ``zeros`` is on. CPU tensors can be summed besides.

        Raises:
            BackendUnavailableError: the trainers have no torch.distributed group, or
                one of a backend that does not take tensors of ``device``.
            ConfigurationError: they are in jobs of their own, or share a CUDA device.
        """
        self.device = device
        self.rank = run.trainer_rank
        self.size = run.trainer_count
        self._owner = owner
        self._deadline_s = run.environment.round_deadline_ms / 1000
        self._run = run
        self._backend = run.backend
        self.barriers = 0  # that this trainer has come to
        self._meetings = 0
        self._group: dist.ProcessGroup | None = None
        self.pending: list[Pending] = []
        self._started = 0  # collectives, equal on all trainers at one place
        self.wait_s = 0.0  # in collectives
        self.sent_bytes = 0  # what a ring makes of what is summed and gathered
        _check_one_job(run, owner)
        if self.alone:
            return
        self._group = dist.new_group(
            backend=_group_spec(run, owner, device),
            timeout=timedelta(seconds=_group_timeout_s(self._deadline_s, device)),
        )
        self.store: Store = distributed_c10d._get_default_store()
        self.prefix = f"cpudist/{self._group.group_name}"
        if device.type != "cpu":
            try:
                _check_devices_differ(self, owner, run.layout.hosts[run.rank])
            except BaseException:
                self.close()
                raise

    @property
    def alone(self) -> bool:
        """Whether there is no other trainer."""
        return self.size == 1

    # -- collectives -------------------------------------------------------------------

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory ``[numel]`` for sums. Collective.

        Over ``shm`` all trainers of a host map it, and sums need no copy in or out.
        """
        on_device = self.device.type != "cpu"
        if on_device or self.alone or self._backend != shm.NAME or not numel:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        try:
            return shm.empty(self._group, numel, dtype)
        except RuntimeError as error:
            raise self.error_of(error) from error

    def _count(self, size_bytes: int, times: float) -> None:
        self.sent_bytes += int(size_bytes * times)

    def _start(self, begin: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
        try:
            work = begin(*tensors, group=self._group, async_op=True, **options)
        except RuntimeError as error:
            raise self.error_of(error) from error
        self.pending.append(Pending(work, self._started, not tensors[-1].is_cpu))
        self._started += 1
        return work

    def start_sum(self, tensor: torch.Tensor) -> dist.Work:
        """Begins to replace ``tensor`` by its sum over all trainers, in all the same.

        Raises:
            PeerLostError: the backend reports a lost trainer.
        """
        work: dist.Work = self._start(dist.all_reduce, tensor)
        self._count(tensor.nbytes, 2 * (self.size - 1) / self.size)
        return work

    def start_reduce(self, tensor: torch.Tensor, owner: int) -> dist.Work:
        """As ``start_sum``, for trainer ``owner`` only; the others' is used up."""
        work: dist.Work = self._start(dist.reduce, tensor, group_dst=owner)
        self._count(tensor.nbytes, (self.size - 1) / self.size)
        return work

    def start_broadcast(self, tensor: torch.Tensor, source: int = 0) -> dist.Work:
        """Begins to replace ``tensor`` by that of trainer ``source``."""
        work: dist.Work = self._start(dist.broadcast, tensor, group_src=source)
        self._count(tensor.nbytes, (self.size - 1) / self.size)
        return work

    def start_gather(
        self, found: list[torch.Tensor], tensor: torch.Tensor
    ) -> dist.Work:
        """Begins to put every trainer's ``tensor`` to ``found``, by rank."""
        work: dist.Work = self._start(dist.all_gather, found, tensor)
        self._count(tensor.nbytes, self.size - 1)
        return work

    def start_exchange(self, found: torch.Tensor, sent: torch.Tensor) -> dist.Work:
        """Begins to send ``sent[r]`` to trainer r, and to collect what they send.

        Args:
            found: ``[n, …]``, contiguous, by rank.
            sent: of the same shape.
        """
        work: dist.Work = self._start(dist.all_to_all_single, found, sent)
        self._count(sent.nbytes, (self.size - 1) / self.size)
        return work

    def wait(self, work: dist.Work, what: str) -> None:
        """Waits for a collective.

        Args:
            work: from ``start_sum``.
            what: what it is for, for messages.

        Raises:
            PeerLostError: the backend reports a lost trainer, or another trainer did.
            ConfigMismatchError: trainers called different collectives.
            OperationTimeoutError: a trainer has left, or did not get there within
                ``CPUDIST_ROUND_DEADLINE_MS``.
        """
        began = time.monotonic()
        deadline = began + self._deadline_s
        waited = next(
            (one for one in self.pending if one.work is work), Pending(work, 0, False)
        )
        with ranges.of(ranges.WAIT):
            while True:
                try:
                    if _may_wait(work, waited.on_device, _SLICE_S):
                        work.wait(timedelta(seconds=_SLICE_S))
                        break
                except RuntimeError as error:
                    if work.is_completed():
                        self._check_known(what)  # the cause, where this is its effect
                        raise self.error_of(error) from error
                self._check_others(what, waited.number)
                if time.monotonic() > deadline:
                    raise self._late(what)
        self.wait_s += time.monotonic() - began
        self.pending = [one for one in self.pending if one.work is not work]

    def sum(self, tensor: torch.Tensor, what: str) -> None:
        """``start_sum`` and ``wait``."""
        self.wait(self.start_sum(tensor), what)

    def gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Returns every trainer's ``tensor``, all of one shape, by rank."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self.wait(self.start_gather(found, tensor), what)
        return found

    def broadcast(self, tensor: torch.Tensor, what: str, source: int = 0) -> None:
        """Replaces ``tensor`` by that of trainer ``source``."""
        self.wait(self.start_broadcast(tensor, source), what)

    def agree(self, what: str, lines: Sequence[str]) -> None:
        """Checks that all trainers say the same.

        Args:
            what: what they say, for messages.
            lines: this trainer's words.

        Raises:
            ConfigMismatchError: names a line that is another one, on every trainer.
        """
        if self.alone:
            return
        own = torch.frombuffer(bytearray("\n".join(lines).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=CPU)
        sizes[self.rank] = own.numel()
        self.sum(sizes, what)
        told = torch.zeros(self.size, int(sizes.max()), dtype=torch.uint8, device=CPU)
        told[self.rank, : own.numel()] = own
        self.sum(told, what)
        texts = [
            bytes(row[:size].tolist()).decode().split("\n")
            for row, size in zip(told, sizes.tolist(), strict=True)
        ]
        for rank, text in enumerate(texts):
            if text != texts[0]:
                here, there = _first_difference(texts[0], text)
                raise ConfigMismatchError(
                    f"{self._owner}: trainers disagree about {what}: trainer 0 has "
                    f"{here}, trainer {rank} has {there}. Make them equal on all."
                )

    # -- trainers that do not come -----------------------------------------------------

    def tell_left(self, why: str) -> None:
        """Tells the others that this trainer takes no part, or with "" does again."""
        if self.alone:
            return
        # What it has started still ends; what is past a barrier is of the past.
        when = f"{self.barriers} {self._started} {why}" if why else ""
        try:
            write(self.store, self._key("left", self.rank), when)
        except RuntimeError as error:
            raise self.error_of(error) from error

    def _gone(self, number: int) -> list[str]:
        """Which trainers will never start collective ``number``, and why."""
        found = []
        for rank in range(self.size):
            told = self._told("left", rank) if rank != self.rank else ""
            barriers, _, rest = told.partition(" ")
            started, _, why = rest.partition(" ")
            if barriers == str(self.barriers) and int(started) <= number:
                found.append(f"trainer {rank} {why}")
        return found

    def meet(self, where: str) -> None:
        """Waits until all trainers are here, which is not in a collective.

        Args:
            where: in which call, for messages: those who take part in a collective that
                needs this trainer get an error.

        Raises:
            PeerLostError, OperationTimeoutError: a trainer died or does not come.
        """
        if self.alone:
            return
        self._meetings += 1
        self.tell_left(f"is in {where}")
        deadline = time.monotonic() + self._deadline_s
        here, look_up = self._key("met", self._meetings), 0.0
        count = self._add(here, 1)
        while count < self.size:
            time.sleep(_POLL_S)
            count = self._add(here, 0)
            if time.monotonic() > look_up:
                look_up = time.monotonic() + _SLICE_S
                self._check_known(where)
                self._check_failures()
            if time.monotonic() > deadline:
                raise self._late(where)
        self.tell_left("")

    def _add(self, key: str, number: int) -> int:
        try:
            return self.store.add(key, number)
        except RuntimeError as error:
            raise self.error_of(error) from error

    def _key(self, what: str, rank: int) -> str:
        return f"{self.prefix}/{what}/{rank}"

    def _told(self, what: str, rank: int) -> str:
        key = self._key(what, rank)
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _check_others(self, what: str, number: int) -> None:
        self._check_known(what)  # first: the store may be of a process that is frozen
        try:
            gone = self._gone(number)
        except RuntimeError as error:
            raise self.error_of(error) from error
        self._check_failures()
        if gone:
            raise OperationTimeoutError(
                f"{self._owner}: {gone[0]}, and {what} needs all {self.size} trainers. "
                "Let all take the same number of steps: one that runs out of data "
                "calls opt.step(samples=0), where the others pass their samples."
            )

    def _check_known(self, what: str) -> None:
        """Looks at what the links between trainers and servers know."""
        try:
            self._run.check_lost()
        except PeerLostError as error:
            raise PeerLostError(
                f"{self._owner}: a rank is lost, so that {what} cannot end: "
                f"{str(error).rstrip('.')}. Restart the run."
            ) from error

    def _check_failures(self) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            failures = [text for r in others if (text := self._told("failed", r))]
        except RuntimeError as error:
            raise self.error_of(error) from error
        if failures:
            raise PeerLostError(
                f"{self._owner}: another trainer reports: {failures[0]} Restart the "
                "run."
            )

    def _late(self, what: str) -> OperationTimeoutError:
        return OperationTimeoutError(
            f"{self._owner}: {what} did not end within {self._deadline_s:g} s: a "
            "trainer does not take part. A longer pause needs a larger "
            "CPUDIST_ROUND_DEADLINE_MS."
        )

    def error_of(self, error: BaseException) -> Error:
        """What an error of torch.distributed stands for; tells the others of a loss."""
        # What is not ours, of gloo and others, has no type that says its cause.
        cause = error if isinstance(error, Error) else _core.foreign_error(str(error))
        text = str(cause).removesuffix(" Restart the run.")  # is said below
        if isinstance(cause, OperationTimeoutError):
            return self._late("a collective")
        if isinstance(cause, ConfigMismatchError):
            return ConfigMismatchError(
                f"{self._owner}: trainers called different collectives: {text} Take "
                "the same steps with the same model on all."
            )
        if not isinstance(cause, PeerLostError):
            return type(cause)(f"{self._owner}: {text}")
        found = f"trainer {self.rank} lost its connection to another trainer: {text}"
        try:
            self.store.set(self._key("failed", self.rank), found)
        except RuntimeError:
            pass  # the store went with the process that is lost
        return PeerLostError(f"{self._owner}: {found} Restart the run.")

    def close(self) -> None:
        """Gives connections back, unless somebody is still waited for. Idempotent."""
        group, self._group = self._group, None
        if group is None or not dist.is_initialized():
            return
        finished = all(one.work.is_completed() for one in self.pending)
        at_once = self._backend in _CLOSES_AT_ONCE and self.device.type == "cpu"
        if finished or at_once:
            dist.destroy_process_group(group)
        else:
            # gloo's destructor waits for what is unfinished, until its timeout: one
            # reference more than there are keeps it from running, also at exit.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _first_difference(first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, Any]:
    for here, there in zip(first, second, strict=False):
        if here != there:
            return here, there
    return f"{len(first)} entries", f"{len(second)}"


# -- the torch.distributed group behind it ---------------------------------------------


def _check_one_job(run: Run, owner: str) -> None:
    """Refuses trainers in jobs of their own, which have no group together.

    Raises:
        ConfigurationError: says what to do.
    """
    if run.environment.apart is not None:
        raise ConfigurationError(
            f"{owner} averages over torch.distributed, whose group is that of one "
            "torchrun job, but CPUDIST_ROLE starts trainers in jobs of their own. "
            "Launch servers and trainers together, or choose a strategy of servers."
        )


def _group_spec(run: Run, owner: str, device: torch.device) -> str:
    """The backends of a group that sums tensors of ``device``, and of the CPU.

    Raises:
        BackendUnavailableError, ConfigurationError: there is none, and what to do.
    """
    if run.process_group is None:
        raise BackendUnavailableError(
            f"{owner} averages over torch.distributed, which these trainers have no "
            "group of: they are threads over an in-process network. Start each as a "
            "process, with torchrun or testing.ProcessRanks."
        )
    if device.type != "cpu":
        return spec_for(device, run.environment, run.layout)
    if run.backend == "nccl":
        raise BackendUnavailableError(
            f"{owner} averages parameters on CPUs, but CPUDIST_BACKEND=nccl only sums "
            "on CUDA devices. Set CPUDIST_BACKEND=auto, shm, ccl or gloo, or move the "
            "model to the device with model.to('cuda')."
        )
    if run.backend == "ccl" and run.environment.transport == "c10d":
        raise ConfigurationError(
            f"{owner} needs a group of its own, and oneCCL makes none while the links "
            "of CPUDIST_TRANSPORT=c10d await messages. Set CPUDIST_TRANSPORT=tcp, or "
            "another CPUDIST_BACKEND."
        )
    return run.backend


def _group_timeout_s(deadline_s: float, device: torch.device) -> float:
    """The group's own timeout, given when its waits end."""
    return deadline_s if device.type == "cpu" else deadline_s + _GRACE_S


def _check_devices_differ(group: CollectiveGroup, owner: str, host: str) -> None:
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
            f"{owner}: trainers {first} and {rank} of one host are both on CUDA device "
            f"{int(one[1])}, and NCCL needs a device for each. Move the model to "
            "torch.device('cuda', int(os.environ['LOCAL_RANK']))."
        )


def _may_wait(work: dist.Work, on_device: bool, slice_s: float) -> bool:
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
