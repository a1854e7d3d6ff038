# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that every trainer keeps a whole copy of; no server holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torch_cpudist import _core
from torch_cpudist.collective.buckets import plan
from torch_cpudist.collective.group import CollectiveGroup
from torch_cpudist.collective.opening import ServerMark
from torch_cpudist.collective.options import Options
from torch_cpudist.model.dense_memory import check_kept
from torch_cpudist.model.placement import DenseParameter, Placement
from torch_cpudist.served.base import Trained
from torch_cpudist.settings.fields import DEFAULT_BUCKET_BYTES


class CopiedParameters(Trained):
    """Parameters whose copies the trainers keep equal, or average, by themselves."""

    def __init__(
        self,
        client: _core.Client,
        placement: Placement,
        group: CollectiveGroup,
        inners: Sequence[Optimizer],
        settings: str,
        mark: ServerMark | None,
    ) -> None:
        """Checks that all trainers built the same, and takes trainer 0's values.

        Args:
            client: this trainer's, for its counters.
            placement: tables and dense parameters.
            group: of all trainers.
            inners: the wrapped optimizers.
            settings: the strategy, which must be equal too.
            mark: that servers have of it, closed with this.

        Raises:
            ConfigMismatchError: names what another trainer has built otherwise.
        """
        super().__init__(client, placement)
        self.tables_current = True
        self.group = group
        self.inners = list(inners)
        self.options = Options(inners)
        self._settings = settings
        self._mark = mark
        self.hooks: list[RemovableHandle] = []
        tables = [
            DenseParameter(
                len(placement.dense) + table.index,
                table.found.name,
                table.found.weight,
                table.group,
                table.found.weight.dtype,
                table.found.weight.shape,
                table.found.weight.device,
            )
            for table in placement.tables
        ]
        # Tables last, as what they are here: parameters like others.
        self.entries = [*placement.dense, *tables]
        self.check_agreement()
        self.broadcast()

    def check_agreement(self) -> None:
        """Checks parameters and options. Collective.

        Raises:
            ConfigMismatchError: names what differs.
        """
        if self.group.alone:
            return
        entries = [
            f"parameter {e.name} {tuple(e.shape)} {e.dtype} in group {e.group} on "
            f"{e.device.type}"
            for e in self.entries
        ]
        options = self.options.lines()
        self.group.agree("their optimizers", [self._settings, *entries, *options])

    @torch.no_grad()
    def broadcast(self) -> None:
        """Replaces all values by trainer 0's. Collective."""
        if not self.group.alone:
            for bucket in plan(self.entries, DEFAULT_BUCKET_BYTES):
                for i, piece in enumerate(bucket.pieces):
                    bucket.view(i).copy_(piece.entry.parameter)
                self.group.broadcast(bucket.flat, "sending trainer 0's values")
                for i, piece in enumerate(bucket.pieces):
                    piece.entry.parameter.copy_(bucket.view(i))
        self.accept_changes()

    @property
    def bounded(self) -> bool:
        """There is no staleness."""
        return False

    def check_kept(self) -> None:
        """Refuses parameters that are no longer what they were when placed."""
        check_kept(self.entries)

    def close(self, tell_servers: bool) -> None:
        """Removes hooks and gives the group's connections back."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.group.close()
        if self._mark is not None:
            self._mark.close(tell_servers)


def inner_state(inners: Sequence[Optimizer], parameter: torch.Tensor) -> Any:
    """The state that torch keeps of a parameter; empty if there is none."""
    for inner in inners:
        if parameter in inner.state:
            return inner.state[parameter]
    return {}
