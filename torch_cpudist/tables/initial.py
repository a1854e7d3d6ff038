# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How rows that exist nowhere yet begin: a short program that servers run by key.

The value of a row is a function of a seed, the table's name and the key alone, so that
no trainer ever makes or sends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_cpudist.errors import InvalidArgumentError, UnsupportedModelError

# What a server takes of one table.
MOST_STEPS = 8
MOST_OVERRIDES = 16

#: An operation and its two numbers.
Step = tuple[str, float, float]
#: Rows begin to end (exclusive; 0: 2^64) are one value; keys are unsigned here.
Override = tuple[int, int, float]

_FIRST = ("normal", "uniform", "fill")
_RANDOM = ("normal", "uniform")


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """Draws a seed, as an initialiser of torch would draw its first value."""
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(
        generator=generator
    )
    return int(drawn)


_BITS = 2**64 - 1


def salt_of(name: str) -> int:
    """What the name of a table adds to its seed; ``table_salt`` in csrc/kernels."""
    mixed = 0xCBF29CE484222325
    # A copy can be made of what no server takes.
    for letter in name.encode(errors="surrogatepass"):
        mixed = (mixed ^ letter) * 0x100000001B3 & _BITS
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> shift) * factor & _BITS
    return mixed ^ mixed >> 31


