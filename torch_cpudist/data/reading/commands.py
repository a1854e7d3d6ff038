# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Commands whose whole output is needed before any of it can be read."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import IO

from torch_cpudist.errors import ClosedError, DataFileError

_DEADLINE_S = 3600.0
_POLL_S = 0.02
_SAID_BYTES = 2048


def run_command(
    command: str, path: str, output: IO[bytes], unwanted: threading.Event
) -> None:
    """Runs a shell command with a file as standard input, to its end.

    Args:
        command: for the shell.
        path: of the file.
        output: gets what the command writes, and is at its beginning afterwards.
        unwanted: once it is set, the command and what it started are killed.

    Raises:
        DataFileError: it ended with another status than 0, or takes over an hour.
        ClosedError: it was not wanted any more.
    """
    with Path(path).open("rb") as source, tempfile.TemporaryFile() as errors:
        # A session of its own is a group of processes that can be killed together.
        process = subprocess.Popen(  # noqa: S602 - a shell command by contract
            command,
            shell=True,
            stdin=source,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = _status(process, unwanted)
        finally:
            if process.returncode is None:  # else its number may be another's by now
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status != 0:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _SAID_BYTES))
            said = errors.read().decode(errors="replace").strip()
            ended = "takes over an hour" if status is None else f"ended with {status}"
            raise DataFileError(f"pipe_command {command!r} of {path} {ended}: {said}")
    output.seek(0)


def _status(process: subprocess.Popen[bytes], unwanted: threading.Event) -> int | None:
    """What it ended with; ``None``: it did not in time."""
    for _ in range(int(_DEADLINE_S / _POLL_S)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
        if unwanted.is_set():
            raise ClosedError("the command is not wanted any more")
    return None
