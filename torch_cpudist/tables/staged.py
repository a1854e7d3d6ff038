# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables of a model on a CUDA device: rows and lookups on the CPU, results there.

The weight of a table, a cache of rows that servers write, is in host memory while an
optimizer is wrapped. A lookup runs on the CPU and its result is copied to the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from torch_cpudist.errors import ModelChangedError
from torch_cpudist.log import logger
from torch_cpudist.machine import staging
from torch_cpudist.machine.device import CPU
from torch_cpudist.tables.binding import TableBinding
from torch_cpudist.tables.foreign import check_not_exported
from torch_cpudist.tables.remote_binding import RemoteBinding
from torch_cpudist.tables.remote_lookup import pooled
from torch_cpudist.tables.weight import as_it_stands

Apply = Callable[[torch.Tensor], torch.Tensor]
Lookup = Callable[..., torch.Tensor]


class StagedEmbedding(nn.Embedding):
    """Last base before ``nn.Embedding``, in the place of the one of a model on CPUs."""

    _cpudist_binding: TableBinding
    _cpudist_lookup: Lookup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Pulls the rows of ``input`` and brings them to the device.

        A compiled model runs this outside its graphs.
        """
        if torch.compiler.is_compiling():
            binding = self._cpudist_binding
            check_not_exported(binding.name, binding.remote)
            return self._cpudist_lookup(self, input)
        return look_up(self, input)

    def _apply(self, fn: Apply, recurse: bool = True) -> nn.Module:
        """Leaves the weight where it is when the model moves to where it is already."""
        super()._apply(_without_weight(self, fn), recurse)  # type: ignore[no-untyped-call]
        return self


class StagedEmbeddingBag(nn.EmbeddingBag):
    """Last base before ``nn.EmbeddingBag``; see ``StagedEmbedding``."""

    _cpudist_binding: TableBinding
    _cpudist_lookup: Lookup

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pulls the rows of ``input``, pools here and brings bags to the device."""
        if torch.compiler.is_compiling():
            binding = self._cpudist_binding
            check_not_exported(binding.name, binding.remote)
            return self._cpudist_lookup(self, input, offsets, per_sample_weights)
        return look_up_bags(self, input, offsets, per_sample_weights)

    def _apply(self, fn: Apply, recurse: bool = True) -> nn.Module:
        """Leaves the weight where it is when the model moves to where it is already."""
        super()._apply(_without_weight(self, fn), recurse)  # type: ignore[no-untyped-call]
        return self


@functools.cache
def _outside_graphs(fn: Lookup) -> Lookup:
    made: Lookup = torch.compiler.disable(fn)  # type: ignore[no-untyped-call]
    return made


def lookup_of(module: nn.Module) -> Lookup:
    """What looks up in ``module``, for compiled code to call without looking into."""
    bags = isinstance(module, nn.EmbeddingBag)
    return _outside_graphs(look_up_bags if bags else look_up)


def look_up(module: StagedEmbedding, ids: torch.Tensor) -> torch.Tensor:
    """What ``nn.Embedding`` returns, on the model's device."""
    binding = module._cpudist_binding
    with as_it_stands():
        if not isinstance(binding, RemoteBinding):
            found = _pulled(binding, ids, module.weight)
            return staging.rows_on(
                binding.device, module.weight, found, module.padding_idx
            )
        found = _on_host(binding, ids)
        keep = torch.is_grad_enabled() and module.weight.requires_grad

        def gather(flat: torch.Tensor, out: torch.Tensor) -> None:
            binding.look_up(flat, module.weight, out, keep)

        return staging.rows_on(
            binding.device, module.weight, found, module.padding_idx, gather
        )


def look_up_bags(
    module: StagedEmbeddingBag,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    per_sample_weights: torch.Tensor | None,
) -> torch.Tensor:
    """What ``nn.EmbeddingBag`` returns, on the model's device."""
    binding = module._cpudist_binding
    with as_it_stands():
        here = [
            one if one is None else one.to(CPU) for one in (offsets, per_sample_weights)
        ]
        if binding.remote:
            bags = pooled(module, _on_host(binding, ids), *here)
        else:
            found = _pulled(binding, ids, module.weight)
            bags = nn.EmbeddingBag.forward(module, found, *here)
        return staging.moved_to(binding.device, bags)


def _pulled(
    binding: TableBinding, ids: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Makes the rows of ``ids`` current; the ids in host memory."""
    found = _on_host(binding, ids)
    binding.pull(found, weight)
    return found


def _on_host(binding: TableBinding, ids: torch.Tensor) -> torch.Tensor:
    """The ids in host memory, of a model that is where it was wrapped."""
    if binding.moved_to is not None:
        raise ModelChangedError(
            f"table {binding.name!r}: its model was moved to {binding.moved_to}, but "
            f"was on {binding.device} when its optimizer was wrapped. Move a model "
            "before that."
        )
    return binding.on_host(ids)


def _without_weight(module: StagedEmbedding | StagedEmbeddingBag, fn: Apply) -> Apply:
    """What ``Module._apply`` is to apply: ``model.to(device)`` spares the weight.

    Only if the model stays where it was wrapped; else lookups refuse.
    """
    binding, weight = module._cpudist_binding, module.weight
    probe = fn(torch.empty(0, weight.shape[1], dtype=weight.dtype, device="cpu"))
    elsewhere = probe.device != binding.device
    binding.moved_to = probe.device if elsewhere else None
    if elsewhere or probe.dtype != weight.dtype:
        return fn

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor is weight or tensor is weight.grad else fn(tensor)

    return apply


class HostedWeights:
    """Weights in host memory, and where they were before. Not thread-safe."""

    def __init__(self, weights: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Moves the named ``weights`` there, gradients too."""
        self._homes: list[tuple[str, nn.Parameter, torch.device]] = []
        for name, weight in weights:
            home = weight.device
            self._homes.append((name, weight, home))
            if home.type != "cpu":
                logger.info(
                    "table %r is in host memory from now on, %.1f MiB of %s are free",
                    name,
                    weight.nbytes / 2**20,
                    home,
                )
                _move(weight, CPU)

    def home_of(self, weight: nn.Parameter) -> torch.device:
        """Where a weight was."""
        return next(home for _, own, home in self._homes if own is weight)

    def give_back(self) -> None:
        """Moves weights to where they were, unless there is no room. Idempotent."""
        for name, weight, home in self._homes:
            if weight.device == home:
                continue
            try:
                _move(weight, home)
            except torch.OutOfMemoryError:
                logger.warning(
                    "table %r stays in host memory: %s, where it was before its "
                    "optimizer was wrapped, has no room for %.1f MiB",
                    name,
                    home,
                    weight.nbytes / 2**20,
                )
        self._homes.clear()


def _move(weight: nn.Parameter, device: torch.device) -> None:
    grad = weight.grad
    moved = weight.detach().to(device)
    weight.grad = None
    weight.data = moved
    if grad is not None:
        weight.grad = grad.to(device)
