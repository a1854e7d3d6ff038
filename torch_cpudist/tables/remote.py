# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one context, the modules that are built in it, and what it says of them
"""Building models whose large tables have no rows on the trainer."""

from __future__ import annotations

import fnmatch
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_cpudist.errors import InvalidArgumentError, RemoteTableError
from torch_cpudist.log import logger
from torch_cpudist.tables import (  # noqa: F401  (register themselves)
    remote_calls,
    remote_initialisers,
)
from torch_cpudist.tables.initial import Program
from torch_cpudist.tables.remote_table import LEFT_OUT, ROWS_ELSEWHERE, RemoteTable
from torch_cpudist.tables.remote_weight import (
    RemoteWeight,
    become_local,
    is_remote,
    past_modes,
    table_of,
    weight_of,
)

_entered = threading.local()
_HOLDERS = (nn.ParameterList, nn.ParameterDict)
# What assigns a loaded parameter, and the calls from there to the hooks of parameters.
_LOADING = nn.Module._load_from_state_dict.__code__
_FRAMES_OF_ASSIGNMENT = 6
_MAKERS = {nn.Embedding.__init__.__code__, nn.EmbeddingBag.__init__.__code__}


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a weight is meant: its own name, or that of its module, is matched."""
    names = name, name.removesuffix(".weight")
    return any(fnmatch.fnmatchcase(one, p) for one in names for p in patterns)


@contextmanager
def remote_tables(
    *, min_rows: int | None = None, names: Sequence[str] = ()
) -> Iterator[None]:
    """While it is entered, large embeddings are made without rows on this trainer.

    For ``nn.Embedding`` and ``nn.EmbeddingBag``, and whatever is built of them, without
    a change to the model. Their weights keep shape, name and place in ``parameters()``;
    initialisers that run on them, here or later, are recorded and done by the servers,
    by key: a row comes into being there with its first gradient. Optimizers are built
    over them as usual and need no memory for them. Look rows up after wrapping the
    optimizer in ``DistributedOptimizer`` (``Sync``, ``HalfAsync``, ``Async``, or
    ``Hybrid`` with one of these for tables), or, without a cluster, after
    ``load_for_inference``, which answers them from an export.

    The initial values are those of trainer 0's recorded initialiser and seed, which
    ``torch.manual_seed`` repeats. Their rows are in no ``state_dict()``: snapshots have
    them, and exports. Where nothing is remote at the end, or embeddings of ``min_rows``
    rows are not, a warning names them. Thread safety: for models built in this thread.

    Args:
        min_rows: embeddings with at least so many rows, >= 1.
        names: patterns (``fnmatch``) of parameters or modules, as
            ``model.named_modules()`` of what is built here says; these are remote
            whatever their size. The others are filled when the context ends, with
            values of torch's distributions that are not those torch would have drawn.

    Raises:
        InvalidArgumentError: neither is given; no embedding is named so; one context
            inside of another.
        UnsupportedModelError: on an initialiser that servers cannot do by key.
        RemoteTableError: on what would need the rows of such a weight; ``names`` fits
            an embedding that was given its weight, is no float32, or is on meta.
    """
    if isinstance(names, str) or (min_rows is None and not names):
        raise InvalidArgumentError(
            "remote_tables: expected min_rows= (1_000_000, say), or names= as a "
            f"sequence of patterns, found min_rows={min_rows!r}, names={names!r}"
        )
    if min_rows is not None and (type(min_rows) is not int or min_rows < 1):
        raise InvalidArgumentError(
            f"remote_tables: min_rows must be a whole number >= 1, got {min_rows!r}"
        )
    if _tree_of_now() is not None:
        raise InvalidArgumentError(
            "remote_tables: it is entered already in this thread. Say all that is to "
            "be remote in one: names= and min_rows= may stand together."
        )
    _entered.tree = tree = _Tree()
    try:
        with _Making(min_rows, tuple(names)) as making:
            yield
    finally:
        _entered.tree = None
    making.settle(tree)


class _Making(TorchFunctionMode):
    """Answers ``torch.empty`` of embeddings that are being built."""

    def __init__(self, min_rows: int | None, names: Sequence[str]) -> None:
        super().__init__()
        self._min_rows = min_rows
        self._names = names

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Gives a remote weight where one is asked for."""
        named = kwargs or {}
        if func is torch.empty and _for_embedding(sys._getframe(1)):
            made = self._made(*args, **named)
            if made is not None:
                return made
        return func(*args, **named)

    def _made(self, size: Any, **options: Any) -> RemoteWeight | None:
        device = options.get("device")
        if device is not None and torch.device(device).type == "meta":
            return None
        rows, dim = size
        if not self._names and (self._min_rows is None or rows < self._min_rows):
            return None
        dtype = options.get("dtype") or torch.get_default_dtype()
        if dtype != torch.float32:
            if not self._large(rows):
                return None
            raise RemoteTableError(
                f"remote_tables: an embedding of {rows} rows is {dtype}; tables on "
                "servers are float32. Build it with dtype=torch.float32."
            )
        table = RemoteTable(rows, dim, Program())
        table.undecided = not self._large(rows)
        return weight_of(table)

    def _large(self, rows: int) -> bool:
        return self._min_rows is not None and rows >= self._min_rows

    def settle(self, tree: _Tree) -> None:
        """Fills what is neither large nor named; says what is remote.

        Raises:
            InvalidArgumentError: a name fits nothing.
            RemoteTableError: a name fits what cannot be remote here.
        """
        for name, module in tree.static():
            if matches(name, self._names):
                raise RemoteTableError(_why_static(name, module))
        # Several models may have the same names.
        found = list(tree.remote())
        names = list(dict.fromkeys(name for name, _ in found))
        for pattern in self._names:
            if not any(matches(name, [pattern]) for name in names):
                raise InvalidArgumentError(
                    f"remote_tables: no embedding is named {pattern!r}; there are "
                    f"{', '.join(map(repr, names)) or 'none'}. Patterns are of "
                    "parameters or modules, as named_modules() of the model says that "
                    "is built in the context."
                )
        self._tell_static(
            tree, any(self._large(table_of(weight).rows) for _, weight in found)
        )
        kept: set[int] = set()
        for name, weight in found:
            table = table_of(weight)
            named = matches(name, self._names)
            if named or self._large(table.rows) or table.open is not None:
                kept.add(id(weight))
                table.undecided = False
                table.name = table.name or name
                logger.info("%s: dim %d", table.describe(), table.dim)
        for _, weight in found:
            if id(weight) not in kept:
                kept.add(id(weight))
                become_local(weight)
        tree.mark_sparse()

    def _tell_static(self, tree: _Tree, some_are_large: bool) -> None:
        """Warns of what is as large as min_rows= says and stays on this trainer."""
        if self._min_rows is None:
            return
        static = {id(module): (name, module) for name, module in tree.static()}
        large = [one for one in static.values() if self._large(_rows_of(one[1]))]
        begin = f"remote_tables(min_rows={self._min_rows}):"
        if large:
            told = ", ".join(f"{name!r} ({_cause(module)})" for name, module in large)
            logger.warning(
                "%s embeddings of so many rows keep them on this trainer: %s. To have "
                "them on the servers call cpudist.shard_tables(model, remote=%s) after "
                "the context, which stores their values when the optimizer is wrapped, "
                "with initial=cpudist.Normal(...) where they have none yet.",
                begin,
                told,
                [name for name, _ in large],
            )
        elif not some_are_large and not self._names:
            why = _why_none(tree, self._min_rows)
            logger.warning("%s nothing is remote. %s", begin, why)