def _check_finite(what: str, **values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InvalidArgumentError(
                f"{what}: {name} must be a finite number, got {value!r}"
            )


def _check_step(step: Step) -> None:
    """Refuses what no server takes, where it is asked for and not at wrapping."""
    name, a, b = step
    finite = math.isfinite(a) and math.isfinite(b)
    wrong = ""
    if name == "normal" and not (finite and b >= 0):
        wrong = f"a finite mean and a finite std >= 0, found mean={a}, std={b}"
    elif name == "uniform" and not (finite and a <= b and math.isfinite(b - a)):
        wrong = f"finite bounds, the lower one first, found {a} and {b}"
    elif math.isnan(a) or math.isnan(b):
        wrong = "numbers, found NaN"
    if wrong:
        raise InvalidArgumentError(
            f"{name}_ on the weight of a remote table: expected {wrong}. Nothing was "
            "recorded."
        )


def _check_constant(begin: int, end: int, value: float) -> None:
    if math.isnan(value):
        raise InvalidArgumentError(
            f"rows {begin} to {end - 1} of a remote table would begin with NaN: "
            "expected a number. Nothing was recorded."
        )


@dataclass(frozen=True)
class Normal:
    """Rows of a remote table begin normally distributed.

    Attributes:
        mean: of every element.
        std: the standard deviation, at least 0.

    Raises:
        InvalidArgumentError: a number is out of range.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_finite("Normal", mean=self.mean, std=self.std)
        if self.std < 0:
            raise InvalidArgumentError(f"Normal: std must be >= 0, got {self.std}")

    @property
    def step(self) -> Step:
        """What servers are told."""
        return ("normal", float(self.mean), float(self.std))


@dataclass(frozen=True)
class Uniform:
    """Rows of a remote table begin uniformly distributed.

    Attributes:
        low, high: between which every element is.

    Raises:
        InvalidArgumentError: a number is out of range.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_finite("Uniform", low=self.low, high=self.high)
        if self.low > self.high:
            raise InvalidArgumentError(
                f"Uniform: low must be <= high, got {self.low} and {self.high}"
            )

    @property
    def step(self) -> Step:
        """What servers are told."""
        return ("uniform", float(self.low), float(self.high))


@dataclass(frozen=True)
class Constant:
    """Rows of a remote table begin with one value.

    Attributes:
        value: of every element.

    Raises:
        InvalidArgumentError: it is no finite number.
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        """Checks the number."""
        _check_finite("Constant", value=self.value)

    @property
    def step(self) -> Step:
        """What servers are told."""
        return ("fill", float(self.value), 0.0)


#: What ``shard_tables(initial=)`` takes.
Initial = Normal | Uniform | Constant


def _of_elements(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def apply(value: float) -> float:
        return float(function(torch.tensor(value, dtype=torch.float64, device="cpu")))

    return apply


def _applied(step: Step, value: float) -> float:
    """What an operation makes of one value."""
    name, a, b = step
    if name == "mul":
        return value * a
    if name == "add":
        return value + a
    if name == "clamp":
        return min(max(value, a), b)
    inverse: Callable[[float], float] = _of_elements(torch.erfinv)
    return inverse(value)


@dataclass(frozen=True)
class Program:
    """Operations in their order, then rows that are constants. Immutable.

    Attributes:
        steps: one of normal, uniform or fill first; none at all is zeros.
        overrides: rows that are of one value, whatever the steps say.
        seed: of what is random in it.
    """

    steps: tuple[Step, ...] = ()
    overrides: tuple[Override, ...] = ()
    seed: int = field(default=0, compare=False)

    def then(self, step: Step, generator: torch.Generator | None = None) -> Program:
        """This program with one operation more, over all rows.

        Args:
            step: normal, uniform and fill replace all that was.
            generator: what a random one draws its seed from; torch's by default.

        Raises:
            InvalidArgumentError: its numbers are impossible, as those of ``normal_(0,
                -1)``, or rows of one value would be NaN.
            UnsupportedModelError: there would be too many.
        """
        _check_step(step)
        if step[0] in _FIRST:
            seed = drawn_seed(generator) if step[0] in _RANDOM else self.seed
            return Program((step,), (), seed)
        if len(self.steps) >= MOST_STEPS:
            raise UnsupportedModelError(
                f"the initialiser of a remote table has more than {MOST_STEPS} "
                "operations, which is what servers take. Make it shorter, or replace "
                "it: cpudist.shard_tables(model, remote=[...], initial=...)."
            )
        begun = self.steps or (("fill", 0.0, 0.0),)
        overrides = [(b, e, _applied(step, value)) for b, e, value in self.overrides]
        for begin, end, value in overrides:
            _check_constant(begin, end, value)
        return replace(self, steps=(*begun, step), overrides=tuple(overrides))

    def with_rows(self, begin: int, end: int, value: float) -> Program:
        """This program with some rows of one value.

        Raises:
            InvalidArgumentError: the value is NaN.
            UnsupportedModelError: there would be too many such runs of rows.
        """
        if begin >= end:
            return self
        return self._with_run(begin, end, value)

    def with_key(self, key: int, value: float) -> Program:
        """This program with one key, any of int64, of one value.

        Raises:
            As ``with_rows``.
        """
        # Servers take keys as unsigned ones, and 0 for what comes behind the last.
        return self._with_run(key & _BITS, (key + 1) & _BITS, value)

    def _with_run(self, begin: int, end: int, value: float) -> Program:
        last = end or 2**64
        _check_constant(begin, last, value)
        kept = [
            one
            for one in self.overrides
            if not begin <= one[0] < (one[1] or 2**64) <= last
        ]
        if len(kept) == MOST_OVERRIDES:
            raise UnsupportedModelError(
                f"more than {MOST_OVERRIDES} runs of rows of a remote table are filled "
                "by themselves. Servers take the padding row and the like; make the "
                "others in a static table, which shard_tables(model, remote=[...]) "
                "then stores."
            )
        return replace(self, overrides=(*kept, (begin, end, float(value))))

    def rows_here(self, rows: int, dim: int) -> torch.Tensor:
        """A whole table of this distribution, in memory: for one that stays here.

        Args:
            rows: of the table.
            dim: elements of a row.

        Returns:
            float32; other values than a server makes, drawn by torch.
        """
        made = torch.zeros((rows, dim), dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(self.seed)
        for name, a, b in self.steps:
            match name:
                case "normal":
                    made.normal_(a, b, generator=generator)
                case "uniform":
                    made.uniform_(a, b, generator=generator)
                case "fill":
                    made.fill_(a)
                case "mul":
                    made.mul_(a)
                case "add":
                    made.add_(a)
                case "clamp":
                    made.clamp_(a, b)
                case "erfinv":
                    made.erfinv_()
        for begin, end, value in self.overrides:
            made[begin:end] = value
        return made


def truncated_normal(mean: float, std: float, low: float, high: float) -> list[Step]:
    """The steps of ``nn.init.trunc_normal_``, by the inverse of the distribution.

    Raises:
        InvalidArgumentError: there is no such distribution.
    """
    finite = all(map(math.isfinite, (mean, std, low, high)))
    if not (finite and std > 0 and low <= high):
        raise InvalidArgumentError(
            "trunc_normal_ on the weight of a remote table: expected finite numbers, "
            f"std > 0 and a <= b, found mean={mean}, std={std}, a={low}, b={high}. "
            "Nothing was recorded."
        )

    def share_below(x: float) -> float:
        return (1.0 + math.erf((x - mean) / (std * math.sqrt(2.0)))) / 2.0

    bounds = 2 * share_below(low) - 1, 2 * share_below(high) - 1
    return [
        ("uniform", *bounds),
        ("erfinv", 0.0, 0.0),
        ("mul", std * math.sqrt(2.0), 0.0),
        ("add", mean, 0.0),
        ("clamp", low, high),
    ]
