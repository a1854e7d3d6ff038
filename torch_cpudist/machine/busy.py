# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How long threads of this process have had a core, and waited for one.

Both together are what a thread wanted to do, whoever else wants the cores: of a thread
that has enough to do they are all of its time, also on a busy machine.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_TASKS = "proc/self/task"


@dataclass(frozen=True)
class Busy:
    """Of one thread since it began, or of several.

    Attributes:
        ran_s: seconds on a core.
        queued_s: seconds in which it could have run, and others had the cores.
    """

    ran_s: float
    queued_s: float

    @property
    def wanted_s(self) -> float:
        """Seconds in which it had something to do."""
        return self.ran_s + self.queued_s


def of_thread(number: int, root: Path = _ROOT) -> Busy | None:
    """Of one thread, by its native id; ``None`` if it has ended.

    Also where the kernel does not count this (built without CONFIG_SCHED_INFO).

    Args:
        number: its id.
        root: the folder that has ``proc``.
    """
    try:
        words = (root / _TASKS / str(number) / "schedstat").read_text().split()
        return Busy(int(words[0]) / 1e9, int(words[1]) / 1e9)
    except (OSError, ValueError, IndexError):
        return None


def of_threads(root: Path = _ROOT) -> dict[int, Busy]:
    """Of all threads that there are now, by id; empty where nothing is counted.

    Cost: some 20 us a thread.

    Args:
        root: the folder that has ``proc``.
    """
    found = {}
    with contextlib.suppress(OSError):
        for folder in (root / _TASKS).iterdir():
            busy = of_thread(int(folder.name), root)
            if busy is not None:
                found[int(folder.name)] = busy
    return found
