# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Commands whose whole output is needed before any of it can be read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from torch_cpudist import _core
from torch_cpudist.log import logger


class Unwanted:
    """Says once, for good, that nothing more is wanted. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said = False
        self._ends: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        """Whether it was said."""
        return self._said

    def set(self) -> None:
        """Says it, and ends what is under way."""
        with self._lock:
            self._said = True
            ends = list(self._ends)
        for end in ends:
            end()

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Has ``end`` called, at once or when it is said, until the block is left."""
        with self._lock:
            self._ends.append(end)
            said = self._said
        try:
            if said:
                end()
            yield
        finally:
            with self._lock:
                self._ends.remove(end)


def run_command(
    command: str,
    path: str,
    output: IO[bytes],
    unwanted: Unwanted,
    timeout_s: float,
) -> None:
    """Runs a shell command with a file as standard input, to its end.

    Args:
        command: for the shell.
        path: of the file.
        output: gets what the command writes, and is at its beginning afterwards.
        unwanted: once it is said, the command and what it started are killed.
        timeout_s: how long the command may neither write nor end.

    Raises:
        DataFileError: it ended with another status than 0, or took too long.
        ClosedError: it was not wanted any more.
    """
    running = _core.DataCommand(command, path, timeout_s=timeout_s)
    with unwanted.ending(running.stop):
        running.run(output.fileno(), logger.warning)
    output.seek(0, os.SEEK_SET)
