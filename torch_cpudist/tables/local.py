# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How a lookup brings in its rows, where the whole weight is a cache of them.

While an optimizer is wrapped, the class of a table's module is a subclass of its own
class in which a forward that pulls the batch's rows stands directly before torch's:
below a forward of the user's own, which may change the ids. A class, not a forward
hook: compiled code skips hooks, but guards the class.
"""

from __future__ import annotations

import copyreg
import weakref
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from torch_cpudist.log import logger
from torch_cpudist.machine import staging
from torch_cpudist.tables import lookup_ops  # noqa: F401  (registers the ops)
from torch_cpudist.tables.binding import TableBinding
from torch_cpudist.tables.foreign import graph_without_pull
from torch_cpudist.tables.remote_lookup import (
    RemoteEmbedding,
    RemoteEmbeddingBag,
    handle_in_graph,
)
from torch_cpudist.tables.remote_table import LEFT_OUT, ROWS_ELSEWHERE
from torch_cpudist.tables.staged import (
    StagedEmbedding,
    StagedEmbeddingBag,
    lookup_of,
)
from torch_cpudist.tables.weight import as_it_stands, unwatch, watch

EmbeddingModule = nn.Embedding | nn.EmbeddingBag


class _OnServers:
    """First base of a module's class while its table lives on servers."""

    _cpudist_plain: ClassVar[type]
    _cpudist_binding: TableBinding

    def __init_subclass__(cls) -> None:
        """Keeps a class of the user's own from counting this one as its subclass."""

    def _save_to_state_dict(self, *arguments: Any) -> None:
        """Saves the weight, with current rows, as a plain tensor."""
        if not self._cpudist_binding.remote:
            self._cpudist_binding.read()
        with as_it_stands():
            super()._save_to_state_dict(*arguments)  # type: ignore[misc]

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any
    ) -> None:
        """Says whose rows a state has not, which ``strict=False`` would load as any."""
        name = self._cpudist_binding.name
        absent = prefix + "weight" not in state
        left_out = absent and "weight" in metadata.get(LEFT_OUT, ())
        if left_out and not self._cpudist_binding.remote:
            logger.warning(
                "load_state_dict: the state is of a model whose table %r is remote and "
                "has no rows for it: those of this model stay as they are. %s",
                name,
                ROWS_ELSEWHERE,
            )
        super()._load_from_state_dict(state, prefix, metadata, *rest)  # type: ignore[misc]

    def extra_repr(self) -> str:
        """As torch's, which formats the weight and throws that away for bags."""
        with as_it_stands():
            return super().extra_repr()  # type: ignore[misc, no-any-return]

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses ``torch.jit.script``."""
        binding = self._cpudist_binding
        raise graph_without_pull(binding.name, binding.remote)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and saved models are plain modules, without servers."""
        state = {
            k: v for k, v in self.__dict__.items() if not k.startswith("_cpudist_")
        }
        # The standard library only: a saved model loads without this package.
        make = copyreg._reconstructor  # type: ignore[attr-defined]
        return make, (plain_class(self), object, None), state


class _PullingEmbedding(nn.Embedding):
    """Last base before ``nn.Embedding``: sees the ids that torch would look up."""

    _cpudist_binding: TableBinding
    _cpudist_handle: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Pulls the rows of ``input``, then looks them up as torch does."""
        if not torch.compiler.is_compiling():
            with as_it_stands():
                self._cpudist_binding.pull(input, self.weight)
                if type(input) is torch.Tensor:
                    return super().forward(input)
            # A class of the user's own sees what is called.
            return super().forward(input)
        with as_it_stands():
            return torch.ops.torch_cpudist.lookup(  # type: ignore[no-any-return]
                self.weight, input, handle_in_graph(self), self.padding_idx
            )


class _PullingEmbeddingBag(nn.EmbeddingBag):
    """Last base before ``nn.EmbeddingBag``: sees the ids that torch would look up."""

    _cpudist_binding: TableBinding
    _cpudist_handle: int

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pulls the rows of ``input``, then looks them up as torch does."""
        with as_it_stands():
            if torch.compiler.is_compiling():
                input = torch.ops.torch_cpudist.pull(input, handle_in_graph(self))
            else:
                self._cpudist_binding.pull(input, self.weight)
            if type(input) is torch.Tensor:
                return super().forward(input, offsets, per_sample_weights)
        # A class of the user's own sees what is called.
        return super().forward(input, offsets, per_sample_weights)


# Whether rows are the servers' only, and whether results are on another device.
_Way = tuple[bool, bool]

# By a module's own class.
_pulling_classes: weakref.WeakKeyDictionary[type, dict[_Way, type]] = (
    weakref.WeakKeyDictionary()
)
# By torch's class: what stands before it.
_BASES: dict[type, dict[_Way, type]] = {
    nn.Embedding: {
        (False, False): _PullingEmbedding,
        (False, True): StagedEmbedding,
        (True, False): RemoteEmbedding,
        (True, True): StagedEmbedding,
    },
    nn.EmbeddingBag: {
        (False, False): _PullingEmbeddingBag,
        (False, True): StagedEmbeddingBag,
        (True, False): RemoteEmbeddingBag,
        (True, True): StagedEmbeddingBag,
    },
}


def plain_class(module: object) -> type:
    """Returns the class a module had before its table moved to servers."""
    kind = type(module)
    return kind._cpudist_plain if issubclass(kind, _OnServers) else kind


def binding_of(module: nn.Module) -> TableBinding | None:
    """The binding that a module's lookups go through; ``None`` of a plain one."""
    return module._cpudist_binding if isinstance(module, _OnServers) else None


def is_staged(module: nn.Module) -> bool:
    """Whether a module's lookups bring their results to another device."""
    return isinstance(module, (StagedEmbedding, StagedEmbeddingBag))


def torch_class(kind: type) -> type:
    """The class of torch that an embedding's class is, or comes of."""
    return nn.EmbeddingBag if issubclass(kind, nn.EmbeddingBag) else nn.Embedding


def _pulling_class(kind: type, way: _Way) -> type:
    made = _pulling_classes.setdefault(kind, {})
    if way not in made:
        base = torch_class(kind)
        own = () if kind is base else (kind,)
        bases = (_OnServers, *own, _BASES[base][way])
        made[way] = type(kind.__name__, bases, {"_cpudist_plain": kind})
    return made[way]


def attach(module: EmbeddingModule, binding: TableBinding) -> None:
    """Makes a module's lookups pull their rows."""
    object.__setattr__(module, "_cpudist_binding", binding)
    object.__setattr__(module, "_cpudist_handle", binding.handle)
    staged = staging.needed(binding.device)
    if staged:
        object.__setattr__(module, "_cpudist_lookup", lookup_of(module))
    if not binding.remote:
        watch(binding.weight, binding)
    module.__class__ = _pulling_class(plain_class(module), (binding.remote, staged))


def detach(module: EmbeddingModule) -> None:
    """Gives a module its own class back; its weight stays as it is."""
    if isinstance(module, _OnServers):
        binding = module._cpudist_binding
        unwatch(binding.weight, binding)
        module.__class__ = plain_class(module)
        for name in [n for n in module.__dict__ if n.startswith("_cpudist_")]:
            del module.__dict__[name]
