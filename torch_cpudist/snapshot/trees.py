# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""State trees as JSON with tensors beside it: exact, and never code.

What ``state_dict()`` returns, states of random generators and the like. Dicts, lists,
tuples, texts, bytes, numbers, ``None``, tensors and arrays come back with the values
and types that they had; anything else is refused with its place in the tree.

| value | JSON |
|---|---|
| ``None``, ``bool``, ``str``, finite ``float``, ``int`` up to 2^53 | itself |
| ``list``; ``dict`` of texts, none beginning with ``$`` | array; object |
| any other ``int`` | ``{"$int": "-0x1f"}`` |
| ``nan``, ``inf``, ``-inf`` | ``{"$float": "nan"}`` |
| ``bytes`` | ``{"$bytes": base64}`` |
| ``tuple`` | ``{"$tuple": [...]}`` |
| other ``dict``; ``OrderedDict``; ``Counter`` | ``{"$items": [[key, value], ...]}``; ``$ordered``; ``$counter`` |
| tensor; ``numpy.ndarray`` | ``{"$tensor": name}``; ``{"$array": name}``, with the values in a safetensors file |
| numpy's scalars | ``{"$scalar": [dtype, bytes in hex]}`` |
| ``torch.dtype`` | ``{"$dtype": "bfloat16"}`` |
"""  # noqa: E501  a table

from __future__ import annotations

import base64
import binascii
import collections
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torch_cpudist.errors import SnapshotError
from torch_cpudist.snapshot.checked_json import DEEPEST, Malformed
from torch_cpudist.snapshot.tensors import NUMPY, Stored

#: torch's dtype by the dtype's name in the file.
TORCH: Mapping[str, torch.dtype] = MappingProxyType(
    {
        **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8},
        **{"I16": torch.int16, "U16": torch.uint16, "I32": torch.int32},
        **{"U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64},
        **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32},
        **{"F64": torch.float64, "C64": torch.complex64},
        **{"F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn},
    }
)
_TORCH_NAMES = {dtype: name for name, dtype in TORCH.items()}
_NUMPY_NAMES = {dtype: name for name, dtype in NUMPY.items()}
_EXACT = 2**53
_KEPT = (
    "dicts, lists, tuples, texts, bytes, numbers, None, tensors and arrays can be kept"
)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Leaf:
    """The values of a tensor or an array: a copy of its own.

    Attributes:
        dtype: its name in a safetensors file.
        shape: its shape.
        contents: its values, row by row.
    """

    dtype: str
    shape: tuple[int, ...]
    contents: Bytes


@dataclass(frozen=True)
class Packed:
    """A tree that nothing changes any more.

    Attributes:
        tree: what JSON is written of.
        leaves: tensors and arrays by the names that the tree has for them.
    """

    tree: Any
    leaves: Mapping[str, Leaf]


def pack(tree: Any, where: str = "state") -> Packed:
    """Copies a state tree into what files are written of.

    Args:
        tree: what is to be kept; not changed, and free to change afterwards.
        where: what it is, for messages.

    Raises:
        SnapshotError: something in it cannot be kept; the message names its place.

    Cost: the size of all tensors, which are copied once.
    """
    packer = _Packer()
    return Packed(packer.pack(tree, where, 0), packer.leaves)


class _Packer:
    """What one call of ``pack`` gathers."""

    def __init__(self) -> None:
        self.leaves: dict[str, Leaf] = {}
        # Names of what is in the tree more than once, by identity; kept alive with it.
        self._met: dict[int, tuple[Any, str]] = {}

    def pack(self, value: Any, where: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise _refuse(where, f"is nested more than {DEEPEST} deep, or in a circle")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if abs(value) <= _EXACT else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind in (list, tuple):
            items = [
                self.pack(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)
            ]
            return items if kind is list else {"$tuple": items}
        if kind in _DICTS:
            return self._pack_dict(value, where, depth)
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(value, where, _read_tensor)}
        if kind is np.ndarray:
            return {"$array": self._keep(value, where, _read_array)}
        if isinstance(value, np.generic):
            leaf = _read_array(np.asarray(value), where)
            return {"$scalar": [leaf.dtype, leaf.contents.tobytes().hex()]}
        if kind is torch.dtype:
            return {"$dtype": str(value).removeprefix("torch.")}
        raise _refuse(where, f"is of type {kind.__module__}.{kind.__qualname__}")

    def _pack_dict(self, value: Mapping[Any, Any], where: str, depth: int) -> Any:
        kind = type(value)
        plain = kind is dict and all(
            type(key) is str and not key.startswith("$") for key in value
        )
        if plain:
            return {
                key: self.pack(v, f"{where}[{key!r}]", depth + 1)
                for key, v in value.items()
            }
        items = []
        for key, item in value.items():
            place = f"{where}[{key!r}]"
            if not _is_key(key):
                raise _refuse(place, f"has a key of type {type(key).__name__}")
            items.append(
                [self.pack(key, place, depth + 1), self.pack(item, place, depth + 1)]
            )
        return {_DICTS[kind]: items}

    def _keep(self, value: Any, where: str, read: Callable[[Any, str], Leaf]) -> str:
        if id(value) not in self._met:
            name = f"t{len(self.leaves)}"
            self.leaves[name] = read(value, where)
            self._met[id(value)] = (value, name)
        return self._met[id(value)][1]


_DICTS: Mapping[type, str] = MappingProxyType(
    {
        dict: "$items",
        collections.OrderedDict: "$ordered",
        collections.Counter: "$counter",
    }
)


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_key(one) for one in key)
    # Not a number is equal to nothing, itself included.
    plain = key is None or type(key) in (bool, int, str, bytes)
    return plain or (type(key) is float and key == key)


def _refuse(where: str, what: str) -> SnapshotError:
    return SnapshotError(
        f"{where} {what}, which a snapshot cannot keep: {_KEPT}. Leave it out of the "
        "state_dict, or keep what it is made of."
    )


def _read_tensor(tensor: torch.Tensor, where: str) -> Leaf:
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        what = "meta" if tensor.is_meta else f"{kind.__module__}.{kind.__qualname__}"
        raise _refuse(where, f"is a tensor of {what}")
    if tensor.layout is not torch.strided or tensor.dtype not in _TORCH_NAMES:
        raise _refuse(where, f"is a tensor of {tensor.layout}, {tensor.dtype}")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    contents = plain.reshape(-1).view(torch.uint8).numpy().copy()
    return Leaf(_TORCH_NAMES[tensor.dtype], tuple(tensor.shape), contents)


def _read_array(array: npt.NDArray[Any], where: str) -> Leaf:
    if array.dtype not in _NUMPY_NAMES:
        raise _refuse(where, f"is an array of {array.dtype!r}")
    contents = np.frombuffer(array.tobytes(), dtype=np.uint8)
    return Leaf(_NUMPY_NAMES[array.dtype], array.shape, contents)


# ---- back --------------------------------------------------------------------------


def unpack(tree: Any, leaves: Mapping[str, Leaf], where: str = "state") -> Any:
    """Makes a state tree of what a file had.

    Tensors and arrays get memory of their own, on the CPU; what stood at two places
    of the tree does so again.

    Args:
        tree: what JSON was read to.
        leaves: by the names that the tree has for them.
        where: what it is, for messages.

    Raises:
        Malformed: it is none that ``pack`` made.
    """
    return _Unpacker(leaves).unpack(tree, where, 0)


def leaf_of(stored: Stored, contents: memoryview) -> Leaf:
    """A leaf whose values are a view of a file."""
    return Leaf(stored.dtype, stored.shape, np.frombuffer(contents, dtype=np.uint8))


class _Unpacker:
    """What one call of ``unpack`` makes."""

    def __init__(self, leaves: Mapping[str, Leaf]) -> None:
        self._leaves = leaves
        self._made: dict[str, Any] = {}

    def unpack(self, value: Any, where: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise Malformed(f"{where}: nested more than {DEEPEST} deep")
        if isinstance(value, list):
            return list(self._each(value, where, depth))
        if not isinstance(value, dict):
            return value
        marks = [key for key in value if key.startswith("$")]
        if not marks:
            return {
                key: self.unpack(v, f"{where}[{key!r}]", depth + 1)
                for key, v in value.items()
            }
        if len(value) != 1:
            raise Malformed(f"{where}: fields beside {marks[0]!r}")
        mark, inner = marks[0], value[marks[0]]
        if mark == "$tuple" and isinstance(inner, list):
            return tuple(self._each(inner, where, depth))
        if mark in ("$items", "$ordered", "$counter") and isinstance(inner, list):
            return self._dict(mark, inner, where, depth)
        if mark in ("$tensor", "$array") and isinstance(inner, str):
            return self._leaf(mark, inner, where)
        if mark == "$scalar" and isinstance(inner, list):
            return _scalar(inner, where)
        if mark in _TEXTS and isinstance(inner, str):
            try:
                return _TEXTS[mark](inner)
            except (ValueError, KeyError, binascii.Error) as error:
                raise Malformed(f"{where}: {mark} of {inner!r}") from error
        raise Malformed(f"{where}: {mark!r} of {type(inner).__name__}")

    def _each(self, values: list[Any], where: str, depth: int) -> Iterator[Any]:
        for i, value in enumerate(values):
            yield self.unpack(value, f"{where}[{i}]", depth + 1)

    def _dict(self, mark: str, items: list[Any], where: str, depth: int) -> Any:
        found: dict[Any, Any] = {}
        for item in items:
            if not isinstance(item, list) or len(item) != 2:
                raise Malformed(f"{where}: expected pairs in {mark}")
            key = self.unpack(item[0], where, depth + 1)
            if not _is_key(key):
                raise Malformed(f"{where}: a key of {type(key).__name__}")
            if key in found:
                raise Malformed(f"{where}: the key {key!r} twice")
            found[key] = self.unpack(item[1], f"{where}[{key!r}]", depth + 1)
        if mark == "$ordered":
            return collections.OrderedDict(found)
        if mark == "$counter":
            counted: collections.Counter[Any] = collections.Counter()
            dict.update(counted, found)
            return counted
        return found

    def _leaf(self, mark: str, name: str, where: str) -> Any:
        if name not in self._leaves:
            raise Malformed(f"{where}: no tensor {name!r}")
        if mark + name not in self._made:
            leaf = self._leaves[name]
            make = _tensor if mark == "$tensor" else _array
            self._made[mark + name] = make(leaf, where)
        return self._made[mark + name]


def _finite_less(text: str) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text]


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(text)
    return found


_TEXTS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "$int": lambda text: int(text, 16),
        "$float": _finite_less,
        "$bytes": lambda text: base64.b64decode(text, validate=True),
        "$dtype": _dtype,
    }
)


def _scalar(inner: list[Any], where: str) -> Any:
    if len(inner) != 2 or not all(isinstance(one, str) for one in inner):
        raise Malformed(f"{where}: expected a dtype and bytes in $scalar")
    try:
        dtype, contents = NUMPY[inner[0]], bytes.fromhex(inner[1])
        if len(contents) != dtype.itemsize:
            raise ValueError(inner[1])
    except (KeyError, ValueError) as error:
        raise Malformed(f"{where}: {inner} is no number of numpy's") from error
    return np.frombuffer(contents, dtype=dtype)[0]


def _tensor(leaf: Leaf, where: str) -> torch.Tensor:
    if leaf.dtype not in TORCH:
        raise Malformed(f"{where}: torch has no {leaf.dtype}")
    tensor = torch.empty(leaf.shape, dtype=TORCH[leaf.dtype], device="cpu")
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = leaf.contents
    return tensor


def _array(leaf: Leaf, where: str) -> npt.NDArray[Any]:
    if leaf.dtype not in NUMPY:
        raise Malformed(f"{where}: numpy has no {leaf.dtype}")
    try:
        array = np.empty(leaf.shape, dtype=NUMPY[leaf.dtype])
    except ValueError as error:  # more dimensions than this release of numpy has
        raise Malformed(f"{where}: {error}") from error
    array.reshape(-1).view(np.uint8)[:] = leaf.contents
    return array
