# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fake kernels of the dispatcher ops: what ``torch.compile`` sees instead of data.

``torch_cpudist.ops`` registers them when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_cpudist import _core


def _distinct() -> Any:
    """A size known only from the data: how many keys of a batch are distinct."""
    return torch.library.get_ctx().new_dynamic_size()


def _fake_dedupe_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    unique = keys.new_empty((_distinct(),), dtype=torch.int64)
    return unique, keys.new_empty(keys.shape, dtype=torch.int64)


def _fake_segment_sum(
    rows: torch.Tensor, inverse: torch.Tensor, count: int
) -> torch.Tensor:
    return rows.new_empty((count, rows.shape[1]))


def _fake_dedupe_segment_sum(
    keys: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    distinct = _distinct()
    unique = keys.new_empty((distinct,), dtype=torch.int64)
    return unique, rows.new_empty((distinct, rows.shape[1]))


def _fake_partition_keys(
    keys: torch.Tensor, bucket_owner: torch.Tensor, salt: int, parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return keys.new_empty(keys.shape), keys.new_empty((parts + 1,))


def _fake_table_rows(
    keys: list[torch.Tensor], rows: list[torch.Tensor], pieces: list[int], *_: Any
) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    first = 0
    for count in pieces:
        distinct = _distinct()
        found.append(keys[first].new_empty((distinct,)))
        found.append(rows[first].new_empty((distinct, rows[first].shape[1])))
        first += count
    return found


def _fake_gather_rows(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return source.new_empty((index.shape[0], source.shape[1]))


def _fake_nothing(*_: Any) -> None:
    """Writes in place: no output to describe."""


def _fake_slice_parameter(
    numel: int, row_width: int, server_count: int, min_block_size: int, slice: bool
) -> torch.Tensor:
    blocks = _core.slice_parameter(
        numel, row_width, server_count, min_block_size, slice
    )
    return torch.empty((len(blocks), 2), dtype=torch.int64)


_FAKES: dict[str, Callable[..., Any]] = {
    "dedupe_keys": _fake_dedupe_keys,
    "segment_sum": _fake_segment_sum,
    "dedupe_segment_sum": _fake_dedupe_segment_sum,
    "partition_keys": _fake_partition_keys,
    "sum_table_rows": _fake_table_rows,
    "step_table_rows": _fake_table_rows,
    "gather_rows": _fake_gather_rows,
    "scatter_rows": _fake_nothing,
    "update_rows": _fake_nothing,
    "update_dense": _fake_nothing,
    "slice_parameter": _fake_slice_parameter,
}


def register() -> None:
    """Registers every fake kernel; once per process, after ``_core`` was imported."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"torch_cpudist::{name}", fake)
