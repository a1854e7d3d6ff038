# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parameters and buffers of a model by their names.

Models replace their tensors and modules: ``load_state_dict(assign=True)`` does, and
forwards that assign a buffer. So what is written to is asked for at that moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from torch_cpudist.errors import ModelChangedError


@dataclass(frozen=True)
class Slot:
    """One parameter or buffer.

    Attributes:
        model: that has it, at any depth.
        name: in ``state_dict()``.
        dtype: that it had when it was found.
        shape: that it had when it was found.
    """

    model: nn.Module
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def now(self) -> torch.Tensor:
        """The tensor that the model has.

        Raises:
            ModelChangedError: it has none, or one of another dtype or shape.
        """
        found = self._tensor()
        if found is None or found.is_meta:
            raise ModelChangedError(
                f"{self.name!r}: the model has no values of that name any more. "
                "Nothing was changed. Load the export into the model as it is now."
            )
        if found.dtype != self.dtype or tuple(found.shape) != self.shape:
            raise ModelChangedError(
                f"{self.name!r} was {self.dtype} {list(self.shape)} when the export "
                f"was loaded, and is {found.dtype} {list(found.shape)}. Nothing was "
                "changed. Convert models before load_for_inference, and load again."
            )
        return found

    def _tensor(self) -> torch.Tensor | None:
        path, _, attribute = self.name.rpartition(".")
        try:
            module = self.model.get_submodule(path)
        except AttributeError:
            return None
        found = module._parameters.get(attribute)
        return module._buffers.get(attribute) if found is None else found

    def fitting(self, values: torch.Tensor) -> torch.Tensor:
        """Values as ``write`` takes them: of the tensor's dtype, on its device."""
        there = self.now()
        return values.to(device=there.device, dtype=there.dtype)

    def check_writable(self) -> None:
        """Refuses a tensor several of whose elements are one.

        Raises:
            ModelChangedError: it is such a one; nothing was changed.
        """
        there = self.now()
        pairs = zip(there.shape, there.stride(), strict=True)
        if there.numel() and any(n > 1 and step == 0 for n, step in pairs):
            raise ModelChangedError(
                f"{self.name!r} is expanded: several of its elements are one in "
                "memory, and cannot be written. Nothing was changed. Make it "
                "contiguous() first."
            )


def write(
    there: torch.Tensor, values: torch.Tensor, rows: torch.Tensor | None = None
) -> None:
    """Overwrites a tensor, or rows of it, with what ``Slot.fitting`` has made."""
    # What a forward in inference mode has made can only be written in that mode.
    quietly = torch.inference_mode() if there.is_inference() else torch.no_grad()
    with quietly:
        if rows is None:
            there.copy_(values)
        else:
            there.index_copy_(0, rows, values)


@dataclass(frozen=True)
class Change:
    """What a delta writes: all of a parameter or buffer, or rows of it."""

    slot: Slot
    values: torch.Tensor
    rows: torch.Tensor | None

    def target(self) -> torch.Tensor:
        """The tensor that it is written to.

        Raises:
            ModelChangedError: the values are for another one.
        """
        there = self.slot.now()
        if there.device != self.values.device:
            raise ModelChangedError(
                f"{self.slot.name!r} went to {there.device} while a delta was being "
                "applied. Nothing was changed. Apply it again."
            )
        return there


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """All parameters and buffers with values, by each of their names."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in (
            *module._parameters.items(),
            *module._buffers.items(),
        ):
            if tensor is None or nn.parameter.is_lazy(tensor):
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            shape = tuple(tensor.shape)
            found[name] = Slot(model, name, tensor.dtype, shape)
    return found


def kind_of(dtype: torch.dtype) -> str:
    """What its numbers are: others cannot stand for them."""
    if dtype == torch.bool:
        return "truth"
    if dtype.is_complex:
        return "complex"
    return "real" if dtype.is_floating_point else "whole"