def _why_none(tree: _Tree, min_rows: int) -> str:
    """What was built where no embedding has so many rows, and the way out."""
    if tree.is_empty():
        return (
            "No module was built in the context: build the model in it, or call "
            "cpudist.shard_tables(model, remote=True) for one that is there."
        )
    why = "No nn.Embedding or nn.EmbeddingBag was built in the context."
    embeddings = [(_rows_of(module), name) for name, module in tree.static()]
    if embeddings:
        rows, name = max(embeddings)
        why = (
            f"The largest embedding is {name!r} with {rows} rows: give a lower "
            f"min_rows=, or names=[{name!r}]."
        )
    own = ", ".join(map(repr, tree.own_parameters(min_rows)))
    if own:
        why += (
            f" Parameters of modules of your own are no tables ({own}): hold such "
            "rows in an nn.Embedding and look them up by calling it."
        )
    return why


def _rows_of(module: nn.Embedding | nn.EmbeddingBag) -> int:
    weight = module._parameters.get("weight")
    return module.num_embeddings if weight is None else weight.shape[0]


def _cause(module: nn.Embedding | nn.EmbeddingBag) -> str:
    """Why an embedding has rows here, in some words."""
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed, not a parameter"
    if weight.is_meta:
        return "it is on meta, where initialisers leave no trace"
    if weight.dtype != torch.float32:
        return f"it is {weight.dtype}; tables on servers are float32"
    return (
        "it was given its weight, as by from_pretrained, _weight=, skip_init or an "
        "assignment, or was built outside of the context"
    )


