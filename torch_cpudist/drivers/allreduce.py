# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AllReduce: gradients are averaged, and every trainer steps with the mean."""

from __future__ import annotations

import torch

from torch_cpudist.collective.buckets import plan, squared_norm
from torch_cpudist.collective.carriers import RoundedCarrier, SumCarrier
from torch_cpudist.collective.copied import CopiedParameters
from torch_cpudist.collective.exchange import GradientExchange, MakeCarrier
from torch_cpudist.collective.header import Header
from torch_cpudist.collective.rows import Rows, as_gradient
from torch_cpudist.drivers.base import Wrapped
from torch_cpudist.drivers.collective import warn_of_sharding
from torch_cpudist.drivers.copied_saving import CopiedSaving
from torch_cpudist.drivers.gradient import (
    GradientDriver,
    SharedState,
    clip_average,
    clip_tensors,
    open_equal,
)
from torch_cpudist.drivers.registry import Opening, register
from torch_cpudist.drivers.saving import Saving
from torch_cpudist.errors import UnsupportedModelError
from torch_cpudist.model.gradients import replaced_gradients
from torch_cpudist.model.placement import Placement
from torch_cpudist.settings.clip import Clip, ClipNorm, ClipTensorNorm
from torch_cpudist.strategies.allreduce import AllReduce


def averaging(strategy: AllReduce) -> MakeCarrier:
    """What sums the buckets of a strategy."""
    return RoundedCarrier if strategy.compression == "bf16" else SumCarrier


class AllReduceDriver(GradientDriver):
    """Runs the AllReduce strategy."""

    def __init__(
        self, strategy: AllReduce, parameters: CopiedParameters, made: Wrapped
    ) -> None:
        """See ``GradientDriver``."""
        entries = parameters.placement.dense
        buckets = plan(entries, strategy.bucket_bytes, halves=True)
        exchange = GradientExchange(parameters, buckets, averaging(strategy))
        keeper = SharedState(made, parameters)
        super().__init__(parameters, exchange, made, keeper)
        self._saving = CopiedSaving(parameters, self._progress, self._go_on, equal=True)

    @property
    def saving(self) -> Saving:
        """Trainer 0's."""
        return self._saving

    def _update(self, header: Header, rows: list[Rows], clip: Clip | None) -> None:
        flat = [bucket.flat for bucket in self._exchange.buckets]
        flat += [values.view(-1) for _, values in rows]
        if isinstance(clip, ClipTensorNorm):
            parts = [b.view(i) for b, i in self._exchange.pieces(header.dense)]
            parts += [values for _, values in rows]
            norms = [squared_norm(part.reshape(-1)) for part in parts]
            clip_tensors(clip, parts, norms)
        elif isinstance(clip, ClipNorm):
            clip_average(clip, flat, sum(map(squared_norm, flat)))
        else:
            clip_average(clip, flat, 0.0)
        found: list[torch.Tensor | None] = [None] * len(self._dense)
        for bucket, i in self._exchange.pieces(header.dense):
            found[bucket.pieces[i].entry.index] = bucket.view(i)
        weights = [table.found.weight for table in self._tables]
        for i, (one, table) in enumerate(zip(rows, weights, strict=True)):
            found.append(as_gradient(one, table) if i in header.tables else None)
        with replaced_gradients([*self._dense, *weights], found):
            self._step_inners()


def _opened(strategy: AllReduce, opening: Opening) -> CopiedParameters:
    warn_of_sharding(strategy)
    return open_equal(strategy, opening)


def _check_device(_: AllReduce, placement: Placement) -> None:
    if placement.tables:
        name = placement.tables[0].found.name
        raise UnsupportedModelError(
            f"table {name!r} under AllReduce on {placement.device}: trainers exchange "
            "rows of tables on CPUs. Keep tables on servers: Hybrid(dense=AllReduce(), "
            "sparse=Sync()). Or set sparse=False on the embedding."
        )


register(
    AllReduce,
    opens=_opened,
    drives=AllReduceDriver,
    served=False,
    check_device=_check_device,
)
