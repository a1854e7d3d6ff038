# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Seconds that threads have run and waited for a core."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S

from torch_cpudist.machine import busy


def test_a_thread_that_works_is_busy_and_one_that_sleeps_is_not() -> None:
    idle = threading.Event()
    asleep = threading.Thread(target=idle.wait, args=(PATIENCE_S,))
    asleep.start()
    try:
        own, other = threading.get_native_id(), asleep.native_id
        assert other is not None
        before = busy.of_threads()
        if not before:
            pytest.skip("this kernel does not count (CONFIG_SCHED_INFO)")
        began = time.thread_time()
        while time.thread_time() - began < 0.1:
            pass
        after = busy.of_threads()
    finally:
        idle.set()
        asleep.join(PATIENCE_S)
    worked = after[own].wanted_s - before[own].wanted_s
    assert worked >= 0.05
    assert after[other].wanted_s - before[other].wanted_s < worked / 2
    assert after[own].wanted_s == after[own].ran_s + after[own].queued_s
    assert busy.of_thread(other) is None


def test_files_of_the_kernel_are_read(tmp_path: Path) -> None:
    assert busy.of_threads(tmp_path) == {}
    for number, text in ((7, "2000000000 500000000 3\n"), (8, ""), (9, "a b c")):
        folder = tmp_path / "proc/self/task" / str(number)
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(text)
    assert busy.of_threads(tmp_path) == {7: busy.Busy(2.0, 0.5)}
