# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reading JSON that may be anything: every field is asked for by its kind.

Nothing of a file is believed. A field that is missing, of another kind or out of range
raises ``Malformed``, which says where; who reads the file says which file it was.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

U32 = 2**32 - 1
U64 = 2**64 - 1
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,19}")
# What is nested deeper than anything that is written here.
DEEPEST = 200


class Malformed(Exception):
    """A file is not of the format; the text says where and what was expected."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Malformed("a name stands twice in one object")
    return found


def _no_number(text: str) -> Any:
    raise Malformed(f"{text} is no number of JSON")


def parse(contents: bytes | bytearray | memoryview) -> Any:
    """Reads JSON strictly: UTF-8, no name twice, no ``NaN``.

    Raises:
        Malformed: it is none.
    """
    try:
        text = bytes(contents).decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON: {error}") from None


class Fields:
    """The fields of one JSON object, each to be taken once; ``done`` checks the rest.

    Args:
        value: what was read.
        where: its place in the file, for messages.

    Raises:
        Malformed: it is no object.
    """

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise Malformed(f"{where}: expected an object, found {_kind(value)}")
        self._values = dict(value)
        self._where = where

    def has(self, name: str) -> bool:
        """Whether there is such a field, which was not taken yet."""
        return name in self._values

    def take(self, name: str) -> Any:
        """Takes a field of any kind."""
        if name not in self._values:
            raise Malformed(f"{self.at(name)}: is missing")
        return self._values.pop(name)

    def at(self, name: str) -> str:
        """The place of a field, for messages."""
        return f"{self._where}.{name}"

    def text(self, name: str, pattern: str | None = None) -> str:
        """Takes a text, which has to be of a pattern as a whole."""
        value = self.take(name)
        if not isinstance(value, str):
            raise Malformed(f"{self.at(name)}: expected a text, found {_kind(value)}")
        if pattern is not None and not re.fullmatch(pattern, value):
            raise Malformed(f"{self.at(name)}: {value!r} is not like {pattern}")
        return value

    def number(self, name: str, least: int = 0, most: int = U32) -> int:
        """Takes a whole number in a range."""
        return in_range(self.take(name), self.at(name), least, most)

    def long(self, name: str, least: int = 0, most: int = U64) -> int:
        """Takes a whole number that stands as text, as it may exceed 2^53."""
        value = self.take(name)
        if not isinstance(value, str) or not _DECIMAL.fullmatch(value):
            raise Malformed(
                f"{self.at(name)}: expected a decimal number as text, found {value!r}"
            )
        return in_range(int(value), self.at(name), least, most)

    def optional(self, name: str, take: Callable[[str], T]) -> T | None:
        """Takes a field that may be null, else by ``take`` of this object."""
        if self._values.get(name, 0) is None:
            self.take(name)
            return None
        return take(name)

    def truth(self, name: str) -> bool:
        """Takes true or false."""
        value = self.take(name)
        if not isinstance(value, bool):
            raise Malformed(f"{self.at(name)}: expected true or false, found {value!r}")
        return value

    def real(self, name: str) -> float:
        """Takes a finite number."""
        return real(self.take(name), self.at(name))

    def each(self, name: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
        """Takes a list and reads each of its items, told its place."""
        value = self.take(name)
        if not isinstance(value, list):
            raise Malformed(f"{self.at(name)}: expected a list, found {_kind(value)}")
        place = self.at(name)
        return tuple(read(item, f"{place}[{i}]") for i, item in enumerate(value))

    def mapping(self, name: str) -> dict[str, Any]:
        """Takes an object whose fields are whatever they are."""
        value = self.take(name)
        if not isinstance(value, dict):
            raise Malformed(
                f"{self.at(name)}: expected an object, found {_kind(value)}"
            )
        return value

    def done(self) -> None:
        """Checks that every field was taken."""
        if self._values:
            raise Malformed(f"{self._where}: unknown fields {sorted(self._values)}")


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    return "null" if value is None else kinds.get(type(value), "a number")


def in_range(value: Any, where: str, least: int, most: int) -> int:
    """A whole number between two others, both included."""
    if type(value) is not int or not least <= value <= most:
        raise Malformed(
            f"{where}: expected a whole number from {least} to {most}, found {value!r}"
        )
    return value


def real(value: Any, where: str) -> float:
    """A finite number, as a float."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Malformed(f"{where}: expected a finite number, found {value!r}")
    return float(value)


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """Checks that a value is written as JSON and read back as it is.

    Raises:
        Malformed: it has something else inside, or is nested too deeply.
    """
    if depth > DEEPEST:
        raise Malformed(f"{where}: nested more than {DEEPEST} deep")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return real(value, where)
    if isinstance(value, list | tuple):
        return [plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {k: plain(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    raise Malformed(f"{where}: {type(value).__name__} is no value of JSON")
