# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tables of a placement, and its dense parameters, as placements of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_cpudist import _core
from torch_cpudist.model.placement import Placement, Rules, make_layout

if TYPE_CHECKING:
    from torch_cpudist.settings.updates import Updates


def _rules_of(rules: Rules, groups: set[int]) -> Rules:
    """Groups keep their numbers; a group that is not there updates nothing."""
    return [
        rule if g in groups else _core.OptimizerConfig("sgd", lr=0.0)
        for g, rule in enumerate(rules)
    ]


def table_rules(placement: Placement, rules: Rules) -> Rules:
    """The rules of the groups that hold tables, at their places."""
    return _rules_of(rules, {table.group for table in placement.tables})


def dense_rules(placement: Placement, rules: Rules) -> Rules:
    """The rules of the groups that hold dense parameters, at their places."""
    return _rules_of(rules, {entry.group for entry in placement.dense})


def tables_of(placement: Placement, updates: Updates) -> Placement:
    """The part that is tables, updated as ``updates`` says."""
    rules = table_rules(placement, placement.rules)
    layout = make_layout(updates, rules, placement.layout.tables, [])
    return Placement(
        placement.tables, [], layout, rules, placement.device, updates.communicator
    )


def dense_of(placement: Placement, updates: Updates) -> Placement:
    """The part that is dense, updated as ``updates`` says."""
    rules = dense_rules(placement, placement.rules)
    layout = make_layout(updates, rules, [], placement.layout.blocks)
    return Placement([], placement.dense, layout, rules, placement.device)
