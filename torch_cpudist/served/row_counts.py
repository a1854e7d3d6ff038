# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What servers say of rows that come and go, and how they are told to let some go."""

from __future__ import annotations

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.served.set import ParameterSet


def table_stats(parameters: ParameterSet | None) -> dict[str, dict[str, int]]:
    """What servers say of remote tables; see ``DistributedOptimizer.table_stats``.

    Args:
        parameters: open on servers; ``None`` where trainers hold all tables.
    """
    if parameters is None:
        return {}
    return {
        table.found.name: dict(parameters.opened.table_stats(table.index))
        for table in parameters.placement.tables
        if table.found.remote
    }


def shrink(parameters: ParameterSet | None, name: str | None) -> dict[str, int]:
    """Has servers evict now; see ``DistributedOptimizer.shrink``.

    Args:
        parameters: open on servers; ``None`` where trainers hold all tables.
        name: of a table; ``None``: all that evict.

    Raises:
        InvalidArgumentError: ``name`` is no table that evicts.
    """
    evicting = {}
    if parameters is not None:
        specs = parameters.placement.layout.tables
        evicting = {
            table.found.name: table.index
            for table in parameters.placement.tables
            if specs[table.index].eviction is not None
        }
    if name is not None and name not in evicting:
        raise InvalidArgumentError(
            f"shrink: {name!r} is no table of this optimizer with eviction=, which are "
            f"{list(evicting) or 'none'}"
        )
    if parameters is None:
        return {}
    chosen = evicting if name is None else {name: evicting[name]}
    return {one: parameters.opened.shrink(index) for one, index in chosen.items()}
