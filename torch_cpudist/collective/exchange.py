# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Averages dense gradients over all trainers, while backward still computes others.

Every trainer sends the same collectives in the same order. *Eager*: buckets are sent
from hooks as backward fills them, the rest at the step, and with the last a header; if
the header says that what some trainer sent was not its gradient, all buckets again.
*Late*: all buckets and the header at the step. All trainers go from eager to late at
the same step, because the header tells it to all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torch_cpudist.collective.buckets import Bucket
from torch_cpudist.collective.carriers import Carrier
from torch_cpudist.collective.copied import CopiedParameters
from torch_cpudist.collective.group import CollectiveGroup
from torch_cpudist.collective.header import Header, HeaderForm, digest
from torch_cpudist.collective.rows import Rows
from torch_cpudist.errors import ConfigMismatchError
from torch_cpudist.log import logger

_WHAT = "averaging gradients"

Gradients = Sequence[torch.Tensor | None]
MakeCarrier = Callable[[CollectiveGroup, Sequence[Bucket]], Carrier]


@dataclass(frozen=True)
class _Sent:
    """A gradient as it was when it was copied into its bucket."""

    grad: torch.Tensor
    version: int

    def is_still(self, grad: torch.Tensor | None) -> bool:
        return self.grad is grad and self.version == self.grad._version


