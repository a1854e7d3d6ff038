# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What Geo's exchanges do to every number, against the same algebra in plain Python."""

from __future__ import annotations

import pytest
from geo_play import play_all


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("trainers", "servers"), [(2, 1), (2, 0), (2, 3), (4, 2)])
def test_every_number_is_that_of_the_algebra(trainers, servers, seed):
    play_all(seed, trainers, servers)


@pytest.mark.parametrize("step", [None, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_of_three_trainers_up_to_rounding(seed, step):
    play_all(seed, 3, 2, 1e-3, step)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("trainers", "servers"), [(2, 0), (2, 3), (4, 2)])
def test_every_number_is_that_of_the_algebra_of_means(trainers, servers, seed):
    play_all(seed, trainers, servers, step=1.0)


@pytest.mark.parametrize("step", ["root", 2.0])
@pytest.mark.parametrize(
    ("trainers", "servers"), [(1, 0), (1, 2), (2, 1), (2, 3), (3, 1), (3, 3), (4, 2)]
)
def test_outer_steps_are_those_of_the_algebra(trainers, servers, step):
    """Twice the mean of two is their sum, the root of four twice their mean."""
    exact = trainers in (1, 4) or (step, trainers) == (2.0, 2)
    for seed in range(2):
        play_all(seed, trainers, servers, 0.0 if exact else 1e-3, step)


@pytest.mark.parametrize("cap", [10**6, 1000, 0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("trainers", "servers"), [(2, 1), (2, 0), (2, 3), (4, 2)])
def test_every_number_of_remote_tables_with_a_cap(trainers, servers, seed, cap):
    retired = play_all(seed, trainers, servers, cap=cap)
    assert (retired > 0) == (cap <= 1000)


@pytest.mark.parametrize("cap", [1000, 0])
@pytest.mark.parametrize("step", [None, 1.0, "root", 2.0])
def test_remote_tables_with_a_cap_of_three_trainers_up_to_rounding(step, cap):
    for seed in range(2):
        assert play_all(seed, 3, 2, 1e-3, step, cap=cap) > 0


@pytest.mark.parametrize("cap", [1000, 0])
@pytest.mark.parametrize(("trainers", "servers"), [(2, 0), (2, 3), (4, 2)])
def test_remote_tables_with_a_cap_whose_movement_is_averaged(trainers, servers, cap):
    for seed in range(2):
        assert play_all(seed, trainers, servers, step=1.0, cap=cap) > 0
