# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What initialisers do to the weight of a remote table: they are recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from torch_cpudist.errors import InvalidArgumentError, UnsupportedModelError
from torch_cpudist.tables.initial import Step, truncated_normal
from torch_cpudist.tables.remote_weight import (
    WAYS,
    WITHIN,
    RemoteWeight,
    Way,
    find,
    marked,
    name_of,
    refusal,
    unreadable,
)
from torch_cpudist.tables.weight import Function, as_it_stands


def _number(func: Function, weight: RemoteWeight, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (int, float)):
        return float(value)
    raise refusal(func, weight)


def _record(
    func: Function,
    weight: RemoteWeight,
    steps: Sequence[Step],
    generator: torch.Generator | None = None,
) -> RemoteWeight:
    """Adds operations over all rows, or a constant for the weight's own."""
    table = weight._cpudist_table
    table.check_unwrapped(name_of(func))
    part = weight._cpudist_rows
    if part is not None:
        if [step[0] for step in steps] != ["fill"]:
            raise refusal(func, weight, writes=True)
        if table.values is not None:
            raise refusal(func, weight, writes=True)
        constant = steps[0][1]
        if table.open is not None:
            table.program = table.program.with_key(part[0], constant)
        else:
            table.program = table.program.with_rows(*part, constant)
        return weight
    if table.open is not None:
        _check_scale(weight)
    program = table.program
    for step in steps:
        program = program.then(step, generator)
    if table.values is not None and steps[0][0] not in ("normal", "uniform", "fill"):
        raise refusal(func, weight, writes=True)
    table.begin_with(program)
    return weight


def _no_scale(name: str, weight: RemoteWeight) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} on {weight._cpudist_table.describe()}: its scale is one over the "
        "number of rows, of which a table of any key has none, and rows would begin "
        "with next to nothing. Leave its weight to initial= "
        "(cpudist.Embedding(dim, initial=cpudist.Normal(0.0, 0.01))), or call "
        "nn.init.normal_ with a std."
    )


def _check_scale(weight: RemoteWeight) -> None:
    """Refuses initialisers of torch that scale by the number of rows.

    The shape of the weight says one; they call others with what comes of it.

    Raises:
        UnsupportedModelError: it is one of these that is at work.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_OF_INIT):
        if frame is None:
            return
        scaling = _BY_ROWS.get(frame.f_code)
        if scaling is not None and scaling(frame.f_locals):
            raise _no_scale(frame.f_code.co_name, weight)
        frame = frame.f_back


def _recording(
    name: str, given: Sequence[str], defaults: Sequence[float | None]
) -> Way:
    """How an in-place function with numbers for arguments is recorded."""

    def record(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
        weight = args[0] if args else kwargs.get("tensor")
        if not isinstance(weight, RemoteWeight):
            raise refusal(func, find((args, kwargs)))
        told = dict(zip(given, args[1:], strict=False)) | dict(kwargs)
        if len(args) > len(given) + 1 or set(told) - {*given, "generator", "tensor"}:
            raise refusal(func, weight)
        numbers = [
            _number(func, weight, told.get(key, default))
            for key, default in zip(given, defaults, strict=True)
        ]
        step: Step = (name, *numbers, *[0.0] * (2 - len(numbers)))  # type: ignore[assignment]
        return _record(func, weight, [step], told.get("generator"))

    return record


def _scaling(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``div_``, ``sub_`` and ``add_``: by a number, and without more options."""
    weight = args[0]
    if len(args) != 2 or kwargs or not isinstance(weight, RemoteWeight):
        raise refusal(func, find((args, kwargs)))
    number = _number(func, weight, args[1])
    if func.__name__ == "div_" and number == 0.0:
        raise refusal(func, weight)
    return _record(func, weight, [_SCALED[func.__name__](number)])