class GradientExchange:
    """Averages gradients of ``CopiedParameters``. Not thread-safe.

    Attributes:
        buckets: of all dense parameters.
        carrier: sums them; ``None`` in a world of one.
        late: gradients are sent at the step, not during backward.
        repeated: steps that averaged twice.
    """

    def __init__(
        self,
        parameters: CopiedParameters,
        buckets: list[Bucket],
        make_carrier: MakeCarrier,
    ) -> None:
        """Watches the parameters' gradients, if there are other trainers.

        Args:
            parameters: whose placement names what is averaged.
            buckets: of all dense parameters.
            make_carrier: of what sums them; not called in a world of one.
        """
        self._parameters = parameters
        self._group = parameters.group
        self._entries = parameters.placement.dense
        self.buckets = buckets
        self._places: dict[int, list[tuple[int, int]]] = {}
        for b, bucket in enumerate(buckets):
            for i, piece in enumerate(bucket.pieces):
                self._places.setdefault(piece.entry.index, []).append((b, i))
        # On a device, streams are in order at the step, which hooks cannot know.
        self.late = self._group.device.type != "cpu"
        self.repeated = 0
        self._silent = 0
        self._options: list[str] = []
        self._number = 0
        self._steps = 0  # that have ended
        self._form = HeaderForm(
            len(self._entries),
            len(parameters.placement.tables),
            self._group.size,
            self._group.rank,
        )
        self.carrier: Carrier | None = None
        if not self._group.alone:
            self.carrier = carrier = make_carrier(self._group, buckets)
            if carrier.carries_header and buckets:
                buckets[-1].make_room(self._form.size)
                for bucket in buckets:
                    bucket.allocate(self._group.zeros)
            for entry in self._entries:
                hook = functools.partial(self._ready, entry.index)
                watch = entry.parameter.register_post_accumulate_grad_hook
                parameters.hooks.append(watch(hook))  # type: ignore[no-untyped-call]
        # How many buckets may be sent before the header is known.
        rides = any(bucket.room for bucket in buckets)
        self._early = len(buckets) - rides
        self._begin()

    def _begin(self) -> None:
        self._sent: dict[int, _Sent] = {}
        self._missing = [
            len({piece.entry.index for piece in bucket.pieces})
            for bucket in self.buckets
        ]
        self._started = 0
        self._again = False
        if self.carrier is not None:
            self.carrier.forget()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """While it is entered, backward sends nothing: for all passes but the last."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    # -- during backward ---------------------------------------------------------------

    @torch.no_grad()  # backward(create_graph=True) computes gradients of gradients
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
        self._put(index, grad)
        self._sent[index] = _Sent(grad, grad._version)
        b, _ = self._places[index][0]
        self._missing[b] -= 1
        while self._started < self._early and not self._missing[self._started]:
            self._start_next()

    def _put(self, index: int, grad: torch.Tensor | None) -> None:
        """Copies a gradient, zeros for none, to its places in the bucket."""
        for b, i in self._places[index]:
            bucket = self.buckets[b]
            if grad is None:
                bucket.view(i).zero_()
            else:
                bucket.view(i).copy_(bucket.pieces[i].of(grad))

    def _start_next(self) -> None:
        if self.carrier is not None:
            self.carrier.start(self._started)
        self._started += 1

    # -- at the step -------------------------------------------------------------------

    @torch.no_grad()
    def average(
        self, grads: Gradients, rows: Sequence[Rows | None], samples: int | None
    ) -> Header | None:
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

    def pieces(self, present: Sequence[int]) -> Iterator[tuple[Bucket, int]]:
        """Bucket and number of every piece of some parameters."""
        for index in present:
            for b, i in self._places[index]:
                yield self.buckets[b], i

    def _average(
        self, grads: Gradients, rows: Sequence[Rows | None], samples: int | None
    ) -> Header | None:
        self._again |= any(
            not sent.is_still(self._entries[index].parameter.grad)
            for index, sent in self._sent.items()
        )
        told = self._form.tell(
            samples=samples,
            again=self._again,
            number=self._digest(),
            dense=grads,
            rows=rows,
        )
        weight = 1 if samples is None else samples
        if self.carrier is None:
            for index, grad in enumerate(grads):
                self._put(index, grad)
            return self._form.read(told) if weight else None
        header = self._exchange(self.carrier, grads, told, weight)
        if not header.weight:
            return None
        self.carrier.take()
        for bucket in self.buckets:
            bucket.flat.mul_(1.0 / header.weight)
        return header

    def _exchange(
        self, carrier: Carrier, grads: Gradients, told: list[float], weight: int
    ) -> Header:
        """Sums gradients and headers, perhaps twice."""
        eager = not self.late
        apart = self._send_rest(grads, told, 1 if eager else weight)
        carrier.finish()
        if apart is None:
            sums = self.buckets[-1].behind
        else:
            work, sums = apart
            self._group.wait(work, _WHAT)
        header = self._form.read(sums.tolist())
        self._check(header)
        if eager and (header.again or header.by_samples):
            self.repeated += 1
            self._be_late(bool(header.by_samples))
            self._refill(grads, weight)
            for b in range(len(self.buckets)):
                carrier.start(b)
            carrier.finish()
        return header

    def _send_rest(
        self, grads: Gradients, told: list[float], weight: int
    ) -> tuple[dist.Work, torch.Tensor] | None:
        """Sends the buckets that backward has not sent, and the header.

        Returns:
            The header's own collective, if it does not travel with the last bucket.
        """
        rides = self._early < len(self.buckets)
        if rides:
            last = self.buckets[-1]
            values = torch.tensor(told, dtype=last.dtype, device="cpu")
            last.behind.copy_(values)
        first = self._started
        self._refill(grads, weight, first)
        for _ in range(first, len(self.buckets)):
            self._start_next()
        if rides:
            return None
        # Last: how many buckets backward has sent is another number on each trainer.
        header = torch.tensor(told, dtype=torch.float32, device="cpu")
        return self._group.start_sum(header), header

    def _refill(self, grads: Gradients, weight: int, first: int = 0) -> None:
        """Fills buckets from ``first`` on with the gradients that are not there."""
        for index, grad in enumerate(grads):
            b, _ = self._places[index][0]
            if b >= first and (self.late or index not in self._sent):
                self._put(index, grad if weight else None)
        if weight > 1:
            for bucket in self.buckets[first:]:
                bucket.flat.mul_(weight)

    def _be_late(self, by_samples: bool) -> None:
        logger.info(
            "gradients are averaged at the step from now on, not during backward: %s",
            "they are weighed by samples, which only the step tells"
            if by_samples
            else "they changed after backward; for several passes use opt.no_sync() in "
            "all but the last",
        )
        self.late = True

    # -- what trainers tell each other beside gradients --------------------------------

    def _check(self, header: Header) -> None:
        n = self._group.size
        if not header.agreed:
            # A step that was interrupted here may have ended on the others.
            steps = f"after {self._steps} steps"
            self._group.agree("the step", [steps, *self._options])
        if 0 < header.by_samples < n:
            raise ConfigMismatchError(
                f"step: {header.by_samples} of {n} trainers passed samples=. Pass it "
                "on all trainers or on none."
            )

    def _digest(self) -> int:
        """A number of the optimizers' options and of how many steps were taken."""
        options = self._parameters.options.lines()
        if options is not self._options:
            self._options = options
            self._number = digest(options)
        return self._number + self._steps
