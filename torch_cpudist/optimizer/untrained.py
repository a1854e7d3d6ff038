# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What no wrapped optimizer trains, and so nobody makes equal: it is compared.

Frozen parameters, those of a part of the model that the optimizer was not given, and
buffers keep the values that each trainer has. Trainers that differ in them average
gradients of different functions, without any error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_cpudist import _core
from torch_cpudist.errors import AddressError
from torch_cpudist.log import logger
from torch_cpudist.model.placement import Placement
from torch_cpudist.tables.remote_weight import is_remote

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run

_NAMED = 3


def _readable(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is its value."""
    if is_remote(tensor) or is_lazy(tensor) or tensor.is_meta or tensor.is_quantized:
        return False
    if is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout is torch.strided


def _described(tensor: torch.Tensor) -> str:
    """Type, shape and a checksum of the values."""
    kind = f"{tensor.dtype} {list(tensor.shape)}"
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    values = flat.reshape(-1).view(torch.uint8).numpy().data
    return f"{kind} {_core.crc32c(values):08x}"


@contextmanager
def _tolerant() -> Iterator[None]:
    """A store that has failed since ``init()`` does not keep anybody from training."""
    try:
        yield
    except AddressError as error:
        logger.warning("what is not trained was not compared: %s", error)


class Untrained:
    """Checksums of the tensors of a model that no wrapped optimizer trains.

    Taken when a model is wrapped, compared at the first step: another optimizer may
    come in between and train some of them. They travel through the rendezvous store,
    where trainer 0's are before anybody can go on from opening the optimizer's
    parameters, so that nobody waits. No values are sent. Cost: one pass over their
    memory, one value in the store; nothing if there are none.

    Alone there is nothing to compare. Jobs of their own are left out: a trainer that
    joins them later would be compared with buffers from the beginning of the run.
    """

    def __init__(
        self, run: Run, model: nn.Module, placement: Placement, buffers: bool
    ) -> None:
        """Reads the tensors of ``model`` that nobody trains.

        Args:
            run: this trainer's.
            model: the wrapped one.
            placement: what its optimizer trains.
            buffers: whether buffers are compared, too. They are each trainer's own and
                move during training: only before it should they be equal.
        """
        self._run = run
        self._opening = ""
        self.found: dict[str, tuple[torch.Tensor, str]] = {}
        if run.trainer_count == 1 or run.environment.apart is not None:
            return
        trained = _trained(run) | {id(t.found.weight) for t in placement.tables}
        trained |= {id(entry.parameter) for entry in placement.dense}
        tensors = [
            *model.named_parameters(),
            *(model.named_buffers() if buffers else ()),
        ]
        for name, tensor in tensors:
            if id(tensor) not in trained and _readable(tensor):
                self.found[name] = (tensor, _described(tensor))

    def tell(self, opening: str) -> None:
        """Shows trainer 0's to the others; before the parameters are opened.

        Args:
            opening: name of the optimizer that is built, equal on all trainers.
        """
        self._opening = f"untrained/{opening}"
        if not self.found or self._run.trainer_rank > 0:
            return
        rendezvous = self._run.rendezvous
        if rendezvous is not None:
            with _tolerant():
                told = {name: described for name, (_, described) in self.found.items()}
                rendezvous.show(self._opening, told)

    def compare(self) -> None:
        """Warns if trainer 0's differ from this trainer's; once, after the opening."""
        found, self.found = self.found, {}
        if not found or self._run.trainer_rank == 0:
            return
        rendezvous = self._run.rendezvous
        if rendezvous is None:
            return
        with _tolerant():
            told = rendezvous.shown(self._opening) or {}
            trained = _trained(self._run)
            by_now = {name for name, (one, _) in found.items() if id(one) in trained}
            mine = {name: described for name, (_, described) in found.items()}
            names = [name for name in {**mine, **told} if name not in by_now]
            self._warn([name for name in names if told.get(name) != mine.get(name)])

    def _warn(self, names: list[str]) -> None:
        if not names:
            return
        rest = len(names) - _NAMED
        logger.warning(
            "trainer %d: what no wrapped optimizer trains differs from trainer 0's, in "
            "%d of the model's parameters and buffers: %s%s. Load the same values or "
            "seed alike before wrapping; they are not trained, so that nothing makes "
            "them equal.",
            self._run.trainer_rank,
            len(names),
            ", ".join(map(repr, names[:_NAMED])),
            f" and {rest} more" if rest > 0 else "",
        )


def _trained(run: Run) -> set[int]:
    """By ``id``, the parameters that open optimizers train."""
    participants = run.participants()
    return {id(parameter) for p in participants for parameter in p.trained_parameters()}
