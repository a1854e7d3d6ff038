# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Averages dense gradients over all trainers, while backward still computes others.

Every trainer sends the same collectives in the same order. *Eager*: buckets are sent
from hooks as backward fills them, the rest at the step, then a header; if the header
says that what some trainer sent was not its gradient, all buckets again. *Late*: the
header, then all buckets, at the step. All trainers go from eager to late at the same
step, because the header tells it to all.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torch_cpudist.copied_parameters import CopiedParameters, describe_options
from torch_cpudist.errors import ConfigMismatchError
from torch_cpudist.flat_buckets import Bucket, plan
from torch_cpudist.log import logger
from torch_cpudist.row_exchange import Rows

_WHAT = "averaging gradients"
# Numbers in front of a header, then what ``_presence`` says.
_BY_SAMPLES, _WEIGHT, _AGAIN, _DIGEST = 0, 1, 2, 3
_DIGEST_PARTS = 2
_HEADER = _DIGEST + 2 * _DIGEST_PARTS
# Their squares, summed over thousands of trainers, are exact in float64.
_DIGEST_BITS = 20

Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Averaged:
    """What all trainers know of a step after it was averaged.

    Attributes:
        dense: indices of the dense parameters for which some trainer had a gradient.
        tables: the same of tables.
        counts: by table, how many rows each trainer has.
        total: the weights of all trainers.
    """

    dense: list[int]
    tables: list[int]
    counts: list[list[int]]
    total: float


@dataclass(frozen=True)
class _Sent:
    """A gradient as it was when it was copied into its bucket."""

    grad: torch.Tensor
    version: int

    def is_still(self, grad: torch.Tensor | None) -> bool:
        return self.grad is grad and self.version == self.grad._version


