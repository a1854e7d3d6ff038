# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of the Reduce strategy."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from torch_cpudist.settings.fields import DEFAULT_BUCKET_BYTES, MAX_BYTES, settings
from torch_cpudist.strategies.base import Strategy


@settings
class Reduce(Strategy):
    """Each trainer averages, updates and hands out a part of the parameters.

    The numbers of ``AllReduce`` with an n-th of the optimizer state on each of n
    trainers: ``sharding`` deals blocks of dense parameters to trainers, and rows of
    tables go by their number. Every trainer takes part in every step, and in
    ``state_dict()``. The optimizer runs on trainers, so any of ``torch.optim`` will do,
    for tables those that take sparse gradients; parameters of one that is not known to
    update element by element stay whole. Cost: per bucket a reduce to each trainer and
    a broadcast from each; the touched rows of tables to everybody, and back.

    Attributes:
        bucket_bytes: gradients that travel together, at most; a larger parameter
            travels alone, a model of less in two halves from 4 MiB on.
            ``CPUDIST_REDUCE_BUCKET_BYTES``.
    """

    name: ClassVar[str] = "reduce"

    bucket_bytes: int = field(
        default=DEFAULT_BUCKET_BYTES,
        metadata={"least": 1, "most": MAX_BYTES, "unit": "bytes"},
    )

    @property
    def local(self) -> bool:
        """The optimizer runs on trainers."""
        return True

    @property
    def shows_state(self) -> bool:
        """Whether the wrapped optimizer has all state: only this trainer's part."""
        return False
