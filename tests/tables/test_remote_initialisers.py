# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Initialisers on weights without rows: what is recorded, and what is refused."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.tables.remote_weight import table_of

ROWS, DIM = 1_000_000_000, 16


def remote(make=lambda: nn.Embedding(ROWS, DIM)):
    with cpudist.remote_tables(min_rows=1000):
        return make()


def steps(module):
    return table_of(module.weight).program.steps


def overrides(module):
    return table_of(module.weight).program.overrides


BOUND = (6 / (ROWS + DIM)) ** 0.5
INITIALISERS = [
    (lambda w: nn.init.normal_(w, 1, 2), [("normal", 1, 2)]),
    (lambda w: nn.init.uniform_(w, -1, 2), [("uniform", -1, 2)]),
    (nn.init.xavier_uniform_, [("uniform", -BOUND, BOUND)]),
    (nn.init.xavier_normal_, [("normal", 0, BOUND / 3**0.5)]),
    (nn.init.kaiming_normal_, [("normal", 0, (2 / DIM) ** 0.5)]),
    (nn.init.kaiming_uniform_, [("uniform", -((6 / DIM) ** 0.5), (6 / DIM) ** 0.5)]),
    (nn.init.zeros_, [("fill", 0, 0)]),
    (nn.init.ones_, [("fill", 1, 0)]),
    (lambda w: nn.init.constant_(w, 3), [("fill", 3, 0)]),
    (lambda w: w.data.uniform_(-1, 1), [("uniform", -1, 1)]),
    (lambda w: w.detach().normal_(std=0.1), [("normal", 0, 0.1)]),
    (lambda w: w.data.zero_().add_(2), [("fill", 0, 0), ("add", 2, 0)]),
    (
        lambda w: w.data.uniform_().sub_(0.5).mul_(4).div_(2).clamp_(max=1),
        [
            ("uniform", 0, 1),
            ("add", -0.5, 0),
            ("mul", 4, 0),
            ("mul", 0.5, 0),
            ("clamp", -torch.finfo(torch.float32).max, 1),
        ],
    ),
]


@pytest.mark.parametrize(("initialise", "expected"), INITIALISERS)
def test_initialisers_are_recorded(initialise, expected):
    module = remote()
    with torch.no_grad():
        initialise(module.weight)
    found = steps(module)
    assert [step[0] for step in found] == [step[0] for step in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[1:] == pytest.approx(other[1:])


@contextlib.contextmanager
def default_device():
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "mode", [contextlib.nullcontext, lambda: torch.device("cpu"), default_device]
)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("initialise", "expected"),
    [
        *INITIALISERS,
        (
            nn.init.trunc_normal_,
            [(name,) for name in ("uniform", "erfinv", "mul", "add", "clamp")],
        ),
    ],
)
def test_initialisers_are_recorded_within_modes_of_torch(
    initialise, expected, inside, mode
):
    """In the context that makes the table, as constructors of models call them, too."""
    with mode(), torch.no_grad():
        if inside:
            with cpudist.remote_tables(min_rows=1000):
                module = nn.Embedding(ROWS, DIM)
                initialise(module.weight)
        else:
            module = remote()
            initialise(module.weight)
    found = [step[0] for step in steps(module)]
    assert found[: len(expected)] == [step[0] for step in expected]


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (-0.1, 0.2)])
def test_the_truncated_normal_is_recorded_by_its_inverse(bounds):
    module = remote()
    low, high = bounds
    nn.init.trunc_normal_(module.weight, mean=0.5, std=1.5, a=low, b=high)
    program = table_of(module.weight).program
    assert [s[0] for s in program.steps] == ["uniform", "erfinv", "mul", "add", "clamp"]
    values = program.rows_here(20_000, 1).flatten()
    generator = torch.Generator().manual_seed(1)
    expected = nn.init.trunc_normal_(
        torch.empty(20_000), 0.5, 1.5, low, high, generator=generator
    )
    assert values.min() >= low
    assert values.max() <= high
    found, other = values.sort().values, expected.sort().values
    assert float((found - other).abs().max()) < 0.1 * (high - low)
    assert abs(float(found.mean() - other.mean())) < 0.02 * (high - low)


def test_single_rows_take_constants():
    module = remote(lambda: nn.Embedding(ROWS, DIM, padding_idx=-1))
    assert overrides(module) == ((ROWS - 1, ROWS, 0.0),)
    with torch.no_grad():
        module.weight[0].fill_(2)
        module.weight[5:8] = 1.5
        module.weight.data[9].zero_()
        module.weight[10] = torch.full((DIM,), 4.0)
        nn.init.constant_(module.weight[11], 7)
    assert overrides(module)[1:] == (
        (0, 1, 2.0),
        (5, 8, 1.5),
        (9, 10, 0.0),
        (10, 11, 4.0),
        (11, 12, 7.0),
    )
    module.weight.data.mul_(2).add_(1)
    assert [value for _, _, value in overrides(module)] == [1, 5, 4, 1, 9, 15]
    module.weight.data.normal_()
    assert overrides(module) == ()


CROSSED = {"min": 3, "max": 1}
ROW_INDICES = [
    (0, (0, slice(None))),
    (0, (0, ...)),
    (0, [0]),
    (0, torch.tensor([0])),
    (3, (torch.tensor(3), slice(None))),
    (ROWS - 1, [-1]),
]


