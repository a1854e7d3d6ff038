# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How dense parameters are placed."""

from __future__ import annotations

from dataclasses import field

from torch_cpudist.settings.fields import MAX_BYTES, check, settings


@settings
class Sharding:
    """How dense parameters are cut into blocks and dealt to servers.

    Attributes:
        slice: cut large parameters so that every server gets a part; ``False`` keeps
            each parameter whole on one server. ``CPUDIST_SHARDING_SLICE``.
        min_block_size: elements; no slice is smaller, and a parameter below it stays
            whole. Without ``slice`` it does nothing.
            ``CPUDIST_SHARDING_MIN_BLOCK_SIZE``.
        split_method: which server gets which block: ``"round_robin"`` in turn,
            ``"hash"`` by a stable hash of the block's name, ``"balanced"`` by element
            count, largest first to the least loaded. ``CPUDIST_SHARDING_SPLIT_METHOD``.
    """

    slice: bool = True
    min_block_size: int = field(
        default=8192, metadata={"least": 1, "most": MAX_BYTES, "unit": "elements"}
    )
    split_method: str = field(
        default="round_robin", metadata={"choices": ("round_robin", "hash", "balanced")}
    )

    def __post_init__(self) -> None:
        """Checks the fields."""
        check(self)
