# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""JSON objects, a field a line, whose last field is the checksum of all before it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch_cpudist import _core
from torch_cpudist.snapshot.checked_json import Fields, Malformed, parse

_TAIL = '"crc32c": "{:08x}"\n}}\n'
_TAIL_BYTES = len(_TAIL.format(0))


def seal(fields: Mapping[str, Any]) -> bytes:
    """The bytes of a file of these fields.

    Args:
        fields: values of JSON, as ``checked_json.plain`` returns them.
    """
    lines = [f'"{name}": {json.dumps(value)},\n' for name, value in fields.items()]
    body = ("{\n" + "".join(lines)).encode()
    return body + _TAIL.format(_core.crc32c(body)).encode()


def unseal(contents: bytes, where: str) -> Fields:
    """The fields of a file but for the checksum, which is right.

    Args:
        contents: of the file.
        where: what it is called in messages.

    Raises:
        Malformed: it is none such, or a bit of it has changed.
    """
    body, tail = contents[:-_TAIL_BYTES], contents[-_TAIL_BYTES:]
    expected = _TAIL.format(_core.crc32c(body)).encode()
    if tail != expected:
        raise Malformed(
            f"expected it to end in {expected.decode()!r} by its contents, found "
            f"{tail.decode('ascii', 'replace')!r}"
        )
    fields = Fields(parse(contents), where)
    fields.take("crc32c")
    return fields


def checksum_of(contents: bytes) -> int:
    """What the last field of a sealed file says, which is the file's identity."""
    return _core.crc32c(contents[:-_TAIL_BYTES])


def check_unique(where: str, found: Sequence[object]) -> None:
    """Refuses a list in which something stands twice.

    Raises:
        Malformed: it does.
    """
    if len(set(found)) != len(found):
        raise Malformed(f"{where}: one of them is there twice")
