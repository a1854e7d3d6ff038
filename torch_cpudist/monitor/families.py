# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Names, kinds and meanings of what is shown, and how counters become it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Histogram:
    """Counts by size.

    Attributes:
        buckets: the largest size of each, ascending, and how many are no larger.
        total: of all sizes.
    """

    buckets: Sequence[tuple[float, int]]
    total: float


@dataclass(frozen=True)
class Family:
    """One metric, and what it is of each set of labels.

    Attributes:
        name: without the ``_total`` that is put behind those of counters.
        kind: ``counter``, ``gauge`` or ``histogram``.
        text: what it means.
        labels: their names.
        values: by the labels' values.
    """

    name: str
    kind: str
    text: str
    labels: Labels = ()
    values: dict[Labels, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """Its name as it is shown."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


@dataclass(frozen=True)
class Row:
    """How one metric is made of a dict of counters.

    Attributes:
        name, kind, text: as of ``Family``.
        keys: where the value is, ``a.b`` within a dict of the dict; or by the value of
            the label.
        label: whose values ``keys`` has.
    """

    name: str
    kind: str
    text: str
    keys: str | Mapping[str, str]
    label: str = ""

    def family(self, common: Labels) -> Family:
        """One without values."""
        labels = (*common, self.label) if self.label else common
        return Family(self.name, self.kind, self.text, labels)


def _at(found: Mapping[str, Any], key: str) -> Any:
    """The value under a key; ``None`` if it is not there."""
    value: Any = found
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def made_of(
    rows: Iterable[Row],
    found: Iterable[tuple[Labels, Mapping[str, Any]]],
    common: Labels = (),
) -> list[Family]:
    """Metrics of counters; those that none of them has are left out.

    Args:
        rows: which, and where they are.
        found: counters, by the values of the labels that they have in common.
        common: names of these.
    """
    counters = list(found)
    families = []
    for row in rows:
        family = row.family(common)
        keys = {"": row.keys} if isinstance(row.keys, str) else row.keys
        for own, values in counters:
            for label, key in keys.items():
                value = _at(values, key)
                if value is not None:
                    family.values[(*own, label) if row.label else own] = value
        if family.values:
            families.append(family)
    return families


def ages(stats: Mapping[str, Any], what: str, least: int) -> Histogram:
    """The histogram of ``stats()["staleness"]``.

    Args:
        stats: that dict.
        what: ``steps`` or ``samples``.
        least: buckets that there are always, so that none begins late.
    """
    times = list(stats[what].values())
    times += [0] * (least - len(times))
    buckets, count = [], 0
    for i, number in enumerate(times):
        count += number
        buckets.append((2.0**i - 1, count))  # 0, 1, 2 to 3, 4 to 7 …
    buckets.append((float("inf"), count))
    return Histogram(buckets, stats[f"{what}_mean"] * stats["pushes"])
