# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables kept in one way and dense parameters in another, as one."""

from __future__ import annotations

from torch_cpudist.model.placement import Placement
from torch_cpudist.served.base import Trained
from torch_cpudist.served.set import ParameterSet


class ComposedParameters(Trained):
    """Parameters of which the tables and the rest are two parts."""

    def __init__(
        self, placement: Placement, tables: ParameterSet, dense: Trained
    ) -> None:
        """Composes open parts.

        Args:
            placement: of all.
            tables: the tables.
            dense: everything else.
        """
        super().__init__(tables.client, placement)
        self.tables = tables
        self.dense = dense

    @property
    def tables_current(self) -> bool:
        """Whether every row of every table is as after this trainer's last step."""
        return self.tables.tables_current

    @tables_current.setter
    def tables_current(self, current: bool) -> None:
        self.tables.tables_current = current

    def changed(self) -> list[str]:
        """Names the parameters that somebody else wrote since our last write."""
        return self.tables.changed() + self.dense.changed()

    def accept_changes(self) -> None:
        """Takes the values that stand in the model now as not written by others."""
        self.tables.accept_changes()
        self.dense.accept_changes()

    @property
    def bounded(self) -> bool:
        """Whether the staleness of gradients has a bound."""
        return self.tables.bounded

    def join(self) -> None:
        """Takes part again after ``leave`` or a barrier, with values as of now."""
        self.tables.join()
        self.dense.join()

    def pull_dense(self) -> None:
        """Overwrites every dense parameter with what is kept elsewhere."""
        self.dense.pull_dense()

    def pull_tables(self) -> None:
        """Overwrites every row of every table with what is kept elsewhere."""
        self.tables.pull_tables()

    def check_kept(self) -> None:
        """Refuses parameters that are no longer what they were when placed."""
        self.tables.check_kept()
        self.dense.check_kept()

    def close(self, tell_servers: bool) -> None:
        """Closes both parts."""
        self.tables.close(tell_servers)
        self.dense.close(tell_servers)
