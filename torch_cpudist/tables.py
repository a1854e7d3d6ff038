# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sparse tables: which embeddings are tables, and how a lookup brings in its rows.

A table is the weight of an ``nn.Embedding`` or ``nn.EmbeddingBag`` with
``sparse=True``. While an optimizer is wrapped, such a module's class is a subclass of
its own class whose forward pulls the batch's rows into the weight before the lookup. A
class, not a forward hook: compiled code skips hooks, but guards the class.
"""

from __future__ import annotations

import copyreg
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn

from torch_cpudist.errors import UnsupportedModelError
from torch_cpudist.table_ops import TableBinding

EmbeddingModule = nn.Embedding | nn.EmbeddingBag
ModuleT = TypeVar("ModuleT", bound=nn.Module)

logger = logging.getLogger("torch_cpudist")


class _PullingModule:
    """Mixed in before an embedding's own class while its table lives on servers."""

    _cpudist_binding: TableBinding
    _cpudist_handle: int
    _cpudist_plain_lookup: bool
    padding_idx: int | None
    weight: nn.Parameter

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Pulls the batch's rows, then looks them up as the module's own class does."""
        if not torch.compiler.is_compiling():
            self._cpudist_binding.pull(input)
        elif self._cpudist_plain_lookup:
            padding_idx = -1 if self.padding_idx is None else self.padding_idx
            return torch.ops.torch_cpudist.lookup(  # type: ignore[no-any-return]
                self.weight, input, self._cpudist_handle, padding_idx
            )
        else:
            input = torch.ops.torch_cpudist.pull(input, self._cpudist_handle)
        result: torch.Tensor = super().forward(input, *args, **kwargs)  # type: ignore[misc]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and saved models are plain modules, without servers."""
        state = {
            k: v for k, v in self.__dict__.items() if not k.startswith("_cpudist_")
        }
        # The standard library only: a saved model loads without this package.
        make = copyreg._reconstructor  # type: ignore[attr-defined]
        return make, (plain_class(self), object, None), state


_pulling_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def plain_class(module: object) -> type:
    """Returns the class a module had before its table moved to servers."""
    kind = type(module)
    if issubclass(kind, _PullingModule):
        plain: type = kind.__bases__[1]
        return plain
    return kind


def _pulling_class(kind: type) -> type:
    if kind not in _pulling_classes:
        _pulling_classes[kind] = type(kind.__name__, (_PullingModule, kind), {})
    return _pulling_classes[kind]


def attach(module: EmbeddingModule, binding: TableBinding) -> None:
    """Makes a module's lookups pull their rows."""
    object.__setattr__(module, "_cpudist_binding", binding)
    object.__setattr__(module, "_cpudist_handle", binding.handle)
    plain = cast(type[nn.Module], plain_class(module))
    plain_lookup = plain.forward is nn.Embedding.forward
    object.__setattr__(module, "_cpudist_plain_lookup", plain_lookup)
    module.__class__ = _pulling_class(plain)


def detach(module: EmbeddingModule) -> None:
    """Gives a module its own class back; its weight stays as it is."""
    if isinstance(module, _PullingModule):
        module.__class__ = plain_class(module)
        for name in [n for n in module.__dict__ if n.startswith("_cpudist_")]:
            del module.__dict__[name]


@dataclass
class FoundTable:
    """A weight that is a table, and every module that looks it up."""

    name: str
    weight: nn.Parameter
    modules: list[EmbeddingModule] = field(default_factory=list)


def _refuse(name: str, found: str, remedy: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name!r} cannot be a table: {found}. {remedy}")


def _check_table(table: FoundTable) -> None:
    weight, name = table.weight, table.name
    if any(not module.sparse for module in table.modules):
        raise _refuse(
            name,
            "some of the modules that share this weight have sparse=True and some not",
            "Set sparse=True on all of them (cpudist.shard_tables does) or on none.",
        )
    if any(module.max_norm is not None for module in table.modules):
        raise _refuse(
            name,
            "max_norm rewrites rows on the trainer during a lookup",
            "Set max_norm=None, or sparse=False to keep the table on every trainer.",
        )
    if weight.dtype != torch.float32:
        raise _refuse(
            name, f"its dtype is {weight.dtype}, expected torch.float32", "Convert it."
        )
    if weight.device.type != "cpu" or not weight.is_contiguous():
        raise _refuse(
            name,
            f"it is on {weight.device}, contiguous={weight.is_contiguous()}; expected "
            "a "
            "contiguous tensor on the CPU",
            "Move it with weight.data = weight.data.cpu().contiguous().",
        )


def find_tables(model: nn.Module, trained: set[int]) -> list[FoundTable]:
    """Finds the tables of a model: sparse embedding weights that the optimizer trains.

    Args:
        model: any module.
        trained: ``id`` of every parameter of the optimizer.

    Returns:
        One entry per weight, in the order of the model's modules.

    Raises:
        UnsupportedModelError: a sparse embedding cannot be a table, with the reason.
    """
    found: dict[int, FoundTable] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        weight = module.weight
        if id(weight) not in trained or not weight.requires_grad:
            continue
        name = f"{prefix}.weight" if prefix else "weight"
        table = found.setdefault(
            id(weight), FoundTable(name, cast(nn.Parameter, weight))
        )
        table.modules.append(module)
    tables = [t for t in found.values() if any(module.sparse for module in t.modules)]
    for table in tables:
        _check_table(table)
    return tables


def _why_not_sparse(module: EmbeddingModule, min_rows: int) -> str | None:
    if module.num_embeddings < min_rows:
        return f"{module.num_embeddings} rows are fewer than min_rows={min_rows}"
    if module.max_norm is not None:
        return "max_norm rewrites rows during a lookup"
    if module.scale_grad_by_freq:
        return "torch has no sparse gradient with scale_grad_by_freq"
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        return "torch has no sparse gradient for mode='max'"
    if module.weight.dtype != torch.float32:
        return f"tables are float32, this is {module.weight.dtype}"
    return None


def shard_tables(
    model: ModuleT,
    min_rows: int = 10_000,
    report: Callable[[str], None] | None = None,
) -> ModuleT:
    """Marks a model's large embeddings as tables, by setting ``sparse=True`` on them.

    Local, no messages. Call it before building the optimizer: torch's Adam and AdamW,
    say, refuse nothing at that point, but a table's optimizer must be one the servers
    run.

    Args:
        model: changed in place.
        min_rows: embeddings with fewer rows stay dense, >= 0.
        report: called with one line per embedding found; default: the ``torch_cpudist``
            logger at ``info`` (``CPUDIST_LOG=info``).

    Returns:
        The same model.

    Raises:
        ValueError: ``min_rows`` is negative.
    """
    if min_rows < 0:
        raise ValueError(f"shard_tables: min_rows must be >= 0, got {min_rows}")
    say = report if report is not None else logger.info
    shared: dict[int, list[tuple[str, EmbeddingModule]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            shared.setdefault(id(module.weight), []).append((name, module))
    for modules in shared.values():
        reasons = [_why_not_sparse(module, min_rows) for _, module in modules]
        reason = next((r for r in reasons if r is not None), None)
        names = ", ".join(repr(name) for name, _ in modules)
        rows, dim = modules[0][1].weight.shape
        if reason is None:
            for _, module in modules:
                module.sparse = True
            say(f"{names}: table of {rows} rows, dim {dim}")
        else:
            say(f"{names}: stays dense: {reason}")
    return model