def _why_static(name: str, module: nn.Embedding | nn.EmbeddingBag) -> str:
    """Why an embedding that names= fits has rows here, and the way out."""
    made = f"remote_tables: names= fits {name!r}, which has rows on this trainer: "
    weight = module._parameters.get("weight")
    sharded = f"cpudist.shard_tables(model, remote=[{name!r}]"
    if weight is None:
        return f"{made}its weight is computed, not a parameter. Leave it out of names=."
    if weight.is_meta:
        return (
            f"{made}it is on meta, where initialisers leave no trace. After the "
            f"context call {sharded}, initial=cpudist.Normal(...)), or build it "
            "without device='meta'."
        )
    if weight.dtype != torch.float32:
        return (
            f"{made}it is {weight.dtype}; tables on servers are float32. Build it with "
            "dtype=torch.float32, or leave it out of names=."
        )
    return (
        f"{made}it was given its weight (from_pretrained, _weight=, an assignment) or "
        f"was built outside of the context. Leave it out of names=, and call {sharded})"
        " afterwards, which stores its values on the servers when the optimizer is "
        "wrapped."
    )


def _for_embedding(frame: FrameType | None) -> bool:
    """Whether a call comes from the constructor of torch's embeddings."""
    caller = past_modes(frame)
    return caller is not None and caller.f_code in _MAKERS


