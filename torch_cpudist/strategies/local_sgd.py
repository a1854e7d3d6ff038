# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of the LocalSGD strategy."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from torch_cpudist.settings.fields import settings
from torch_cpudist.settings.outer import Outer
from torch_cpudist.settings.updates import Trainers, Updates
from torch_cpudist.strategies.base import Strategy


@settings
class LocalSGD(Strategy):
    """Trainers step by themselves and average their parameters every so many steps.

    For dense models; for tables see ``Hybrid``. Between two averages trainers differ.
    Every trainer takes the same number of steps. The optimizer runs on the trainer, so
    any of ``torch.optim`` will do; its state stays there. Source: Stich, "Local SGD
    Converges Fast and Communicates Little", ICLR 2019 (arXiv:1805.09767).

    Attributes:
        every: steps from one average to the next. ``CPUDIST_LOCALSGD_EVERY``.
        warmup_steps: steps at the start after each of which parameters are averaged,
            without ``outer``. ``CPUDIST_LOCALSGD_WARMUP_STEPS``.
        outer: an optimizer over the mean of the trainers' movements, one step per
            ``every`` steps; a dict is accepted. ``None`` takes the mean of the
            parameters, and so do ``leave()``, ``barrier()`` and ``shutdown()`` between
            two outer steps: the next one is over the whole interval.
    """

    name: ClassVar[str] = "local_sgd"

    every: int = field(
        default=8, metadata={"least": 1, "most": 2**31 - 1, "unit": "steps"}
    )
    warmup_steps: int = field(
        default=0, metadata={"least": 0, "most": 2**31 - 1, "unit": "steps"}
    )
    outer: Outer | None = field(default=None, metadata={"section": Outer})

    @property
    def local(self) -> bool:
        """The optimizer runs on the trainer."""
        return True

    def updates(self, trainers: Trainers) -> Updates:
        """As of every strategy; servers hold nothing.

        Raises:
            ConfigurationError: fields of ``outer`` do not fit together.
        """
        if self.outer is not None:
            self.outer.check_whole()
        return Updates()
