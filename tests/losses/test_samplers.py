# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samplers draw with the probabilities that they say."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from torch_cpudist import losses
from torch_cpudist.errors import InvalidArgumentError

# Tensors this small only wait for torch's other threads.
torch.set_num_threads(1)

NOBODY = torch.zeros(0, dtype=torch.int64)
COUNTS = [50.0, 0.0, 20.0, 10.0, 3.0, 1.0]
Make = Callable[[int], losses.Sampler]
SAMPLERS: dict[str, Make] = {
    "log_uniform": lambda seed: losses.LogUniformSampler(50, seed=seed),
    "unigram": lambda seed: losses.UnigramSampler(COUNTS, seed=seed),
}


@pytest.fixture(params=SAMPLERS)
def make(request: pytest.FixtureRequest) -> Make:
    return SAMPLERS[request.param]


def test_probabilities_are_those_of_the_definition() -> None:
    classes = torch.arange(50)
    found = losses.LogUniformSampler(50, seed=1).log_probability(classes).exp()
    assert found.sum().item() == pytest.approx(1, rel=1e-12)
    assert found[0].item() == pytest.approx(math.log(2) / math.log(51), rel=1e-12)
    assert found[49].item() == pytest.approx(math.log(51 / 50) / math.log(51))
    parts = [count**0.75 for count in COUNTS]
    sampler = losses.UnigramSampler(COUNTS, seed=1)
    found = sampler.log_probability(torch.arange(len(COUNTS))).exp()
    assert found.tolist() == pytest.approx([part / sum(parts) for part in parts])
    even = losses.UnigramSampler(COUNTS, 0.0, seed=1)
    expected = [0.2 * (count > 0) for count in COUNTS]
    found = even.log_probability(torch.arange(len(COUNTS))).exp()
    assert found.tolist() == pytest.approx(expected)
    # A class of a count that is lost in the sum of the others.
    steep = losses.UnigramSampler([1e30, 1.0], 1.0, seed=1)
    found = steep.log_probability(torch.tensor([1])).item()
    assert found == pytest.approx(-30 * math.log(10))


def test_draws_follow_the_probabilities(make: Make) -> None:
    sampler, count = make(1), 200_000
    chances = sampler.log_probability(torch.arange(sampler.classes)).exp()
    drawn = sampler.draw(count, NOBODY, unique=False)
    found = torch.bincount(drawn.ids, minlength=sampler.classes) / count
    # Five standard deviations of each share.
    assert ((found - chances).abs() <= 5 * (chances / count).sqrt()).all()
    torch.testing.assert_close(drawn.log_counts, (chances[drawn.ids] * count).log())


@pytest.mark.parametrize(
    "sampler",
    [
        losses.LogUniformSampler(50, seed=2),
        losses.UnigramSampler(1 / torch.arange(1, 51), seed=2),
    ],
    ids=lambda one: type(one).__name__,
)
def test_different_draws_are_expected_as_often_as_they_come(
    sampler: losses.Sampler,
) -> None:
    count, times = 3, 3000
    classes = torch.arange(sampler.classes)
    came = torch.zeros(sampler.classes)
    expected = torch.zeros(sampler.classes, dtype=torch.float64)
    for _ in range(times):
        drawn = sampler.draw(count, classes)
        assert len(drawn.ids.unique()) == count
        came[drawn.ids] += 1
        expected += drawn.target_log_counts.exp()
        of_targets = drawn.target_log_counts[drawn.ids]
        torch.testing.assert_close(drawn.log_counts, of_targets)
    # The definition takes the draws as if their number had been chosen before.
    found = (came - expected).abs() / times
    assert found.max() < 0.04
    assert came.max() > 0.3 * times


def test_the_expectation_is_that_of_the_draws_that_were_made() -> None:
    sampler = losses.UnigramSampler([1.0, 1.0], 1.0, seed=1)
    found = {
        round(sampler.draw(2, NOBODY).log_counts.exp()[0].item(), 9) for _ in range(200)
    }
    # Both have come after two draws, or three, or four …
    assert {0.75, 0.875, 0.9375} <= found
    assert found <= {round(1 - 0.5**n, 9) for n in range(2, 30)}


def test_one_seed_is_one_sequence_and_it_goes_on_from_its_state(make: Make) -> None:
    first, second, other = make(3), make(3), make(4)
    ids = [first.draw(4, NOBODY, unique=False).ids for _ in range(6)]
    again = [second.draw(4, NOBODY, unique=False).ids for _ in range(3)]
    assert all(torch.equal(one, two) for one, two in zip(ids, again, strict=False))
    else_ids = [other.draw(4, NOBODY, unique=False).ids for _ in range(6)]
    assert not all(torch.equal(o, t) for o, t in zip(ids, else_ids, strict=True))
    other.load_state_dict(second.state_dict())
    for expected in ids[3:]:
        assert torch.equal(other.draw(4, NOBODY, unique=False).ids, expected)
    with pytest.raises(InvalidArgumentError, match="expected a state with 'generator'"):
        other.load_state_dict({"place": 3})


def test_without_a_seed_it_is_drawn_from_torch() -> None:
    def ids() -> torch.Tensor:
        return losses.LogUniformSampler(10**6).draw(20, NOBODY).ids

    torch.manual_seed(1)
    first, second = ids(), ids()
    torch.manual_seed(1)
    assert torch.equal(ids(), first)
    assert not torch.equal(first, second)


def test_a_single_class_is_certain() -> None:
    drawn = losses.LogUniformSampler(1, seed=1).draw(1, torch.tensor([0]))
    assert drawn.ids.tolist() == [0]
    assert drawn.log_counts.tolist() == drawn.target_log_counts.tolist() == [0.0]


def test_what_cannot_be_drawn_is_refused() -> None:
    sampler = losses.UnigramSampler(COUNTS, seed=1)
    with pytest.raises(InvalidArgumentError, match="class 1 is a target, and its prob"):
        sampler.draw(2, torch.tensor([0, 1]))
    with pytest.raises(InvalidArgumentError, match="from 0 to below 6, got -1 to 6"):
        sampler.draw(2, torch.tensor([6, -1]))
    with pytest.raises(InvalidArgumentError, match=r"count must .* of 1 to 6, got 7"):
        sampler.draw(7, NOBODY)
    with pytest.raises(InvalidArgumentError, match=r"6 different .* found 5 in \d+"):
        sampler.draw(6, NOBODY)
    with pytest.raises(InvalidArgumentError, match="classes must be a whole number"):
        losses.LogUniformSampler(0)
    with pytest.raises(InvalidArgumentError, match="seed must be a whole number"):
        losses.LogUniformSampler(5, seed=-1)
    with pytest.raises(InvalidArgumentError, match="power must be at least 0"):
        losses.UnigramSampler(COUNTS, -0.5)
    for counts in ([0.0, 0.0], [1.0, -1.0], [math.nan, 1.0], [[1.0]]):
        with pytest.raises(InvalidArgumentError, match="counts of one dimension"):
            losses.UnigramSampler(counts)
