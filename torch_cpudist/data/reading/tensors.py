# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Batches of the core as tensors by slot, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_cpudist import _core
from torch_cpudist.data.reading.schema import Slot
from torch_cpudist.model.bags import Bags, SingleBags

Batch = dict[str, Any]
INSTANCE_ID = "instance_id"


class BatchMaker:
    """Turns batches of one schema into dicts of tensors.

    The tensors share the batch's memory, which goes back to the reader when the last
    of them is gone. Thread safety: any thread.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        used = [slot for slot in slots if slot.used]
        # Name, values per record (None: any number), sparse or not; in the core's order
        # of sections: integers in one array, floats in another.
        self._sections = [(slot.name, slot.dim, slot.kind == "sparse") for slot in used]
        self._integers = [slot.integers for slot in used]
        self._offsets: dict[tuple[int, int], torch.Tensor] = {}

    def make(self, core: _core.DataBatch) -> Batch:
        """The tensors of a batch."""
        records: int = core.records
        int_sizes: list[int] = []
        float_sizes: list[int] = []
        for (_, dim, _), integers, count in zip(
            self._sections, self._integers, core.sections, strict=True
        ):
            (int_sizes if integers else float_sizes).append(count)
            if dim is None:
                int_sizes.append(records + 1)
        ints = iter(torch.from_numpy(core.ints).split_with_sizes(int_sizes))
        floats = iter(torch.from_numpy(core.floats).split_with_sizes(float_sizes))
        batch: Batch = {}
        for (name, dim, sparse), integers in zip(
            self._sections, self._integers, strict=True
        ):
            values = next(ints if integers else floats)
            if not sparse:
                batch[name] = values.view(records, dim or 1)
            elif dim is None:
                batch[name] = Bags(values, next(ints))
            else:
                kind = SingleBags if dim == 1 else Bags
                batch[name] = kind(values, self._fixed_offsets(records, dim))
        if core.instance_ids is not None:
            batch[INSTANCE_ID] = torch.from_numpy(core.instance_ids)
        return batch

    def _fixed_offsets(self, records: int, dim: int) -> torch.Tensor:
        """Offsets of bags of one size, shared by batches: not to be written to."""
        found = self._offsets.get((records, dim))
        if found is None:
            found = torch.arange(0, (records + 1) * dim, dim)
            if len(self._offsets) > 64:
                self._offsets.clear()
            self._offsets[records, dim] = found
        return found
