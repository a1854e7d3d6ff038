# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What one optimizer trains, wherever it is kept, and who wrote it last."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from torch_cpudist import _core
from torch_cpudist.model.placement import Placement
from torch_cpudist.tables.binding import model_changed
from torch_cpudist.tables.weight import as_it_stands


class Trained(ABC):
    """Tables and dense parameters of one optimizer, or a part of them.

    Notices what somebody else writes to them. From one thread at a time, but for
    lookups.
    """

    # Whether every row of every table is as after this trainer's last step.
    tables_current: bool

    def __init__(self, client: _core.Client, placement: Placement) -> None:
        """Takes ``placement``, which is kept by ``client``'s servers or by trainers."""
        self.client = client
        self.placement = placement
        self._versions: dict[int, int] = {}

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters of all that is trained: tables, then dense."""
        tables = [(t.found.name, t.found.weight) for t in self.placement.tables]
        return tables + [(d.name, d.parameter) for d in self.placement.dense]

    # -- writes by others --------------------------------------------------------------

    def note_written(self, parameters: list[nn.Parameter]) -> None:
        """Tells autograd of our writes and remembers the version they leave."""
        # In this order: a signal in between must not make it look like another's write.
        with as_it_stands():
            for parameter in parameters:
                self._versions[id(parameter)] = parameter._version + len(parameters)
            if parameters:
                torch.autograd.graph.increment_version(parameters)
            # Those that were made of one array (from_pretrained) have one count.
            for parameter in parameters:
                self._versions[id(parameter)] = parameter._version

    def changed(self) -> list[str]:
        """Names the parameters that somebody else wrote since our last write."""
        with as_it_stands():
            return [
                name
                for name, parameter in self.trained()
                if self._versions[id(parameter)] < parameter._version
            ]

    def check_unchanged(self) -> None:
        """Raises ``ModelChangedError`` if somebody else wrote since our last write."""
        names = self.changed()
        if names:
            raise model_changed(names, [parameter for _, parameter in self.trained()])

    def accept_changes(self) -> None:
        """Takes the values that stand in the model now as not written by others."""
        for _, parameter in self.trained():
            self._versions[id(parameter)] = parameter._version

    # -- where the values are ----------------------------------------------------------

    @property
    @abstractmethod
    def bounded(self) -> bool:
        """Whether the staleness of gradients has a bound."""

    def join(self) -> None:  # noqa: B027 - values may all be here, as below
        """Takes part again after ``leave`` or a barrier, with values as of now."""

    def pull_dense(self) -> None:  # noqa: B027
        """Overwrites every dense parameter with what is kept elsewhere."""

    def pull_tables(self) -> None:  # noqa: B027
        """Overwrites every row of every table with what is kept elsewhere."""

    @abstractmethod
    def check_kept(self) -> None:
        """Refuses parameters that are no longer what they were when placed.

        Raises:
            ModelChangedError: a parameter has another shape, dtype or device.
        """

    @abstractmethod
    def close(self, tell_servers: bool) -> None:
        """Gives modules their classes back; can free the servers' memory."""
