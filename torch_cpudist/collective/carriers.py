# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How a bucket of gradients is summed over all trainers: whole, or as bfloat16."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torch_cpudist.collective.buckets import Bucket
from torch_cpudist.collective.group import CollectiveGroup

_WHAT = "averaging gradients"


class Carrier(ABC):
    """Sums buckets over the trainers of a group of several. Not thread-safe.

    Every trainer starts the same buckets in the same order.
    """

    # Whether numbers in the last bucket's ``room`` are summed with it.
    carries_header: bool = False

    def __init__(self, group: CollectiveGroup, buckets: Sequence[Bucket]) -> None:
        """Carries ``buckets`` over ``group``."""
        self._group = group
        self._buckets = list(buckets)
        self._works: list[tuple[int, dist.Work]] = []

    @abstractmethod
    def start(self, b: int) -> None:
        """Begins to sum bucket ``b``, which is filled and left alone until then."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for all that was started; ``flat`` then holds sums, equal on all.

        Raises:
            PeerLostError, OperationTimeoutError: see ``CollectiveGroup.wait``.
        """

    def take(self) -> None:  # noqa: B027 - most keep nothing from step to step
        """What was summed last is used; else it is as if it had not been sent."""

    def forget(self) -> None:
        """A step begins: what is under way belongs to another one."""
        self._works = []


class _Direct(Carrier):
    """Gradients travel as they are."""

    def finish(self) -> None:
        """Waits; see ``Carrier``."""
        for _, work in self._works:
            self._group.wait(work, _WHAT)
        self._works = []


class SumCarrier(_Direct):
    """One all-reduce per bucket."""

    carries_header = True

    def start(self, b: int) -> None:
        """Begins the all-reduce."""
        self._works.append((b, self._group.start_sum(self._buckets[b].storage)))


class OwnerCarrier(_Direct):
    """A reduce per bucket and owner: only the owner of pieces has their sum."""

    def start(self, b: int) -> None:
        """Begins a reduce to each owner."""
        bucket = self._buckets[b]
        for owner, begin, end in bucket.segments():
            part = bucket.flat[begin:end]
            self._works.append((b, self._group.start_reduce(part, owner)))


class _Rounded:
    """One bucket's bfloat16 memory and what rounding has kept back so far.

    Attributes:
        sent: what this trainer sends, ``[n, share]``: one share to each trainer.
        received: all trainers' parts of this one's share, ``[n, share]``.
        share: of the sum, that this trainer hands on, ``[share]``.
        all_shares: by trainer, ``[n, share]``.
        kept, kept_next: of what it sent, as the bucket's dtype, ``[size]``.
        owed, owed_next: of the sums that it handed on, ``[share]``.
    """

    def __init__(self, bucket: Bucket, n: int) -> None:
        length, device = -(-bucket.size // n), bucket.device
        self.sent = torch.zeros(n, length, dtype=torch.bfloat16, device=device)
        self.received = torch.zeros_like(self.sent)
        self.share = torch.zeros(length, dtype=torch.bfloat16, device=device)
        self.all_shares = torch.zeros_like(self.sent)
        self.kept = torch.zeros(bucket.size, dtype=bucket.dtype, device=device)
        self.kept_next = torch.zeros_like(self.kept)
        self.owed = torch.zeros(length, dtype=bucket.dtype, device=device)
        self.owed_next = torch.zeros_like(self.owed)

    def round_own(self, bucket: Bucket) -> None:
        """Rounds a filled bucket, after adding what was kept back before."""
        flat, target = bucket.flat, self.sent.view(-1)[: bucket.size]
        flat.add_(self.kept)
        target.copy_(flat)
        torch.sub(flat, target, out=self.kept_next)

    def round_sum(self) -> None:
        """Sums this trainer's share in the order of ranks, and rounds that."""
        total = self.owed_next.copy_(self.owed)
        for part in self.received:
            total.add_(part)
        self.share.copy_(total)
        total.sub_(self.share)

    def take(self) -> None:
        """What was rounded last is used."""
        self.kept, self.kept_next = self.kept_next, self.kept
        self.owed, self.owed_next = self.owed_next, self.owed
        # A gradient that is infinite or no number leaves nothing to make up for.
        for left in (self.kept, self.owed):
            left.nan_to_num_(0.0, 0.0, 0.0)


class RoundedCarrier(Carrier):
    """Sums as bfloat16 with error feedback, on both ways.

    Each trainer sends every other one a share of its rounded gradients, which sums them
    in full precision and sends the rounded sum to all. What rounding takes away is
    added before rounding the next time, by the trainer that rounded. Source: Tang et
    al., "DoubleSqueeze", ICML 2019 (arXiv:1905.05957), with rounding as compression.
    """

    def __init__(self, group: CollectiveGroup, buckets: Sequence[Bucket]) -> None:
        """See ``Carrier``."""
        super().__init__(group, buckets)
        self.rounded = [_Rounded(bucket, group.size) for bucket in buckets]

    def start(self, b: int) -> None:
        """Rounds, and begins to send shares."""
        one = self.rounded[b]
        one.round_own(self._buckets[b])
        work = self._group.start_exchange(one.received, one.sent)
        self._works.append((b, work))

    def finish(self) -> None:
        """Sums and sends the own shares; see ``Carrier``."""
        works, self._works = self._works, []
        shared = []
        for b, work in works:
            self._group.wait(work, _WHAT)
            one = self.rounded[b]
            one.round_sum()
            gathered = self._group.start_gather(list(one.all_shares), one.share)
            shared.append((b, gathered))
        for b, work in shared:
            self._group.wait(work, _WHAT)
            bucket = self._buckets[b]
            bucket.flat.copy_(self.rounded[b].all_shares.view(-1)[: bucket.size])

    def take(self) -> None:
        """Keeps what rounding took away."""
        for one in self.rounded:
            one.take()
