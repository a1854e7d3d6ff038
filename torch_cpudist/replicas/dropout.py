# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Dropout modules that draw from their replica's own generator.

torch draws dropout from one generator of the process, in the order in which threads
happen to come. A mask comes from a dispatcher op, which compiled code calls as well.
"""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from torch_cpudist.errors import GlobalRandomError

# Of SELU, whose statistics alpha dropout keeps: -lambda * alpha.
_ALPHA_PRIME = -1.7580993408473766

_drawing = threading.local()
_library = torch.library.Library("torch_cpudist", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "keep_mask(Tensor input, int mask_dims, float keep) -> Tensor",
    # Two masks of one shape are not one; and none is drawn again in backward.
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _mask_shape(input: torch.Tensor, mask_dims: int) -> list[int]:
    return [*input.shape[:mask_dims], *[1] * (input.dim() - mask_dims)]


def _keep_mask(input: torch.Tensor, mask_dims: int, keep: float) -> torch.Tensor:
    """1 with probability ``keep``, else 0, drawn from this thread's generator."""
    mask = input.new_empty(_mask_shape(input, mask_dims))
    return mask.bernoulli_(keep, generator=getattr(_drawing, "generator", None))


_library.impl("keep_mask", _keep_mask, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("torch_cpudist::keep_mask", lib=_library)  # type: ignore[untyped-decorator]
def _keep_mask_fake(input: torch.Tensor, mask_dims: int, keep: float) -> torch.Tensor:
    return input.new_empty(_mask_shape(input, mask_dims))


def generator_of(seed: int, trainer: int, replica: int) -> torch.Generator:
    """The generator of one replica of a trainer, unlike that of any other."""
    text = f"{seed}/{trainer}/{replica}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """While it is entered, this thread's dropout modules draw from ``generator``."""
    _drawing.generator = generator
    try:
        yield
    finally:
        _drawing.generator = None


class _Drawing(nn.Module):
    """Last base of a replica's dropout module before torch's own class."""

    p: float
    inplace: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As torch's, with another generator."""
        if not self.training or self.p == 0.0:
            return input
        keep = 1.0 - self.p
        dims = _mask_dims(self, input)
        mask = torch.ops.torch_cpudist.keep_mask(input.detach(), dims, keep)
        if isinstance(self, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
            return _alpha(self, input, mask, keep)
        mask = mask.div(keep) if keep else mask
        return input.mul_(mask) if self.inplace else input.mul(mask)


def _alpha(
    module: nn.Module, input: torch.Tensor, mask: torch.Tensor, keep: float
) -> torch.Tensor:
    """Dropped values become alpha', and an affine map restores mean and variance.

    Source: Klambauer et al., "Self-Normalizing Neural Networks", NeurIPS 2017.
    """
    if not keep:
        kept = input * 0.0
    else:
        a = 1.0 / math.sqrt(keep * (1.0 + (1.0 - keep) * _ALPHA_PRIME**2))
        b = -a * _ALPHA_PRIME * (1.0 - keep)
        kept = input * (mask * a) + ((1.0 - mask) * (_ALPHA_PRIME * a) + b)
    return input.copy_(kept) if module.inplace else kept


# Whole channels are dropped; dimensions of an input that has a batch dimension.
_CHANNELS = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}


def _mask_dims(module: nn.Module, input: torch.Tensor) -> int:
    """How many leading dimensions have a mask of their own."""
    for kind, batched in _CHANNELS.items():
        if isinstance(module, kind):
            # torch's Dropout2d takes three dimensions as batch, channel, length.
            whole = input.dim() >= batched or kind is nn.Dropout2d
            return min(2, input.dim()) if whole else 1
    if isinstance(module, nn.FeatureAlphaDropout):
        return min(2, input.dim())
    return input.dim()


_KINDS = (nn.Dropout, *_CHANNELS, nn.AlphaDropout, nn.FeatureAlphaDropout)
# One class for all replicas, so that code is compiled once.
_drawing_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _drawing_class(kind: type, base: type) -> type:
    if kind not in _drawing_classes:
        made = type(base.__name__, (_Drawing, base), {})
        if kind is not base:
            # Below a forward of the user's own, which then calls this one.
            made = type(kind.__name__, (kind, made), {})
        _drawing_classes[kind] = made
    return _drawing_classes[kind]


def own_dropout(model: nn.Module) -> None:
    """Makes the dropout modules of a replica's model draw from its generator."""
    for module in model.modules():
        kind = type(module)
        base = next((k for k in _KINDS if issubclass(kind, k)), None)
        if base is None or issubclass(kind, _Drawing) or "forward" in vars(module):
            continue
        module.__class__ = _drawing_class(kind, base)


def check_untouched(before: torch.Tensor) -> None:
    """Checks that nobody drew from torch's global generator.

    Args:
        before: its state as it was.

    Raises:
        GlobalRandomError: somebody did.
    """
    if not torch.equal(torch.default_generator.get_state(), before):
        raise GlobalRandomError(
            "deterministic=True: a replica drew from torch's global generator, in an "
            "order that no two runs share. Use nn.Dropout modules in the place of "
            "functional dropout (also that of nn.MultiheadAttention and nn.LSTM), and "
            "generators of your own for the rest."
        )
