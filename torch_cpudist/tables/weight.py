# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The weight of a table, while it is a cache of rows that servers update.

After a step the rows in it are those of earlier lookups. Whoever reads it other than
through a lookup (an average of weights, a copy, a checkpoint) gets the servers' rows:
torch tells a subclass of ``Tensor`` which function is called on it, and the ones that
look at values bring the rows in first.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import nn

Function = Callable[..., Any]

_OF_TORCH_ITSELF = (torch.Tensor, nn.Parameter)

#: While it is entered, functions see a table's weight as the plain tensor that it is.
as_it_stands = torch._C.DisableTorchFunctionSubclass


class Rows(Protocol):
    """Where the rows of a weight come from."""

    def read(self, keys: torch.Tensor | None = None) -> None:
        """Brings in the rows of int64 ``keys``, or all, unless they are here."""

    def written(self) -> None:
        """Notes that somebody wrote the weight, through an alias too."""


class TableWeight(torch.Tensor):
    """A parameter, or an alias of one, whose rows are brought in when they are read.

    ``detach()`` and ``.data`` give such an alias, every other function what it gives
    for a plain tensor. Not seen, as torch does not tell of them: ``torch.tensor(w)``,
    memory that numpy or an address has seen before, and views (``w.view(-1)``, ``w.T``)
    that were made before a step.

    Cost: some microseconds a call, besides the rows that it brings.
    """

    _cpudist_rows: Rows
    _is_param: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls ``func`` once the rows are here that it looks at."""
        named = kwargs or {}
        if torch.compiler.is_compiling():
            return in_graph(_is_blind, _used, func, args, named)
        how: Function = _HOW.get(func, _reading)
        # torch names its own among them in what is written in Python.
        if any(one not in (TableWeight, *_OF_TORCH_ITSELF) for one in types):
            # Another subclass has its say, too.
            bring_in = _bring_in_ids if how is _looking_up else _bring_in
            bring_in(args, named)
            return func(*_plain(args), **_plain(dict(named)))
        return how(func, args, named)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain parameter, or tensor, of its own."""
        if id(self) not in memo:
            self._cpudist_rows.read()
            memo[id(self)] = self._like(values_of(self).clone())
        return cast(torch.Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a plain parameter, or tensor."""
        self._cpudist_rows.read()
        return self._like(values_of(self)).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _like(self, values: torch.Tensor) -> torch.Tensor:
        with as_it_stands():
            if isinstance(self, nn.Parameter):
                return nn.Parameter(values, requires_grad=self.requires_grad)
            return values


def values_of(weight: torch.Tensor) -> torch.Tensor:
    """A plain alias of a table's weight, with the rows as they stand."""
    with as_it_stands():
        return weight.detach()


def watch(weight: nn.Parameter, rows: Rows) -> None:
    """Makes who reads ``weight`` get current rows; the parameter stays the same one."""
    made = cast(TableWeight, weight)
    made.__class__ = TableWeight
    made._cpudist_rows = rows
    made._is_param = True  # isinstance(weight, nn.Parameter) asks for it


def unwatch(weight: nn.Parameter, rows: Rows) -> None:
    """Makes ``weight`` a plain parameter again, if ``rows`` were its. Idempotent."""
    if isinstance(weight, TableWeight) and weight._cpudist_rows is rows:
        del weight._cpudist_rows, weight._is_param
        weight.__class__ = nn.Parameter  # type: ignore[assignment]


# -- what functions look at ------------------------------------------------------------


def _tables(values: Any) -> Iterator[TableWeight]:
    if isinstance(values, TableWeight):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tables(value)
    elif isinstance(values, Mapping):
        yield from _tables(list(values.values()))


def _bring_in(args: Any, kwargs: Mapping[str, Any]) -> None:
    for weight in _tables((args, kwargs)):
        weight._cpudist_rows.read()


def _plain(values: Any) -> Any:
    """``values`` with plain tensors, of the same memory and autograd graph."""
    if isinstance(values, TableWeight):
        with as_it_stands():
            return values.as_subclass(torch.Tensor)
    if type(values) in (list, tuple):
        return type(values)(_plain(value) for value in values)
    if type(values) is dict:
        return {name: _plain(value) for name, value in values.items()}
    return values


def _called(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of functions that look at no value."""
    with as_it_stands():
        return func(*args, **kwargs)


def _reading(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of all that is not known to look at none, or at some only."""
    _bring_in(args, kwargs)
    made = _called(func, args, kwargs)
    if _IN_PLACE.fullmatch(getattr(func, "__name__", "")):
        _note_written(args[:1])
    if "out" in kwargs:
        _note_written(kwargs["out"])
    return made


def _note_written(values: Any) -> None:
    # torch counts no write through `.data`.
    for weight in _tables(values):
        weight._cpudist_rows.written()


def _aliasing(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of what gives the same memory: whose values are read later, if at all."""
    (weight,) = _tables((args, kwargs))
    with as_it_stands():
        made = func(*args, **kwargs).as_subclass(TableWeight)
    made._cpudist_rows = weight._cpudist_rows
    return made


def _detaching(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``.data``: torch counts no write through it, nor through views of it."""
    return _aliasing(torch.Tensor.detach, args, kwargs)


def _writing(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of what overwrites the first argument; others are read."""
    _bring_in(args[1:], kwargs)
    made = _called(func, args, kwargs)
    _note_written(args[:1])
    return made


def _converting(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of what gives the tensor itself where nothing is to be converted."""
    made = _called(func, args, kwargs)
    if made is args[0] or not isinstance(made, torch.Tensor):
        return made
    return _reading(func, args, kwargs)


def _bring_in_ids(args: Any, kwargs: Mapping[str, Any]) -> None:
    tensors = [*args, *kwargs.values()]
    ids = [t for t in tensors if isinstance(t, torch.Tensor) and _are_ids(t)]
    for weight in _tables(tensors):
        _read_some(weight, ids[0].flatten() if ids else None)


def _looking_up(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of torch's lookups, on the weight and not through the module.

    The values are right; a gradient of them is refused by ``step()``.
    """
    _bring_in_ids(args, kwargs)
    return _called(func, args, kwargs)


def _are_ids(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32) and tensor.device.type == "cpu"


def _indexing(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``weight[...]``, whose first index often says which rows."""
    weight, index = args
    if not isinstance(weight, TableWeight):
        return _reading(func, args, kwargs)
    first = index[0] if isinstance(index, tuple) and index else index
    _read_some(weight, _indexed(weight, first))
    return _called(func, args, kwargs)


def _indexed(weight: TableWeight, index: Any) -> torch.Tensor | None:
    """The rows that an index names; ``None`` where it may be any."""
    rows = weight.shape[0]
    if isinstance(index, slice):
        return torch.arange(*index.indices(rows), device="cpu")
    if isinstance(index, int) and not isinstance(index, bool):
        index = torch.tensor([index], device="cpu")
    if not (isinstance(index, torch.Tensor) and _are_ids(index)):
        return None
    flat = index.flatten()
    return torch.where(flat < 0, flat + rows, flat)


def _read_some(weight: TableWeight, ids: torch.Tensor | None) -> None:
    if ids is None:
        weight._cpudist_rows.read()
        return
    ids = ids.to(torch.int64)
    # torch says what is wrong with ids outside.
    inside = ids[(ids >= 0) & (ids < weight.shape[0])]
    weight._cpudist_rows.read(torch.unique(inside))


def _setting(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``tensor.attribute = value``: a table's memory may go to another tensor."""
    if not isinstance(args[0], TableWeight):
        _bring_in(args[1:], kwargs)
    return _called(func, args, kwargs)


def _placing(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of ``weight.data = other``: a move of the same values, or a write of others."""
    weight, other = args[:2]
    its_own = isinstance(weight, TableWeight) and isinstance(weight, nn.Parameter)
    with as_it_stands():
        written = its_own and _differ(weight, other)
    made = _setting(func, args, kwargs)
    if written:
        weight._cpudist_rows.written()
    return made


def _differ(weight: torch.Tensor, other: Any) -> bool:
    """Whether memory for a weight has other rows; what does not fit is refused later.

    By bits, as rows may hold what is no number.
    """
    fits = isinstance(other, torch.Tensor) and all(
        getattr(weight, name) == getattr(other, name)
        for name in ("shape", "dtype", "device", "layout")
    )
    return fits and not torch.equal(
        weight.detach().view(torch.int32),
        other.detach().resolve_neg().view(torch.int32),
    )


def in_graph(
    is_blind: Callable[[Function], bool],
    call: Function,
    func: Function,
    args: Any,
    kwargs: Mapping[str, Any],
) -> Any:
    """While torch.compile looks: what uses values is called outside of the graph.

    Args:
        is_blind: whether a function looks at no value, which goes into the graph.
        call: how others are called.
        func: what was called.
        args: its arguments.
        kwargs: its named arguments.
    """
    from torch_cpudist.tables import graphs  # which imports the compiler

    if not graphs.is_true(is_blind, func):
        return graphs.outside(call, func, args, kwargs)
    with as_it_stands():
        return func(*args, **kwargs)


def _is_blind(func: Function) -> bool:
    return func in _BLIND


def _used(func: Function, args: Any, kwargs: Mapping[str, Any]) -> Any:
    how: Function = _HOW.get(func, _reading)
    return how(func, args, kwargs)


# -- which functions do what -----------------------------------------------------------

# `add_`, `_foreach_mul_`, `__iadd__`; not `__add__`.
_IN_PLACE = re.compile(r"(?!__).*[^_]_|__i(add|sub|mul|div|truediv|floordiv|mod|pow)__")
_VIEWS = frozenset({"T", "H", "mT", "mH", "real", "imag"})
_METADATA = (
    "size stride storage_offset dim ndimension numel nelement element_size data_ptr "
    "is_contiguous is_floating_point is_complex is_signed is_conj is_neg is_inference "
    "is_pinned is_shared is_same_size is_set_to is_coalesced get_device dim_order "
    "storage_type untyped_storage storage _typed_storage _is_view __len__ __hash__ "
    "requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook "
    "share_memory_ has_names new_empty new_zeros new_ones new_full new_tensor "
    "new_empty_strided __dlpack_device__ __dir__ resolve_conj resolve_neg "
    "_clear_non_serializable_cached_data backward detach_"
)
_OF_TORCH = (
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like "
    "is_floating_point is_complex is_signed is_conj is_neg is_inference is_same_size "
    "numel result_type can_cast _has_compatible_shallow_copy_type"
)
_WRITES = (
    "copy_ fill_ zero_ normal_ uniform_ random_ exponential_ bernoulli_ log_normal_ "
    "geometric_ cauchy_ set_ __setitem__ index_copy_ index_fill_ index_put_ "
    "masked_fill_ masked_scatter_ scatter_ put_ fill_diagonal_"
)
_CONVERSIONS = "to cpu cuda float double half bfloat16 type type_as contiguous"


def _of(owner: Any, names: str) -> Iterator[Function]:
    return (getattr(owner, name) for name in names.split() if hasattr(owner, name))


def _ways() -> dict[Function, Callable[..., Any]]:
    """How each function is treated; one that is not here reads every row."""
    ways: dict[Function, Callable[..., Any]] = {}
    for name, found in vars(torch._C.TensorBase).items():
        if isinstance(found, types.GetSetDescriptorType) and name not in _VIEWS:
            ways[found.__get__] = _called
            ways[found.__set__] = _setting
            ways[found.__delete__] = _called
    ways |= dict.fromkeys(_of(torch.Tensor, _METADATA), _called)
    ways |= dict.fromkeys(_of(torch, _OF_TORCH), _called)
    ways |= dict.fromkeys((torch.autograd.grad, torch.autograd.backward), _called)
    ways |= dict.fromkeys(_of(torch.Tensor, _WRITES), _writing)
    ways |= dict.fromkeys(_of(torch.Tensor, _CONVERSIONS), _converting)
    for alias in (torch.Tensor.detach, torch.detach):
        ways[alias] = _aliasing
    ways[torch.Tensor.data.__get__] = _detaching  # type: ignore[attr-defined]
    ways[torch.Tensor.data.__set__] = _placing  # type: ignore[attr-defined]
    for lookup in (
        nn.functional.embedding,
        nn.functional.embedding_bag,
        torch.embedding,
        torch.embedding_bag,
        # What graphs call that no compiler has taken apart.
        torch.ops.aten.embedding.default,
        torch.ops.aten._embedding_bag.default,
        torch.ops.aten._embedding_bag_forward_only.default,
    ):
        ways[lookup] = _looking_up
    ways[torch.Tensor.__getitem__] = _indexing
    return ways


_HOW = _ways()
_BLIND = {func for func, how in _HOW.items() if how in (_called, _setting, _placing)}


def blind(func: Function) -> bool:
    """Whether ``func`` looks at no value of a tensor."""
    return func in _BLIND


def is_in_place(name: str) -> bool:
    """Whether a function of this name writes the tensor that it is called on."""
    return _IN_PLACE.fullmatch(name) is not None


def looks_at_no_rows(*functions: Function) -> None:
    """Says of functions that they bring in themselves what they look at."""
    for function in functions:
        _HOW[function] = _called
        _BLIND.add(function)
