# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of the AllReduce strategy."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from torch_cpudist.settings.fields import DEFAULT_BUCKET_BYTES, MAX_BYTES, settings
from torch_cpudist.strategies.base import Strategy


@settings
class AllReduce(Strategy):
    """Trainers average their gradients among themselves, and each steps by itself.

    For dense models and small tables; for large ones see ``Hybrid``. Equals
    ``DistributedDataParallel``, and one process on the joined batch. Every trainer
    takes part in every step. The optimizer runs on the trainer, so any of
    ``torch.optim`` will do, for tables those that take sparse gradients. Cost: one
    all-reduce per bucket and a small one; the touched rows of tables to everybody.

    Attributes:
        bucket_bytes: gradients that travel together, at most; a larger parameter
            travels alone, a model of less in two halves from 4 MiB on.
            ``CPUDIST_ALLREDUCE_BUCKET_BYTES``.
        compression: ``"bf16"`` sends gradients of dense parameters rounded to bfloat16,
            half the bytes; what rounding takes away is added to the next step's.
            ``"none"`` sends them as they are. ``CPUDIST_ALLREDUCE_COMPRESSION``.
    """

    name: ClassVar[str] = "allreduce"
    takes_devices: ClassVar[bool] = True

    bucket_bytes: int = field(
        default=DEFAULT_BUCKET_BYTES,
        metadata={"least": 1, "most": MAX_BYTES, "unit": "bytes"},
    )
    compression: str = field(default="none", metadata={"choices": ("none", "bf16")})

    @property
    def local(self) -> bool:
        """The optimizer runs on the trainer."""
        return True
