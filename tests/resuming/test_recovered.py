# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What was lost with servers counts once, however often they were lost."""

from __future__ import annotations

from torch_cpudist.resuming.recovered import Moments, Recovered


def counts(recovered):
    found = recovered.stats()
    return found["count"], found["lost_updates"], found["lost_s"]


def test_nothing_was_lost():
    assert counts(Recovered()) == (0, 0, 0.0)


def test_updates_behind_a_snapshot_and_the_step_that_it_is_in():
    one = Recovered()
    assert one.add((10, 2.0), (14, 5.0)) == (4, 3.0)
    one.drop(15)
    assert counts(one) == (1, 5, 3.0)


def test_a_newer_snapshot_adds_what_is_behind_it():
    one = Recovered()
    one.add((10, 2.0), (14, 5.0))
    one.drop(15)
    assert one.add((20, 8.0), (22, 9.0)) == (2, 1.0)
    one.drop(23)
    assert counts(one) == (2, 8, 4.0)


def test_the_same_snapshot_again_counts_what_both_lost_once():
    one = Recovered()
    one.add((10, 2.0), (14, 5.0))
    one.drop(15)
    assert one.add((10, 2.0), (20, 9.0)) == (5, 7.0)
    assert counts(one) == (2, 10, 7.0)


def test_a_snapshot_between_two_lost_parts():
    one = Recovered()
    one.add((10, 2.0), (14, 5.0))
    one.add((12, 4.0), (20, 9.0))
    assert counts(one) == (2, 10, 7.0)


def test_a_snapshot_that_is_ahead_of_a_trainer_has_lost_it_nothing():
    one = Recovered()
    assert one.add((10, 6.0), (7, 5.0)) == (0, 0.0)
    assert counts(one) == (1, 0, 0.0)


def test_when_a_cut_was_marked():
    moments = Moments()
    for number in range(1, 1000):
        moments.note(number, number / 2)
    assert moments.get(999, 0.0) == 499.5
    assert moments.get(1, 7.0) == 7.0
