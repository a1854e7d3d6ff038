# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Other processes of this machine: which one is meant, and whether it has ended."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path
from types import TracebackType

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SPACE = "/proc/self/ns/pid"
_STARTED = 19  # the field of /proc/PID/stat, counted from behind the name


def _started(pid: int) -> int:
    """When a process was started, in ticks; -1 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[_STARTED])
    return -1


def _space() -> str:
    """Equal for processes that know each other by the same numbers."""
    return f"{_BOOT_ID.read_text().strip()}/{os.readlink(_SPACE)}"


def own() -> str:
    """A text that means this process, and none that has its number later.

    Returns:
        Nothing where the system does not tell: ``Process`` then knows nothing of it.
    """
    pid = os.getpid()
    try:
        return f"{_space()}/{pid}/{_started(pid)}"
    except OSError:
        return ""


class Process:
    """A process that ``own`` has named, in this one or in another of this machine.

    Holds one file descriptor until ``close``, which the end of a ``with`` calls.
    Thread safety: one thread at a time.
    """

    def __init__(self, named: str) -> None:
        """Looks for it.

        Args:
            named: what ``own`` has said there. Of another machine, of this process
                itself, or of no form: nothing is known of it, and it never ends.
        """
        self._descriptor = -1
        self._gone = False
        space, _, numbers = named.rpartition("/")
        space, _, number = space.rpartition("/")
        try:
            pid, started = int(number), int(numbers)
            if not space or space != _space() or pid <= 0 or pid == os.getpid():
                return
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone = True
        except (AttributeError, OSError, OverflowError, ValueError):
            return  # no form, or a Python, kernel or sandbox without these descriptors
        else:
            # The number may be another's by now.
            found = _started(pid)
            self._gone = min(found, started) >= 0 and found != started

    @property
    def known(self) -> bool:
        """Whether its end would be seen."""
        return self._gone or self._descriptor >= 0

    def has_ended(self, wait_s: float = 0.0) -> bool:
        """Whether it has ended, also if nobody has waited for it.

        Args:
            wait_s: how long to wait for its end, in seconds.
        """
        if self._gone or self._descriptor < 0:
            return self._gone
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        self._gone = bool(poll.poll(wait_s * 1000))
        return self._gone

    def __enter__(self) -> Process:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives the descriptor back."""
        self.close()

    def close(self) -> None:
        """Gives the descriptor back. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
