# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a trainer that steps by itself holds: tables and their optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from torch_cpudist import _core
from torch_cpudist.errors import InternalError
from torch_cpudist.model.dense_memory import Weights
from torch_cpudist.model.gradients import read_dense_gradient, read_table_gradient
from torch_cpudist.model.placement import PlacedTable, Placement
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served import state_exchange
from torch_cpudist.served.local_table import LocalTable, SlotTable, WholeTable
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.tables.binding import TableBinding, bound_ids


class LocalParameterSet(ParameterSet):
    """A parameter set whose trainer steps by itself.

    Lookups of static tables are torch's own: all rows are here. Those of remote tables
    find the rows that this trainer has stepped here, and the others on the servers,
    which hold what the trainers have told each other.
    """

    def __init__(
        self,
        client: _core.Client,
        placement: Placement,
        store: Callable[[ParameterSet], None] | None,
        states: States,
        alone: bool,
        memory_cap_bytes: int,
        cache_bytes: int,
        check_room: Callable[[], None],
        trainer_rank: int,
    ) -> None:
        """Opens the set and takes the servers' values in; see ``ParameterSet``.

        Args:
            client: this trainer's client.
            placement: tables, dense parameters and their layout.
            store: sends the initial values once the set is open; on trainer 0 only.
            states: torch's state of each parameter, from before.
            alone: there is no other trainer, and never will be.
            memory_cap_bytes: what pushes may hold on a server; 0 for no cap.
            cache_bytes: what rows of remote tables may take here.
            check_room: raises if the values have no room; before they are sent.
            trainer_rank: of this trainer.
        """
        super().__init__(client, placement, store, check_room, trainer_rank)
        self.alone = alone
        if not self.tables_current:
            super().pull_tables()
        self._caps = memory_cap_bytes, cache_bytes
        self.exchange = self._started()
        self.forget_movement()
        self.tables = [self._local_table(table, states) for table in placement.tables]

    def _started(self) -> _core.GeoExchange:
        memory_cap_bytes, cache_bytes = self._caps
        return self.opened.start_exchange(
            alone=self.alone,
            memory_cap_bytes=memory_cap_bytes,
            rules=[self._rule(table) for table in self.placement.tables],
            cache_bytes=cache_bytes,
        )

    def reopen(self, client: _core.Client) -> None:
        """Also with another exchange, which nothing has moved in yet."""
        super().reopen(client)
        for binding in self._bindings:
            binding.forget_rows(self.opened)
        self.exchange = self._started()
        for table in self.tables:
            table.go_on_by(self.exchange)

    def begin_anew(self) -> None:
        """Rows that were here have their slots again, with the servers' values."""
        super().begin_anew()
        for table in self.tables:
            table.put_back()
        self.tables_current = True

    def _local_table(self, table: PlacedTable, states: States) -> LocalTable:
        rule = self._rule(table)
        if table.found.remote:
            return SlotTable(table, rule, self.exchange)
        return WholeTable(table, rule, states.get(table.found.weight, {}))

    @property
    def has_remote(self) -> bool:
        """Whether some of its rows are on servers only."""
        return any(table.found.remote for table in self.placement.tables)

    def _rule(self, table: PlacedTable) -> _core.OptimizerConfig:
        rule = self.placement.rules[table.group]
        if rule is None:
            raise InternalError(f"no rule for table {table.found.name!r}")
        return rule

    def _attach(self, table: PlacedTable, binding: TableBinding) -> None:
        """Lookups of a static table need no pull."""
        if binding.remote:
            super()._attach(table, binding)

    def bind_tables(self) -> None:
        """Tells the client where tables are, if their memory has moved.

        Raises:
            ModelChangedError: a weight is no longer what the servers hold.
        """
        for binding in self._bindings:
            binding.bind_weight(self.opened)

    def prefetch(self, ids: Mapping[nn.Module, torch.Tensor], managed: bool) -> int:
        """Checks the ids. Rows that are not here come with their lookups."""
        for binding, tensor in bound_ids(self._bindings, ids):
            binding.checked_ids(tensor)
        return 0

    def age_rows(self) -> None:
        """Nothing: exchanges bring what others have stepped."""

    def pull_tables(self) -> None:
        """Overwrites every row that is here with the servers' values."""
        super().pull_tables()
        self.exchange.refresh_slots()

    def store(self) -> None:
        """Has the servers take all that is here: of a trainer that is alone."""
        state_exchange.store(self, {})
        self.exchange.store_slots()

    def forget_movement(self) -> None:
        """Takes the weights that stand in the model as the servers'."""
        with Weights(self.placement.dense) as weights:
            self.exchange.reset(weights)

    @contextmanager
    def written_apart(self) -> Iterator[None]:
        """While it is entered, what others wrote to the model is not there.

        It must neither be handed on nor mixed with what comes. The parameters that were
        written are without this trainer's movement meanwhile, and count as written
        afterwards as before.
        """
        self.bind_tables()
        names = set(self.changed())
        trained = self.trained()
        kept = [(p, p.detach().clone()) for name, p in trained if name in names]
        if kept:
            tables, dense = self.placement.tables, self.placement.dense
            with Weights(dense) as weights:
                self.exchange.undo(
                    weights,
                    parameters=[d.index for d in dense if d.name in names],
                    tables=[t.index for t in tables if t.found.name in names],
                )
        try:
            yield
        finally:
            self.note_written([p for name, p in trained if name not in names])
            for parameter, written in kept:
                parameter.data.copy_(written)

    def join(self) -> None:
        """Takes part again, with the servers' values in the place of this trainer's."""
        self.opened.join()
        self.pull_dense()
        self.pull_tables()
        self.forget_movement()

    def update_tables(self, rules: list[_core.OptimizerConfig | None]) -> None:
        """Runs one step on the rows that have a gradient, of all tables.

        Raises:
            DenseGradientError, UnsupportedModelError, RowOutOfRangeError,
            UnpulledRowError: a gradient is not what it must be.
            ModelChangedError: see ``bind_tables``.
        """
        self.bind_tables()
        read = []
        for table in self.tables:
            found = table.placed.found
            if found.weight.grad is not None:
                gradient = read_table_gradient(found.name, found.weight.grad)
                read.append((table, *gradient))
        for entry in self.placement.dense:
            if entry.parameter.grad is not None:
                read_dense_gradient(entry.name, entry.parameter.grad, entry.dtype)
        try:
            for table, keys, values in read:
                rule = rules[table.placed.group]
                if rule is None:
                    raise InternalError(
                        f"no rule for table {table.placed.found.name!r}"
                    )
                table.update(self.exchange, rule, keys, values)
        finally:  # also of those before one that fails
            self.exchange.forget_lookups()