@pytest.mark.parametrize(("row", "index"), ROW_INDICES)
def test_a_row_may_be_named_in_many_ways(row, index):
    module = remote()
    with torch.no_grad():
        module.weight[index] = 5
    assert overrides(module) == ((row, row + 1, 5.0),)


def test_several_rows_and_all_may_be_named():
    module = remote()
    with torch.no_grad():
        module.weight[[4, 9]] = 1
        module.weight[torch.tensor([6])] = 2
        module.weight[8][:] = 3
        module.weight[10:12][...] = 4
    assert overrides(module) == (
        (4, 5, 1.0),
        (9, 10, 1.0),
        (6, 7, 2.0),
        (8, 9, 3.0),
        (10, 12, 4.0),
    )
    with torch.no_grad():
        module.weight[...] = 7
    assert overrides(module) == ((0, ROWS, 7.0),)


def test_crossed_bounds_are_the_upper_one_as_in_torch():
    module = remote()
    module.weight.data.fill_(0).clamp_(**CROSSED)
    assert float(torch.zeros(()).clamp_(**CROSSED)) == 1
    assert table_of(module.weight).program.rows_here(2, 2).unique().tolist() == [1]


IMPOSSIBLE = [
    (lambda w: w.normal_(0, -1), r"normal_ .* std >= 0, found mean=0\.0, std=-1\.0"),
    (lambda w: nn.init.normal_(w, std=-0.1), "found mean=0.0, std=-0.1"),
    (lambda w: w.normal_(float("inf")), "finite mean"),
    (lambda w: w.uniform_(1, 0), r"the lower one first, found 1\.0 and 0\.0"),
    (lambda w: nn.init.uniform_(w, 2, -2), "lower one first"),
    (lambda w: w.uniform_(-1e308, 1e308), "finite bounds"),
    (lambda w: w.fill_(float("nan")), "fill_ .* expected numbers, found NaN"),
    (lambda w: w.mul_(float("nan")), "found NaN"),
    (lambda w: w.clamp_(), "min, max or both"),
    (lambda w: nn.init.trunc_normal_(w, std=-1), r"std > 0 .* found .*std=-1\.0"),
    (lambda w: nn.init.trunc_normal_(w, a=1, b=-1), "a <= b"),
    (lambda w: w.__setitem__(3, float("nan")), "rows 3 to 3 .* begin with NaN"),
    (lambda w: w[4].fill_(2) is None or w.erfinv_(), "rows 4 to 4"),
    (
        lambda w: w.__setitem__(3, torch.ones(DIM + 1)),
        r"shape \[\d+\], expected a number",
    ),
]


@pytest.mark.filterwarnings("ignore:mean is more than 2 std")
@pytest.mark.parametrize(("initialise", "message"), IMPOSSIBLE)
def test_impossible_numbers_are_refused_at_the_call(initialise, message):
    module = remote()
    nn.init.zeros_(module.weight)
    with (
        torch.no_grad(),
        pytest.raises(cpudist.InvalidArgumentError, match=message),
    ):
        initialise(module.weight)
    assert steps(module) == (("fill", 0, 0),)


def test_seeds_come_from_torch_or_the_given_generator():
    def seed(generator=None):
        module = remote(lambda: nn.Embedding(2000, 2))
        nn.init.normal_(module.weight, generator=generator)
        return table_of(module.weight).program.seed

    torch.manual_seed(4)
    first, second = seed(), seed()
    torch.manual_seed(4)
    assert seed() == first != second
    third = seed(torch.Generator().manual_seed(9))
    assert third == seed(torch.Generator().manual_seed(9))
    assert third not in (first, second)


NO_INITIALISERS = [
    (nn.init.orthogonal_, "no initialiser"),
    (nn.init.eye_, "no initialiser"),
    (lambda w: w.copy_(torch.ones(1, DIM)), "static one and pass the model"),
    (lambda w: w.data.exponential_(), "exponential_ on table"),
    (lambda w: w[0].normal_(), "normal_ on rows of table"),
    (lambda w: w.data[3].mul_(2), r"mul_ on rows of table .weight. of 1000000000 rows"),
    (lambda w: w.data[3].clamp_(0, 1), "clamp_ on rows of table"),
    (lambda w: w.new_zeros(w.shape), "new_zeros on table"),
    (lambda w: torch.add(torch.ones(DIM), 1, out=w), "add on table"),
    (lambda w: w.__setitem__(0, torch.arange(DIM)), "no initialiser"),
    (lambda w: w.data.add_(torch.ones(DIM)), "no initialiser"),
    (lambda w: setattr(w, "data", torch.ones(3)), "no initialiser"),
    (lambda w: [w.mul_(2) for _ in range(9)], "more than 8 operations"),
    (lambda w: [w[2 * i].fill_(1) for i in range(17)], "more than 16 runs of rows"),
]


@pytest.mark.parametrize(("write", "message"), NO_INITIALISERS)
def test_other_writes_are_refused(write, message):
    module = remote()
    with torch.no_grad(), pytest.raises(cpudist.UnsupportedModelError, match=message):
        write(module.weight)
