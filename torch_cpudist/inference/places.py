# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where the values of an export go in a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from torch_cpudist.errors import ModelChangedError, SnapshotError, UnsupportedModelError
from torch_cpudist.exports.layers import has_rows
from torch_cpudist.exports.reading import Export
from torch_cpudist.inference.slots import Slot, kind_of, slots_of
from torch_cpudist.log import logger
from torch_cpudist.tables.found import obstacle
from torch_cpudist.tables.local import EmbeddingModule, binding_of
from torch_cpudist.tables.remote_weight import RemoteWeight, is_remote, table_of


@dataclass
class RemotePlace:
    """A remote weight and the modules that look it up.

    Attributes:
        name: of its values in the export.
        names: all that the model has for it.
        weight: the parameter.
        modules: that have it.
    """

    name: str
    names: list[str]
    weight: RemoteWeight
    modules: list[EmbeddingModule] = field(default_factory=list)


@dataclass(frozen=True)
class Places:
    """Where everything of an export goes.

    Attributes:
        copied: by name, what is overwritten by a tensor of the model's file.
        filled: by a table's name, weights with rows in memory that get all its rows.
        tied: names in ``copied`` of one and the same parameter or buffer.
        mapped: remote weights of tables in files of rows.
        whole: remote weights of tables in the model's file.
    """

    copied: Mapping[str, Slot]
    filled: Mapping[str, Slot]
    tied: tuple[tuple[str, ...], ...]
    mapped: tuple[RemotePlace, ...]
    whole: tuple[RemotePlace, ...]


def remote_places(model: nn.Module) -> list[RemotePlace]:
    """The remote weights of a model, by the first name of each.

    Raises:
        UnsupportedModelError: a module cannot look up rows that are elsewhere.
    """
    found: dict[int, RemotePlace] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        weight = module._parameters.get("weight")
        if not is_remote(weight):
            continue
        name = f"{prefix}.weight" if prefix else "weight"
        place = found.setdefault(id(weight), RemotePlace(name, [], weight))
        place.names.append(name)
        if module in place.modules:
            continue
        place.modules.append(module)
        problem = obstacle(module, remote=True)
        if problem is not None:
            raise UnsupportedModelError(f"{name!r}: {problem[0]}. {problem[1]}")
    return list(found.values())


def plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model's ``state_dict()`` has.

    Raises:
        SnapshotError: something is no tensor of values.
    """
    found = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor) or value.is_meta:
            raise SnapshotError(
                f"export: {name!r} of the model's state_dict() is no tensor with "
                "values, and files have no more than these"
            )
        found[name] = value
    return found


def check_unbound(model: nn.Module, what: str) -> None:
    """Refuses a model whose lookups go elsewhere.

    Raises:
        ModelChangedError: an optimizer trains it, or it is loaded already.
    """
    for name, module in model.named_modules():
        if binding_of(module) is not None:
            raise ModelChangedError(
                f"{what}: lookups of {name!r} are answered by a DistributedOptimizer "
                "or by an export that was loaded before. close() that first, or build "
                "another model."
            )


def places_of(model: nn.Module, export: Export) -> Places:
    """Finds where everything goes; nothing is changed.

    Raises:
        SnapshotError: names or shapes differ; all differences are named.
        UnsupportedModelError: a module cannot look up rows that are elsewhere.
    """
    shapes = export.shapes()
    tables = {one.name: one for one in export.manifest.tables}
    problems: list[str] = []
    copied: dict[str, Slot] = {}
    filled: dict[str, Slot] = {}
    mapped: list[RemotePlace] = []
    whole: list[RemotePlace] = []
    used: set[str] = set()
    others = _other_names(model)
    for name, slot in _slots_of_state(model, problems).items():
        known = [n for n in others.get(name, ()) if n in shapes or n in tables]
        if name not in shapes and name not in tables and known:
            continue  # it comes by that name
        if name in shapes:
            _compare(problems, name, slot.shape, shapes[name])
            copied[name] = slot
        elif name in tables:
            one = tables[name]
            _compare(problems, name, slot.shape, (one.rows, one.dim))
            filled[name] = slot
        else:
            problems.append(f"{name} is not in the export")
    for place in remote_places(model):
        table = table_of(place.weight)
        known = [n for n in place.names if n in tables or n in shapes]
        used.update(known)
        if not known:
            problems.append(f"{place.name} is not in the export")
            continue
        if len(known) > 1 and (differing := untied(export, known)):
            problems.append(differing)
        place.name = known[0]
        if place.name in tables:
            one = tables[place.name]
            found: tuple[int, ...] = (one.rows, one.dim)
            mapped.append(place)
            if one.open != (table.open is not None):
                problems.append(
                    f"{place.name} is a table of any key in "
                    f"{'it' if one.open else 'the model'} only"
                )
        else:
            found = shapes[place.name]
            whole.append(place)
            if not has_rows(export, place.name):
                problems.append(f"{place.name} has no rows of float32 to look up")
        _compare(problems, place.name, (table.rows, table.dim), found)
    used |= copied.keys() | filled.keys()
    _compare_dtypes(problems, export, copied, filled)
    tied = _tied(copied, filled)
    problems += [text for names in tied if (text := untied(export, names))]
    problems += [f"{n} is not in the model" for n in {*shapes, *tables} - used]
    if problems:
        raise SnapshotError(
            f"export {export.folder.name} is of another model: "
            f"{'; '.join(sorted(problems))}. Nothing was changed. Build the model as "
            "it was trained."
        )
    return Places(copied, filled, tied, tuple(mapped), tuple(whole))


def _slots_of_state(model: nn.Module, problems: list[str]) -> dict[str, Slot]:
    """What ``state_dict()`` names, where the model has it."""
    slots = slots_of(model)
    found = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue
        if nn.parameter.is_lazy(value):
            problems.append(f"{name} has no shape yet: call the model once")
        elif value.is_meta:
            problems.append(f"{name} is on meta: call model.to_empty(device='cpu')")
        elif name not in slots or not _same(value, slots[name].now()):
            problems.append(
                f"{name} is made by a hook of state_dict(), and no parameter or buffer"
            )
        else:
            found[name] = slots[name]
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same values, one being a copy of the other perhaps."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _tied(
    copied: Mapping[str, Slot], filled: Mapping[str, Slot]
) -> tuple[tuple[str, ...], ...]:
    """Names, several each, of what is one in the model."""
    found: dict[int, list[str]] = {}
    for name, slot in (*copied.items(), *filled.items()):
        found.setdefault(id(slot.now()), []).append(name)
    return tuple(tuple(names) for names in found.values() if len(names) > 1)


def untied(export: Export, names: Sequence[str]) -> str | None:
    """What is wrong with values that are to be one in the model; ``None`` if nothing.

    Raises:
        SnapshotCorruptError: the model's file is not as it was written.
    """
    found = dict(export.tensors(names))
    first = found.get(names[0])
    for name in names[1:]:
        if first is None or name not in found or not _same(first, found[name]):
            return f"{names[0]} and {name} are one in the model, and differ in it"
    return None


def _compare_dtypes(
    problems: list[str],
    export: Export,
    copied: Mapping[str, Slot],
    filled: Mapping[str, Slot],
) -> None:
    """Refuses numbers of another kind; warns of those that are rounded."""
    dtypes = export.dtypes()
    rounded = []
    for name, slot in (*copied.items(), *filled.items()):
        here, there = slot.dtype, dtypes.get(name, torch.float32)
        if kind_of(here) != kind_of(there):
            problems.append(f"{name} is {here} in the model, {there} in it")
        elif here != there and here.itemsize <= there.itemsize:
            rounded.append(f"{name} ({there} in it, {here} in the model)")
    if rounded and not problems:
        logger.warning(
            "load_for_inference: export %s has more bits than the model: %s",
            export.folder.name,
            ", ".join(rounded),
        )


def _other_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by each of them."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {name: names for names in found.values() for name in names}


def _compare(
    problems: list[str], name: str, here: tuple[int, ...], there: tuple[int, ...]
) -> None:
    if here != there:
        problems.append(f"{name} is {list(here)} in the model, {list(there)} in it")