def _clamping(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``clamp_``: a bound may be left out."""
    weight = args[0]
    told = dict(zip(("min", "max"), args[1:], strict=False)) | dict(kwargs)
    if not isinstance(weight, RemoteWeight):
        raise refusal(func, find((args, kwargs)))
    low, high = told.get("min"), told.get("max")
    if low is None and high is None:
        raise InvalidArgumentError(
            f"{func.__name__} on {weight._cpudist_table.describe()}: expected min, max "
            "or both, found neither. Nothing was recorded."
        )
    most = float(torch.finfo(torch.float32).max)
    upper = most if high is None else _number(func, weight, high)
    lower = -most if low is None else _number(func, weight, low)
    # Where they cross, torch takes the upper one.
    return _record(func, weight, [("clamp", min(lower, upper), upper)])


def _kaiming_uniform(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``nn.init.kaiming_uniform_``, which hands itself over whole."""
    weight = find((args, kwargs))
    mode = kwargs.get("mode", "fan_in")
    if weight._cpudist_table.open is not None and mode == "fan_out":
        raise _no_scale("kaiming_uniform_", weight)
    fan = nn.init._calculate_correct_fan(weight, mode)
    gain = nn.init.calculate_gain(
        kwargs.get("nonlinearity", "leaky_relu"), kwargs.get("a", 0)
    )
    bound = float(3.0**0.5 * gain / fan**0.5)
    return _record(func, weight, [("uniform", -bound, bound)], kwargs.get("generator"))


# Whether these scale by the number of rows, by their variables; and how far they are
# from where the draw is recorded, modes of torch in between.
_BY_ROWS: dict[CodeType, Callable[[Mapping[str, Any]], bool]] = {
    nn.init.xavier_uniform_.__code__: lambda told: True,
    nn.init.xavier_normal_.__code__: lambda told: True,
    nn.init.kaiming_normal_.__code__: lambda told: told.get("mode") == "fan_out",
}
_FRAMES_OF_INIT = 16

# torch draws again what falls outside of the bounds, which needs the values.
_TRUNC_NORMAL: Any = nn.init._no_grad_trunc_normal_


def _in_trunc_normal(
    told: Mapping[str, Any], func: Function, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Of all that ``nn.init.trunc_normal_`` calls: on a stand-in of one element.

    The distribution is recorded from what the function was asked for.
    """
    weight = find((args, kwargs))
    mean, std, low, high = (float(told[name]) for name in ("mean", "std", "a", "b"))
    name = getattr(func, "__name__", "")
    if name in ("normal_", "uniform_"):
        steps = truncated_normal(mean, std, low, high)
        # torch goes on with the stand-in: it must not draw from the caller's generator.
        _record(func, weight, steps, told.get("generator"))
        return torch.full((1, 1), min(max(mean, low), high), device="cpu")
    stand_in = torch.full((1, 1), min(max(mean, low), high), device="cpu")

    def stood_in(value: Any) -> Any:
        return stand_in if isinstance(value, RemoteWeight) else value

    named = {key: stood_in(value) for key, value in kwargs.items()}
    return func(*map(stood_in, args), **named)


# -- rows ------------------------------------------------------------------------------


def _of_rows(index: Any) -> Any:
    """What an index says of rows, where it takes their elements as they are."""
    if isinstance(index, tuple) and 0 < len(index) <= 2:
        if all(map(_is_all, index[1:])):
            index = index[0]  # weight[row, :], weight[row, ...], weight[..., :]
    return slice(None) if index is ... else index


def _is_all(index: Any) -> bool:
    return index is ... or (isinstance(index, slice) and index == slice(None))


def _part(weight: RemoteWeight, index: Any) -> tuple[int, int] | None:
    """The rows that an index names, if they are a run."""
    table = weight._cpudist_table
    rows = table.rows
    if weight._cpudist_rows is not None:
        return weight._cpudist_rows if _is_all(index) else None
    index = _of_rows(index)
    if isinstance(index, torch.Tensor) and index.numel() == 1:
        if index.dtype in (torch.int64, torch.int32) and index.dim() == 0:
            index = int(index)
    if table.open is not None:  # its keys are no places in a range
        one = isinstance(index, int) and not isinstance(index, bool)
        return (index, index + 1) if one and -(2**63) <= index < 2**63 else None
    if isinstance(index, int) and not isinstance(index, bool):
        at = index + rows if index < 0 else index
        if not 0 <= at < rows:
            raise IndexError(f"row {index} is out of range: there are {rows}")
        return at, at + 1
    if isinstance(index, slice):
        begin, end, step = index.indices(rows)
        return (begin, max(begin, end)) if step == 1 else None
    return None


def _parts(weight: RemoteWeight, index: Any) -> list[tuple[int, int]] | None:
    """The runs of rows that are written by an index, a list of rows among them."""
    rows = _of_rows(index)
    if isinstance(rows, torch.Tensor) and rows.dim() == 1:
        if rows.dtype in (torch.int64, torch.int32):
            rows = rows.tolist()
    if not isinstance(rows, list):
        part = _part(weight, index)
        return None if part is None else [part]
    found = [_part(weight, row) if isinstance(row, int) else None for row in rows]
    known = [part for part in found if part is not None]
    return known if len(known) == len(rows) else None


def _indexing(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``weight[rows]``: what is done to them is recorded."""
    weight, index = args
    part = _part(weight, index) if isinstance(weight, RemoteWeight) else None
    if part is None:
        raise refusal(func, find(args))
    table = weight._cpudist_table
    with as_it_stands():
        # All rows share one memory; a key may be no place in the shape.
        row = weight.detach()[0 if table.open is not None else index]
        return marked(row, table, part)


def _check_fits(weight: RemoteWeight, value: torch.Tensor) -> None:
    """Refuses values of a shape that torch would not spread over rows."""
    dim = weight._cpudist_table.dim
    if value.shape[-1] not in (1, dim):
        raise InvalidArgumentError(
            f"rows of {weight._cpudist_table.describe()} were set to values of shape "
            f"{list(value.shape)}, expected a number, or {dim} or 1 in the last "
            "dimension. Nothing was recorded."
        )


def _setting_rows(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``weight[rows] = value``: a constant."""
    weight, index, value = args
    if not isinstance(weight, RemoteWeight) and isinstance(value, RemoteWeight):
        raise unreadable(func, value)
    parts = _parts(weight, index) if isinstance(weight, RemoteWeight) else None
    if parts is None or isinstance(value, RemoteWeight):
        raise refusal(func, find(args))
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        _check_fits(weight, value)
        low, high = torch.aminmax(value.detach())
        value = low if low == high else value
    number = _number(func, weight, value)
    table = weight._cpudist_table
    for begin, end in parts:
        with as_it_stands():
            some = marked(weight.detach(), table, (begin, end))
        _record(func, some, [("fill", number, 0.0)])
    return None


# -- which functions do what -----------------------------------------------------------


def _ways() -> dict[Function, Way]:
    """How each function is recorded."""
    tensor: Any = torch.Tensor
    normal = _recording("normal", ("mean", "std"), (0.0, 1.0))
    ways: dict[Function, Way] = {
        tensor.normal_: normal,
        nn.init.normal_: normal,
        tensor.uniform_: _recording("uniform", ("from", "to"), (0.0, 1.0)),
        nn.init.uniform_: _recording("uniform", ("a", "b"), (0.0, 1.0)),
        nn.init.kaiming_uniform_: _kaiming_uniform,
        tensor.fill_: _recording("fill", ("value",), (None,)),
        nn.init.constant_: _recording("fill", ("val",), (None,)),
        torch.fill_: _recording("fill", ("value",), (None,)),
        tensor.zero_: _recording("fill", (), ()),
        torch.zero_: _recording("fill", (), ()),
        tensor.erfinv_: _recording("erfinv", (), ()),
        tensor.clamp_: _clamping,
        tensor.clip_: _clamping,
        torch.clamp_: _clamping,
        torch.clip_: _clamping,
        tensor.__getitem__: _indexing,
        tensor.__setitem__: _setting_rows,
    }
    ways |= {getattr(tensor, name): _scaling for name in _SCALED}
    return ways


_SCALED: dict[str, Callable[[float], Step]] = {
    "mul_": lambda x: ("mul", x, 0.0),
    "__imul__": lambda x: ("mul", x, 0.0),
    "div_": lambda x: ("mul", 1.0 / x, 0.0),
    "add_": lambda x: ("add", x, 0.0),
    "__iadd__": lambda x: ("add", x, 0.0),
    "sub_": lambda x: ("add", -x, 0.0),
    "__isub__": lambda x: ("add", -x, 0.0),
}
WAYS.update(_ways())
WITHIN[_TRUNC_NORMAL.__code__] = _in_trunc_normal
