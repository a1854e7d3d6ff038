# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How long a cut waits for others, by the steps of who asks for it."""

from __future__ import annotations

from types import SimpleNamespace

from torch_cpudist.resuming.paces import Often, StepTimes, Waits, paces_of


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


def test_a_trainer_waits_for_steps_and_for_no_evaluation() -> None:
    times = StepTimes(least_ms=10_000, most_ms=600_000)
    assert times.hold_ms(100) == 100  # nothing is known
    now_s = 0.0
    for took_s in (0.3, 0.3, 0.3, 50.0, 0.3):
        times.begin(now_s)
        now_s += took_s
    times.begin(now_s)
    assert times.hold_ms(100) == 600
    assert times.hold_ms(1000) == 1000


def test_marks_that_keep_nobody_wait_long() -> None:
    def waits(**known: bool) -> Waits:
        names = ("together", "takes_back", "waits_at_once", "keeps_nobody")
        found = {**dict.fromkeys(names, False), **known}
        return Waits(SimpleNamespace(**found), 10_000, 1_800_000)

    queued = waits(takes_back=True)
    assert (queued.hold_ms(False), queued.wait_ms(False)) == (100, 900_000)
    # The script waits itself: nothing is taken back, and it is told in time.
    assert (queued.hold_ms(True), queued.wait_ms(True)) == (0, 10_000)
    rounds = waits(takes_back=True, waits_at_once=True)
    for now_s in range(4):
        rounds.steps.begin(float(now_s))
    assert rounds.hold_ms(False) == 2000
    together = waits(together=True)
    assert (together.hold_ms(False), together.wait_ms(False)) == (0, 60_000)
    assert together.wait_ms(True) == 1_620_000
    # Of outer steps: nobody's next step waits for it, and all call what saves at once.
    apart = waits(keeps_nobody=True)
    assert (apart.hold_ms(False), apart.wait_ms(False)) == (0, 900_000)
    assert (apart.hold_ms(True), apart.wait_ms(True)) == (0, 1_620_000)


def test_who_was_away_at_the_step_that_was_named_waits_for_the_next() -> None:
    """Where trainers train on while one has left, the others were there without it."""

    def hits(on_servers: bool, goes_on_alone: bool) -> list[bool]:
        saving = SimpleNamespace(
            together=True, on_servers=on_servers, goes_on_alone=goes_on_alone
        )
        words = {"key/pace/0": 100, "key/pace/1": 260}
        run = SimpleNamespace(
            rendezvous=SimpleNamespace(shown=words.get),
            environment=SimpleNamespace(apart=None),
            trainer_count=2,
            trainer_rank=1,
        )
        pace, _ = paces_of(Often(every_s=1e-9), run, saving, "key")
        return [pace.due(count, ready=True) for count in (250, 259, 260)]

    assert hits(on_servers=True, goes_on_alone=True) == [False, False, True]
    assert hits(on_servers=False, goes_on_alone=True) == [False, False, True]
    # Of a collective nobody is away: later is the same step of all.
    assert hits(on_servers=False, goes_on_alone=False) == [True, False, True]
