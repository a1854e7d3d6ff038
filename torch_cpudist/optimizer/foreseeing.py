# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Asking for all rows of a forward at once, unasked, where a strategy pulls rows."""

from __future__ import annotations

from torch import nn

from torch_cpudist.served.set import ParameterSet
from torch_cpudist.strategies.base import Strategy
from torch_cpudist.tables.forwards import ForeseenLookups
from torch_cpudist.tables.learned import Tables


def foresee(
    model: nn.Module, pulled: ParameterSet | None, strategy: Strategy
) -> ForeseenLookups | None:
    """Foresees the lookups of a model, unless there is nothing to ask for or it is off.

    Args:
        model: whose forward is called.
        pulled: what has rows that a lookup brings in; ``None``: all are here.
        strategy: says whether to.
    """
    if pulled is None or not strategy.learns_lookups or len(pulled.bindings) == 0:
        return None
    tables = Tables(
        pulled.bindings, pulled.pull_together, lambda: pulled.opened.is_member()
    )
    return ForeseenLookups(model, pulled.bindings, tables)


def stats_of(foreseen: ForeseenLookups | None) -> dict[str, int]:
    """What was foreseen so far; zeros where nothing is."""
    if foreseen is None:
        return {"together": 0, "tables": 0, "alone": 0, "in_vain": 0}
    return foreseen.stats()
