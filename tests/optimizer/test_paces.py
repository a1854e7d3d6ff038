# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How long a cut waits for others, by the steps of who asks for it."""

from __future__ import annotations

from torch_cpudist.optimizer.paces import StepTimes


def _after(*took_s: float) -> int:
    times = StepTimes(least_ms=10_000, most_ms=600_000)
    now_s = 50.0
    times.begin(now_s)
    for one in took_s:
        now_s += one
        times.begin(now_s)
    return times.wait_ms()


def test_others_get_several_of_the_longest_steps() -> None:
    assert _after() == 10_000  # nothing is known
    assert _after(0.01, 0.02) == 10_000
    assert _after(0.5, 8.0, 0.5) == 40_000
    assert _after(400.0) == 600_000  # nobody waits longer


def test_what_was_slow_long_ago_is_forgotten() -> None:
    assert _after(30.0, *[0.1] * 31) == 150_000
    assert _after(30.0, *[0.1] * 32) == 10_000


def test_waiting_for_marks_does_not_make_the_next_wait_longer() -> None:
    times = StepTimes(least_ms=10_000, most_ms=600_000)
    times.begin(0.0)
    times.begin(3.0)
    times.begin(15.0, counts=False)  # as long as the others were given
    assert times.wait_ms() == 15_000
    times.begin(19.0)
    assert times.wait_ms() == 20_000
