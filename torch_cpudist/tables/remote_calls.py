# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What torch's functions do with the weight of a remote table, but for initialisers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from torch_cpudist.errors import RemoteTableError
from torch_cpudist.tables.remote_weight import (
    BY_THE_SERVERS,
    WAYS,
    WITHIN,
    RemoteWeight,
    Way,
    find,
    marked,
    plainly,
    refusal,
    unreadable,
    weight_of,
)
from torch_cpudist.tables.weight import Function, as_it_stands


def _aliasing(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of what gives the same weight."""
    weight = find((args, kwargs))
    with as_it_stands():
        return marked(weight.detach(), weight._cpudist_table, weight._cpudist_rows)


def _copying(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of what gives another one with its values, or with none."""
    weight = find((args, kwargs))
    if weight._cpudist_rows is not None:
        raise refusal(func, weight)
    if str(kwargs.get("device", "cpu")).startswith("meta"):
        return plainly(func, args, kwargs)
    _check_dtype(weight, kwargs.get("dtype"))
    return weight_of(weight._cpudist_table.copy())


def _filling(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of what gives a tensor of one value: in the memory of that value."""
    weight = find((args, kwargs))
    with as_it_stands():
        options = {k: v for k, v in kwargs.items() if k in ("dtype", "device")}
        like = torch.empty((1, 1), dtype=weight.dtype, device=weight.device)
        rest = args[1:] or tuple(v for k, v in kwargs.items() if k == "fill_value")
        made: torch.Tensor = func(like, *rest, **options)
        made.requires_grad_(kwargs.get("requires_grad", False))
        return made.expand(weight.shape)


def _new(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``new_empty`` and the like: another tensor, unless it is as large."""
    weight = find((args, kwargs))
    size = args[1:] or (kwargs.get("size", ()),)
    flat = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    if flat and flat[0] == weight._cpudist_table.rows:
        raise refusal(func, weight, writes=True)  # for values to be copied from
    return plainly(func, args, kwargs)


def _check_dtype(weight: RemoteWeight, dtype: Any) -> None:
    if isinstance(dtype, torch.dtype) and dtype != torch.float32:
        raise RemoteTableError(
            f"{weight._cpudist_table.describe()} cannot become {dtype}: tables are "
            "float32. Leave its module out of the conversion, and use torch.autocast "
            "for bfloat16. Layers before it are converted already: call model.float()."
        )


def _converting(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``to`` and the like: rows are the servers' whatever device asks for them."""
    weight = args[0]
    if not isinstance(weight, RemoteWeight):
        raise refusal(func, find((args, kwargs)))
    wanted = [*args[1:], *kwargs.values()]
    _check_dtype(weight, _CONVERTED.get(getattr(func, "__name__", "")))
    for one in wanted:
        _check_dtype(weight, one.dtype if isinstance(one, torch.Tensor) else one)
    if getattr(func, "__name__", "") == "type":
        if not wanted:
            return "torch.FloatTensor"
        raise refusal(func, weight)
    return weight


def _setting_data(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``weight.data = other``."""
    _take_over(func, *args)
    return None


def _take_over(func: Function, weight: Any, other: Any) -> None:
    """Makes the rows of one begin as those of another, which changes nothing of it."""
    if not isinstance(weight, RemoteWeight):
        raise unreadable(func, other)
    if not isinstance(other, RemoteWeight):
        raise refusal(func, weight)
    if weight._cpudist_rows is not None or other._cpudist_rows is not None:
        raise refusal(func, weight)
    mine, theirs = weight._cpudist_table, other._cpudist_table
    if mine is theirs:
        return
    mine.check_unwrapped("a write")
    if (mine.rows, mine.dim) != (theirs.rows, theirs.dim):
        raise RemoteTableError(
            f"{mine.describe()} was given the rows of {theirs.describe()}: shapes are "
            f"{(mine.rows, mine.dim)} and {(theirs.rows, theirs.dim)}."
        )
    mine.begin_as(theirs)
    mine.stored = False


def _copying_in(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``weight.copy_(other)``."""
    _take_over(func, args[0], args[1])
    return args[0]


_CONVERTED = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
}
_CONVERSIONS = "to cpu cuda float half bfloat16 double type type_as contiguous"
_NEW = "new_empty new_zeros new_ones new_full new_empty_strided"


def _ways() -> dict[Function, Way]:
    """How each function is treated."""
    tensor: Any = torch.Tensor
    ways: dict[Function, Way] = {}
    for alias in (tensor.detach, torch.detach, tensor.data.__get__):
        ways[alias] = _aliasing
    ways[tensor.data.__set__] = _setting_data
    ways[tensor.copy_] = _copying_in
    ways |= dict.fromkeys((torch.empty_like, tensor.clone, torch.clone), _copying)
    filling = (torch.full_like, torch.zeros_like, torch.ones_like)
    ways |= dict.fromkeys(filling, _filling)
    ways |= {getattr(tensor, name): _new for name in _NEW.split()}
    ways |= {getattr(tensor, name): _converting for name in _CONVERSIONS.split()}
    random = (torch.rand_like, torch.randn_like, torch.randint_like)
    ways |= dict.fromkeys(random, _refusing)
    ways |= dict.fromkeys((tensor.__format__, tensor.__repr__), _showing)
    return ways


def _refusing(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of what would be as large as the table."""
    raise refusal(func, find((args, kwargs)))


def _showing(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of what a message shows of the weight."""
    return repr(args[0])


def _in_average(
    told: Mapping[str, Any], func: Function, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Of all that torch's average of a model does with a weight.

    The first update only copies, which rows that begin alike would let pass.
    """
    table = find((args, kwargs))._cpudist_table
    raise RemoteTableError(
        f"AveragedModel of a model with {table.describe()}: its rows are not here. "
        f"{BY_THE_SERVERS} For another average than an exponential one keep the table "
        "on the trainers too (leave it out of remote_tables and shard_tables(remote=))."
    )


WAYS.update(_ways())
WITHIN[AveragedModel.update_parameters.__code__] = _in_average