class _Tree:
    """The modules that are built in one thread while its context is entered."""

    def __init__(self) -> None:
        self._owners: list[nn.Module] = []
        self._children: set[int] = set()

    def add_module(self, parent: nn.Module, child: nn.Module) -> None:
        """``parent`` gets a module."""
        self._owners.append(parent)
        self._children.add(id(child))
        # Alive, so that no other has its id.
        self._owners.append(child)

    def add_parameter(self, owner: nn.Module) -> None:
        """``owner`` gets a parameter."""
        self._owners.append(owner)

    def is_empty(self) -> bool:
        """Whether nothing was built."""
        return not self._owners

    def own_parameters(self, rows: int) -> Iterator[str]:
        """Names of matrices of so many rows that no module of torch holds."""
        for root in self._roots():
            for prefix, module in root.named_modules():
                of_torch = type(module).__module__.startswith("torch.nn.modules.")
                if of_torch and not isinstance(module, _HOLDERS):
                    continue
                for name, parameter in module._parameters.items():
                    if parameter is None or nn.parameter.is_lazy(parameter):
                        continue
                    if parameter.dim() == 2 and parameter.shape[0] >= rows:
                        yield f"{prefix}.{name}" if prefix else name

    def mark_sparse(self) -> None:
        """Makes every embedding of a remote weight say what its gradient is."""
        for owner in self._owners:
            if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
                owner.sparse = owner.sparse or is_remote(owner.weight)

    def remote(self) -> Iterator[tuple[str, RemoteWeight]]:
        """Names and weights of the remote tables, by the models that they are in."""
        for root in self._roots():
            for name, parameter in root.named_parameters(remove_duplicate=False):
                if isinstance(parameter, RemoteWeight):
                    yield name, parameter

    def static(self) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
        """Embeddings with rows here, by the names of their weights."""
        for root in self._roots():
            for name, module in root.named_modules(remove_duplicate=False):
                if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                    continue
                if not is_remote(module._parameters.get("weight")):
                    yield f"{name}.weight" if name else "weight", module

    def _roots(self) -> Iterator[nn.Module]:
        roots = {id(o): o for o in self._owners if id(o) not in self._children}
        yield from roots.values()


def _tree_of_now() -> _Tree | None:
    """Of the context that this thread has entered."""
    return getattr(_entered, "tree", None)


# -- what modules are told of ----------------------------------------------------------


def _on_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    tree = _tree_of_now()
    if tree is not None and child is not None:
        tree.add_module(parent, child)


def _on_parameter(owner: nn.Module, name: str, parameter: Any) -> None:
    tree = _tree_of_now()
    if tree is not None:
        tree.add_parameter(owner)
    if is_remote(parameter):
        _check_not_assigned(owner, name, parameter)
        keep_out_of_state(owner)


def _check_not_assigned(owner: nn.Module, name: str, weight: torch.Tensor) -> None:
    """Refuses ``load_state_dict(assign=True)`` of a weight without rows over others.

    Raises:
        RemoteTableError: it is called now.
    """
    if is_remote(owner._parameters.get(name)):
        return
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_OF_ASSIGNMENT):
        if frame is None:
            return
        if frame.f_code is _LOADING:
            raise RemoteTableError(
                f"load_state_dict(assign=True) was given the weight of "
                f"{table_of(weight).describe()}, which has no rows here, for {name!r}, "
                f"whose rows are on this trainer. {ROWS_ELSEWHERE}"
            )
        frame = frame.f_back


# For the life of the process: torch goes through its hooks in every thread that builds
# a model, and fails where one comes or goes meanwhile.
torch.nn.modules.module.register_module_module_registration_hook(_on_module)
torch.nn.modules.module.register_module_parameter_registration_hook(_on_parameter)


# -- what modules save and load --------------------------------------------------------


def keep_out_of_state(module: nn.Module) -> None:
    """Makes a module save and load its state without remote weights. Idempotent."""
    if _leave_out not in module._state_dict_hooks.values():
        module._register_state_dict_hook(_leave_out)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_need_not)  # type: ignore[no-untyped-call]


def _leave_out(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for name, parameter in module._parameters.items():
        if not is_remote(parameter) or prefix + name not in state:
            continue
        del state[prefix + name]
        metadata.setdefault(LEFT_OUT, []).append(name)
        table = table_of(parameter)
        if not table.told:
            table.told = True
            logger.info(
                "%s: its rows are in no state_dict(); snapshots have them, "
                "see opt.resume()",
                table.describe(),
            )


def _need_not(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        if not is_remote(parameter):
            continue
        given = state.setdefault(prefix + name, parameter)
        if not is_remote(given):
            raise RemoteTableError(
                f"load_state_dict has rows for {prefix + name!r}, but "
                f"{table_of(parameter).describe()} has none here. Load into "
                "a model whose table is static and pass that to cpudist.shard_tables("
                "model, remote=[...]) before wrapping, which stores and frees it; or "
                "leave the key out."
            )
