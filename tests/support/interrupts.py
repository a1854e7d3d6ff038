# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Signals to this process that come while a call waits, and never after it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from patience import PATIENCE_S

LOOK_S = 0.005
STILL_S = 0.05  # between two looks at a thread that seems to wait


@contextlib.contextmanager
def interrupted(
    ready: Callable[[], bool], number: signal.Signals = signal.SIGINT
) -> Iterator[None]:
    """Sends the signal once ``ready()`` holds, but not once the block has ended.

    To be entered inside ``pytest.raises``: wherever in the block the signal comes, it
    ends there.
    """
    over = threading.Event()
    sending = threading.Lock()

    def send() -> None:
        while not over.is_set():
            if ready():
                with sending:
                    if not over.is_set():
                        os.kill(os.getpid(), number)
                return
            over.wait(LOOK_S)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with sending:
            over.set()
        thread.join(PATIENCE_S)


def waiting_in_a_call() -> Callable[[], bool]:
    """Whether the thread that asks for this is in one call of compiled code for long.

    It has not left one instruction of Python between two looks.
    """
    thread = threading.get_ident()
    last: tuple[object, int] | None = None

    def ready() -> bool:
        nonlocal last
        threading.Event().wait(STILL_S)
        frame = sys._current_frames()[thread]
        before, last = last, (frame, frame.f_lasti)
        return before == last

    return ready
