# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a page of metrics has: values by name and labels, in Prometheus' text format.

A reader of its own, because a page may be anybody's: it takes time in proportion to
the text, whatever that is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from torch_cpudist.errors import ProtocolError

_LONGEST_LINE = 8192
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_VALUE = re.compile(r"[ \t]+(\S+)(?:[ \t]+-?[0-9]+)?[ \t]*")
_ESCAPED = re.compile(r"\\(.)")
_MEANT = {"n": "\n"}
Labels = frozenset[tuple[str, str]]


class Samples:
    """The values of a page. Those that are no finite number are left out.

    Args:
        text: of the page.

    Raises:
        ProtocolError: it is not in the text format, or no rank's.
    """

    def __init__(self, text: str) -> None:
        """See the class."""
        self._found: dict[str, dict[Labels, float]] = {}
        for number, line in enumerate(text.split("\n"), 1):
            if not line or line.isspace() or line.startswith("#"):
                continue
            read = _read(line) if len(line) <= _LONGEST_LINE else None
            if read is None:
                raise ProtocolError(f"line {number} of its page is no metric")
            name, labels, value = read
            if math.isfinite(value):
                self._found.setdefault(name, {})[labels] = value
        if not self.has("cpudist_rank_info"):
            raise ProtocolError("is another program's page")

    def has(self, name: str) -> bool:
        """Whether there is a value of this name."""
        return name in self._found

    def of(self, name: str, **labels: str) -> dict[Labels, float]:
        """Values by their labels.

        Args:
            name: of the metric, as it is shown.
            labels: those that they must have.
        """
        wanted = frozenset(labels.items())
        found = self._found.get(name, {})
        return {key: value for key, value in found.items() if wanted <= key}

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of these; ``None`` if there is none."""
        found = self.of(name, **labels)
        return sum(found.values()) if found else None

    def who(self) -> Mapping[str, str]:
        """The labels of ``cpudist_rank_info``."""
        return dict(next(iter(self._found["cpudist_rank_info"])))

    def __iter__(self) -> Iterator[tuple[str, Labels, float]]:
        """All values: name, labels, value."""
        for name, values in self._found.items():
            for labels, value in values.items():
                yield name, labels, value


def _read(line: str) -> tuple[str, Labels, float] | None:
    """Name, labels and value of a line; ``None`` if it is none."""
    name = _NAME.match(line)
    if name is None:
        return None
    at = name.end()
    labels: list[tuple[str, str]] = []
    if line.startswith("{", at):
        at += 1
        while label := _LABEL.match(line, at):
            value = _ESCAPED.sub(lambda m: _MEANT.get(m[1], m[1]), label[2])
            labels.append((label[1], value))
            at = label.end()
            if not line.startswith(",", at):
                break
            at += 1
        if not line.startswith("}", at):
            return None
        at += 1
    number = _VALUE.fullmatch(line, at)
    if number is None:
        return None
    try:
        return name[0], frozenset(labels), float(number[1])
    except ValueError:
        return None
