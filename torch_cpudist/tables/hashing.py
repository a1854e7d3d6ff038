# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Keys of tables without a vocabulary, of texts or numbers.

What a text or number becomes is a promise: snapshots and exports have rows by key, so
that another release has to find them again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.snapshot.names import mix64

_FIELDS = 2**63
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / phi
_BITS = 2**64 - 1

Values = Sequence[str] | Sequence[int] | npt.NDArray[Any] | torch.Tensor


def hash_keys(values: Values, field: int = 0) -> torch.Tensor:
    """Keys of texts or numbers, for ``Embedding`` and ``EmbeddingBag`` of any key.

    The same in every process, on every host and in every release: of a text the 64 bits
    of BLAKE2b of its UTF-8, of a number those of a bijection that mixes them. Numbers
    of one field never share a key; of 10 million different texts two do with a
    probability of 3 in a million. The text ``"7"`` and the number 7 have different
    keys. Numbers from 2**63 on are as the negative ones of the same 64 bits.

    Args:
        values: texts (``str``, or ``bytes`` as they are), or whole numbers that 64 bits
            can hold: a sequence, a numpy array or a tensor on the CPU, in which all are
            of one kind.
        field: which column they are of, so that equal values of two columns that share
            a table have keys of their own; 0 to 2**63 - 1.

    Returns:
        int64, of the shape of the array or tensor; any of the 2**64 values.

    Raises:
        InvalidArgumentError: a value is neither, or out of range; it is named.

    Cost: about 1 us a text, 10 ns a number of an array or tensor.
    """
    if isinstance(field, bool) or not isinstance(field, int):
        raise InvalidArgumentError(f"hash_keys: field={field!r}, expected a number")
    if not 0 <= field < _FIELDS:
        raise InvalidArgumentError(f"hash_keys: field={field}, expected 0 to 2**63 - 1")
    if isinstance(values, torch.Tensor):
        return _of_tensor(values, field)
    if isinstance(values, np.ndarray):
        if values.dtype.kind in "iu":
            return _mixed(values, field)
        if values.dtype.kind not in "USO":
            raise InvalidArgumentError(
                f"hash_keys: an array of {values.dtype}, expected whole numbers or "
                "texts. Convert numbers with astype(np.int64)."
            )
        flat = _of_items(values.reshape(-1).tolist(), field)
        return flat.reshape(values.shape)
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidArgumentError(
            f"hash_keys: expected a sequence of texts or numbers, an array or a "
            f"tensor, found {type(values).__name__} {values!r}. Of a single value pass "
            "a list."
        )
    return _of_items(list(values), field)


def _of_tensor(values: torch.Tensor, field: int) -> torch.Tensor:
    if values.device.type != "cpu":
        raise InvalidArgumentError(
            f"hash_keys: a tensor on {values.device}, expected one on the CPU: values "
            "are hashed before they are batches. Use values.cpu()."
        )
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise InvalidArgumentError(
            f"hash_keys: a tensor of {values.dtype}, expected whole numbers. Use "
            "values.long()."
        )
    return _mixed(values.detach().numpy(), field)


def _of_items(values: list[Any], field: int) -> torch.Tensor:
    """Of values of Python, which say what they are one by one."""
    numbers = bool(values) and _is_number(values[0])
    for at, value in enumerate(values):
        if _is_number(value) != numbers or not (numbers or _is_text(value)):
            kinds = "numbers" if numbers else "texts"
            raise InvalidArgumentError(
                f"hash_keys: value {at} is {type(value).__name__} {value!r}, expected "
                + (f"{kinds}, as value 0 is one" if at else "a text or a whole number")
            )
    if numbers:
        return _mixed(_array_of(values), field)
    told = field.to_bytes(8, "little")
    digests = b"".join(
        hashlib.blake2b(_bytes_of(one, at), digest_size=8, person=told).digest()
        for at, one in enumerate(values)
    )
    return torch.from_numpy(np.frombuffer(digests, "<i8").astype(np.int64))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, (str, bytes))


def _bytes_of(text: str | bytes, at: int) -> bytes:
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"hash_keys: value {at} is no text that UTF-8 has: {error}. Pass its bytes."
        ) from error


def _array_of(values: Sequence[int]) -> npt.NDArray[np.uint64]:
    for at, value in enumerate(values):
        if not -(2**63) <= value < 2**64:
            raise InvalidArgumentError(
                f"hash_keys: value {at} is {value}, which 64 bits cannot hold. Pass "
                "its text."
            )
    return np.array([int(value) & _BITS for value in values], np.uint64)


def _mixed(values: npt.NDArray[Any], field: int) -> torch.Tensor:
    """Of numbers of at most 64 bits; a smaller signed one is the same as a larger."""
    wide = np.uint64 if values.dtype.kind == "u" else np.int64
    bits = np.ascontiguousarray(values, dtype=wide).view(np.uint64)
    of_field = mix64(np.array([field * _GOLDEN & _BITS], np.uint64))
    keys = mix64(bits ^ of_field)
    return torch.from_numpy(keys.view(np.int64).reshape(values.shape))
