# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How a trainer talks to servers: its queue of pushes, and what values travel as."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any

from torch_cpudist.errors import ConfigurationError
from torch_cpudist.settings.fields import check, settings

# What matters without a queue, where lookups pull, and where trainers exchange what
# they moved.
WIRE_FIELDS = ("wire_dtype", "pull_dtype")
PULL_FIELDS = (*WIRE_FIELDS, "learn_lookups", "cache_bytes", "residue_bytes")
ROUND_FIELDS = (*PULL_FIELDS, "overlap")
# What matters with a queue.
QUEUE_FIELDS = (
    *("send_queue_size", "max_merge", "merge_rule", "pull_every"),
    *PULL_FIELDS,
)
EXCHANGE_FIELDS = (*WIRE_FIELDS, "merge_rule")


@settings
class Communicator:
    """How a trainer sends pushes, and what their values travel as.

    Without a queue of pushes, under strategies other than Async, only ``wire_dtype``
    and ``pull_dtype`` are accepted, under Sync and HalfAsync also ``learn_lookups``,
    ``cache_bytes``, ``residue_bytes`` and ``overlap``, and under Geo ``merge_rule``.
    Async takes all but ``overlap``.

    Attributes:
        send_queue_size: pushes that may wait while one is on its way; a further step
            waits for room. ``CPUDIST_COMMUNICATOR_SEND_QUEUE_SIZE``.
        max_merge: waiting pushes that travel as one update, at most. ``None`` is 2, and
            1 where each push has values of its own to be compared with
            (``DelayCompensation``). ``CPUDIST_COMMUNICATOR_MAX_MERGE``.
        merge_rule: ``"sum"``, ``"mean"`` over the merged pushes, or ``"auto"``: the sum
            for SGD, whose updates add up, the mean for adaptive optimizers. Under Geo
            the same of the trainers' movements. ``CPUDIST_COMMUNICATOR_MERGE_RULE``.
        pull_every: pushes between two replies that bring dense values.
            ``CPUDIST_COMMUNICATOR_PULL_EVERY``.
        wire_dtype: what float32 values of pushes are rounded to: ``"fp32"`` not at all,
            ``"bf16"``, ``"fp16"``, or ``"int8"`` with a scale per row. What is rounded
            off goes with a later push. float64 values travel as they are. Equal on all
            trainers. ``CPUDIST_COMMUNICATOR_WIRE_DTYPE``.
        pull_dtype: the same of weights that come back during training: ``"fp32"``,
            ``"bf16"`` or ``"fp16"``. ``None`` is ``wire_dtype``, and ``"fp16"`` where
            that is ``"int8"``. ``CPUDIST_COMMUNICATOR_PULL_DTYPE``.
        learn_lookups: see which inputs of the model its tables are looked up with, and
            ask for all rows of a forward at once when it begins; results are the same.
            ``CPUDIST_COMMUNICATOR_LEARN_LOOKUPS``.
        cache_bytes: what rows of remote tables may take on this trainer between two
            steps; beyond it, those that no coming batch has asked for are let go and
            pulled again. ``CPUDIST_COMMUNICATOR_CACHE_BYTES``.
        residue_bytes: what a rounding ``wire_dtype`` may keep of rows of remote tables
            that was rounded off; beyond it, that of the rows which were pushed longest
            ago is dropped, and counted. ``CPUDIST_COMMUNICATOR_RESIDUE_BYTES``.
        overlap: send dense gradients to servers behind a network while backward
            computes further ones; results are the same. Under Sync and HalfAsync, where
            pushes are not rounded and servers have no memory cap.
            ``CPUDIST_COMMUNICATOR_OVERLAP``.
    """

    send_queue_size: int = field(
        default=2, metadata={"least": 1, "most": 65536, "unit": "pushes"}
    )
    max_merge: int | None = field(
        default=None, metadata={"least": 1, "most": 65536, "unit": "pushes"}
    )
    merge_rule: str = field(
        default="auto", metadata={"choices": ("auto", "sum", "mean")}
    )
    pull_every: int = field(
        default=1, metadata={"least": 1, "most": 2**31 - 1, "unit": "pushes"}
    )
    wire_dtype: str = field(
        default="fp32", metadata={"choices": ("fp32", "bf16", "fp16", "int8")}
    )
    pull_dtype: str | None = field(
        default=None, metadata={"choices": ("fp32", "bf16", "fp16")}
    )
    learn_lookups: bool = True

    cache_bytes: int = field(
        default=256 << 20, metadata={"least": 0, "most": 2**63 - 1, "unit": "bytes"}
    )
    residue_bytes: int = field(
        default=64 << 20, metadata={"least": 0, "most": 2**63 - 1, "unit": "bytes"}
    )
    overlap: bool = True

    def __post_init__(self) -> None:
        """Checks the fields."""
        check(self)

    @property
    def pulled_dtype(self) -> str:
        """What ``pull_dtype`` stands for."""
        if self.pull_dtype is not None:
            return self.pull_dtype
        return "fp16" if self.wire_dtype == "int8" else self.wire_dtype


def check_without_queue(strategy: Any, accepted: tuple[str, ...] = PULL_FIELDS) -> None:
    """Refuses settings of a queue that a strategy does not have.

    Args:
        strategy: whose ``communicator`` is checked.
        accepted: fields that mean something to it.

    Raises:
        ConfigurationError: names them.
    """
    given = strategy.communicator
    for entry in dataclasses.fields(Communicator):
        value = getattr(given, entry.name)
        if entry.name not in accepted and value != entry.default:
            name = type(strategy).__name__
            raise ConfigurationError(
                f"{name}(communicator=Communicator({entry.name}={value!r})): {name} "
                f"has no queue of pushes; it takes {', '.join(accepted)}."
            )