class GradientExchange:
    """Averages gradients of ``CopiedParameters``. Not thread-safe."""

    def __init__(self, parameters: CopiedParameters, bucket_bytes: int) -> None:
        """Watches the parameters' gradients, if there are other trainers."""
        self._parameters = parameters
        self._group = parameters.group
        self._entries = parameters.placement.dense
        self._table_count = len(parameters.placement.tables)
        self.buckets = plan(self._entries, bucket_bytes)
        self._place = {
            entry.index: (b, i)
            for b, bucket in enumerate(self.buckets)
            for i, entry in enumerate(bucket.entries)
        }
        self.late = False
        self.repeated = 0
        self._silent = 0
        self._options: list[str] = []
        self._digest: list[int] = []
        self._steps = 0  # that have ended
        self._begin()
        if not self._group.alone:
            for entry in self._entries:
                hook = functools.partial(self._ready, entry.index)
                watch = entry.parameter.register_post_accumulate_grad_hook
                parameters.hooks.append(watch(hook))  # type: ignore[no-untyped-call]

    def _begin(self) -> None:
        self._sent: dict[int, _Sent] = {}
        self._missing = [len(bucket.entries) for bucket in self.buckets]
        self._works: list[dist.Work] = []
        self._again = False

    @contextmanager
    def silent(self) -> Iterator[None]:
        """While it is entered, backward sends nothing: for all passes but the last."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    # -- during backward ---------------------------------------------------------------

    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        """Copies a gradient, and sends its bucket if it is the last one of it."""
        grad = parameter.grad
        if self.late or self._silent or grad is None:
            return
        if index in self._sent:
            self._again = True
            return
        entry = self._entries[index]
        if grad.layout != torch.strided or grad.dtype != entry.dtype:
            return  # the step refuses it
        b, i = self._place[index]
        self.buckets[b].view(i).copy_(grad)
        self._sent[index] = _Sent(grad, grad._version)
        self._missing[b] -= 1
        while (
            len(self._works) < len(self.buckets) and not self._missing[len(self._works)]
        ):
            self._send_next()

    def _send_next(self) -> None:
        bucket = self.buckets[len(self._works)]
        self._works.append(self._group.start_sum(bucket.flat))

    # -- at the step -------------------------------------------------------------------

    @torch.no_grad()
    def average(
        self, grads: Gradients, rows: Sequence[Rows | None], samples: int | None
    ) -> Averaged | None:
        """Averages dense gradients over all trainers, into the buckets.

        Args:
            grads: by index of the parameter, this trainer's; ``None`` where it has
                none, which counts as zero.
            rows: by index of the table, this trainer's; others are told their number.
            samples: its weight; ``None`` weighs all trainers equally.

        Returns:
            What the others have; ``None`` if the weights sum to zero.

        Raises:
            ConfigMismatchError: trainers disagree about options, or only some pass
                samples; on every trainer.
            PeerLostError, OperationTimeoutError: a trainer died or does not come.
        """
        try:
            averaged = self._average(grads, rows, samples)
            self._steps += 1
            return averaged
        finally:
            self._begin()

    def averaged(self, present: Sequence[int]) -> list[torch.Tensor | None]:
        """By index of the parameter, its averaged gradient, a view of its bucket."""
        found: list[torch.Tensor | None] = [None] * len(self._entries)
        for index in present:
            b, i = self._place[index]
            found[index] = self.buckets[b].view(i)
        return found

    def _average(
        self, grads: Gradients, rows: Sequence[Rows | None], samples: int | None
    ) -> Averaged | None:
        weight = 1 if samples is None else samples
        if self._group.alone:
            for bucket in self.buckets:
                self._fill(bucket, grads, 1)
            numbers = self._presence(grads, rows)
            return self._averaged(numbers, weight) if weight else None
        eager = not self.late
        if eager:
            self._send_rest(grads)
        presence = self._presence(grads, rows)
        header = self._exchange_header(presence, samples)
        for work in self._works:
            self._group.wait(work, _WHAT)
        if not eager or header[_AGAIN] or header[_BY_SAMPLES]:
            self.repeated += eager
            self._be_late(bool(header[_BY_SAMPLES]))
            self._works = []
            for bucket in self.buckets:
                self._fill(bucket, grads, weight)
                self._send_next()
            for work in self._works:
                self._group.wait(work, _WHAT)
        total = header[_WEIGHT]
        if not total:
            return None
        for bucket in self.buckets:
            bucket.flat.mul_(1.0 / total)
        return self._averaged(header[_HEADER:], total)

    def _presence(self, grads: Gradients, rows: Sequence[Rows | None]) -> list[float]:
        """What has a gradient, and how many rows of each table this trainer has."""
        numbers = [float(grad is not None) for grad in grads]
        numbers += [float(one is not None) for one in rows]
        for one in rows:
            counts = [0.0] * self._group.size
            counts[self._group.rank] = 0.0 if one is None else float(len(one[0]))
            numbers += counts
        return numbers

    def _averaged(self, numbers: Sequence[float], total: float) -> Averaged:
        """Reads the sum of all trainers' ``_presence``."""
        d, t, n = len(self._entries), self._table_count, self._group.size
        return Averaged(
            dense=[i for i, count in enumerate(numbers[:d]) if count],
            tables=[i for i, count in enumerate(numbers[d : d + t]) if count],
            counts=[
                [int(count) for count in numbers[begin : begin + n]]
                for begin in range(d + t, d + t + t * n, n)
            ],
            total=total,
        )

    def _send_rest(self, grads: Gradients) -> None:
        """Sends the buckets that backward has not filled, and looks for late changes.

        A gradient that was clipped or added to after it was copied is sent again.
        """
        self._again |= any(
            not sent.is_still(self._entries[index].parameter.grad)
            for index, sent in self._sent.items()
        )
        while len(self._works) < len(self.buckets):
            self._fill(self.buckets[len(self._works)], grads, 1)
            self._send_next()

    def _fill(self, bucket: Bucket, grads: Gradients, weight: int) -> None:
        for i, entry in enumerate(bucket.entries):
            grad = grads[entry.index]
            if grad is None or not weight:
                bucket.view(i).zero_()
            else:
                bucket.view(i).copy_(grad)
        if weight > 1:
            bucket.flat.mul_(weight)

    def _be_late(self, by_samples: bool) -> None:
        if not self.late:
            logger.info(
                "gradients are averaged at the step from now on, not during backward: "
                "%s",
                "they are weighed by samples, which only the step tells"
                if by_samples
                else "they changed after backward; for several passes use opt.no_sync()"
                " in all but the last",
            )
        self.late = True

    # -- what trainers tell each other beside gradients --------------------------------

    def _exchange_header(
        self, presence: list[float], samples: int | None
    ) -> list[float]:
        numbers = [
            float(samples is not None),
            float(1 if samples is None else samples),
            float(self._again),
        ]
        for part in self._options_digest():
            numbers += (float(part), float(part * part))
        numbers += presence
        header = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._group.sum(header, _WHAT)
        sums: list[float] = header.tolist()
        n = self._group.size
        for i in range(_DIGEST, _HEADER, 2):
            # Equal in all trainers iff the variance is 0.
            if n * int(sums[i + 1]) != int(sums[i]) ** 2:
                # A step that was interrupted here may have ended on the others.
                steps = f"after {self._steps} steps"
                self._group.agree("the step", [steps, *self._options])
        if 0 < sums[_BY_SAMPLES] < n:
            raise ConfigMismatchError(
                f"step: {sums[_BY_SAMPLES]:.0f} of {n} trainers passed samples=. Pass "
                "it on all trainers or on none."
            )
        return sums

    def _options_digest(self) -> list[int]:
        options = describe_options(self._parameters.inners)
        if options != self._options:
            self._options = options
            digest = hashlib.blake2b("\n".join(options).encode()).digest()
            number = int.from_bytes(digest[:8], "little")
            mask = (1 << _DIGEST_BITS) - 1
            self._digest = [
                number >> (part * _DIGEST_BITS) & mask for part in range(_DIGEST_PARTS)
            ]
        # Trainers that have taken other numbers of steps differ here, too.
        return [part + self._steps % (1 << _DIGEST_BITS) for part in self._digest]
