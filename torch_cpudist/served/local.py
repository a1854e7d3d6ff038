# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a trainer that steps by itself holds: whole tables and their optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from torch_cpudist import _core
from torch_cpudist.errors import ConfigMismatchError, InternalError
from torch_cpudist.model.dense_memory import Weights
from torch_cpudist.model.gradients import read_dense_gradient, read_table_gradient
from torch_cpudist.model.placement import PlacedTable, Placement
from torch_cpudist.rules.state_parts import States, state_parts
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.served.state_layout import (
    name_table_state,
    received,
    row_elements,
    unname_table_state,
)
from torch_cpudist.tables.binding import TableBinding


class LocalTable:
    """One table and its optimizer state, on this trainer. Not thread-safe.

    Memory besides the weight: the rule's state, float32 ``[rows, elements]``, and four
    bytes per row.
    """

    def __init__(
        self,
        placed: PlacedTable,
        config: _core.OptimizerConfig,
        state: Mapping[str, Any],
    ) -> None:
        """Begins with torch's ``state`` of the weight; empty means initial."""
        self.placed = placed
        self._config = config
        rows, dim = placed.found.weight.shape
        self._parts = state_parts(config)
        self._widths = [row_elements(part, dim) for part in self._parts]
        self._state = received((rows, sum(self._widths)), torch.float32)
        self._counts = received(rows, torch.int32)
        self._step = 0
        self.load(state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Replaces the state.

        Raises:
            InvalidArgumentError: it does not fit; nothing was changed.
        """
        found = self.placed.found
        rows, dim = found.weight.shape
        columns, counts, step = unname_table_state(
            found.name, (rows, dim), self._config, state
        )
        if columns:
            torch.cat(columns, dim=1, out=self._state)
        else:
            _core.init_state(self._config, self._state.data_ptr(), rows, dim)
        if counts is None:
            self._counts.zero_()
        else:
            self._counts.copy_(counts)
        self._step = step

    @property
    def kind(self) -> str:
        """The rule that updates its rows."""
        return self._config.kind

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of the state: of the rule, and updates by row."""
        return self._state, self._counts

    def saved(self) -> dict[str, Any]:
        """Returns a copy of the state in torch's form."""
        parts = torch.split(self._state, self._widths, dim=1) if self._widths else ()
        tensors = [part.clone() for part in parts]
        return name_table_state(self._config, tensors, self._counts.clone(), self._step)

    def trained_rows(self) -> dict[str, Any]:
        """A copy of the state of rows that have had an update here, for snapshots."""
        rows = self._counts.nonzero().flatten()
        return {
            "rule": self._config.kind,
            "step": self._step,
            "rows": rows,
            "counts": self._counts[rows],
            "state": self._state[rows],
        }

    def load_rows(self, saved: Mapping[str, Any] | None) -> bool:
        """Replaces the state by what ``trained_rows`` has returned.

        Returns:
            Whether it is of this rule and of rows of this table; else it is initial.
        """
        self.load({})
        if saved is None or saved["rule"] != self._config.kind:
            return False
        rows, state = saved["rows"], saved["state"]
        if state.shape[1:] != self._state.shape[1:]:
            return False
        if len(rows) and int(rows.max()) >= len(self._counts):
            return False
        self._state[rows] = state
        self._counts[rows] = saved["counts"]
        self._step = saved["step"]
        return True

    def update(
        self,
        exchange: _core.GeoExchange,
        config: _core.OptimizerConfig,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Runs one step on the rows of a COO gradient.

        Args:
            exchange: of the open parameter set.
            config: the rule as of this step.
            keys: int64 ``[n]``, duplicates allowed.
            values: float32 ``[n, dim]``.

        Raises:
            RowOutOfRangeError: a key is no row; nothing was changed.
            ConfigMismatchError: another rule than when the optimizer was wrapped.
        """
        if config.kind != self._config.kind or state_parts(config) != self._parts:
            raise ConfigMismatchError(
                f"the optimizer of table {self.placed.found.name!r} was {self._config} "
                f"when it was wrapped and is now {config}, whose state is another. "
                "Build a new DistributedOptimizer after such a change."
            )
        exchange.update_rows(
            gradient=(
                self.placed.index,
                keys.data_ptr(),
                keys.numel(),
                values.data_ptr(),
            ),
            rows=(
                self.placed.found.weight.data_ptr(),
                self._state.data_ptr(),
                self._counts.data_ptr(),
            ),
            config=config,
            step=self._step + 1,
        )
        self._step += 1


class LocalParameterSet(ParameterSet):
    """A parameter set whose trainer steps by itself.

    Lookups are torch's own: all rows are here. The servers hold what the trainers have
    told each other.
    """

    def __init__(
        self,
        client: _core.Client,
        placement: Placement,
        store: Callable[[ParameterSet], None] | None,
        states: States,
        alone: bool,
        memory_cap_bytes: int,
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
            check_room: raises if the values have no room; before they are sent.
            trainer_rank: of this trainer.
        """
        super().__init__(client, placement, store, check_room, trainer_rank)
        self.alone = alone
        if not self.tables_current:
            self.pull_tables()
        self.exchange = self.opened.start_exchange(
            alone=alone, memory_cap_bytes=memory_cap_bytes
        )
        self.forget_movement()
        self.tables = [
            LocalTable(table, self._rule(table), states.get(table.found.weight, {}))
            for table in placement.tables
        ]

    def _rule(self, table: PlacedTable) -> _core.OptimizerConfig:
        rule = self.placement.rules[table.group]
        if rule is None:
            raise InternalError(f"no rule for table {table.found.name!r}")
        return rule

    def _attach(self, table: PlacedTable, binding: TableBinding) -> None:
        """Lookups need no pull."""

    def bind_tables(self) -> None:
        """Tells the client where tables are, if their memory has moved.

        Raises:
            ModelChangedError: a weight is no longer what the servers hold.
        """
        for binding in self._bindings:
            binding.bind_weight(self.opened)

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
            DenseGradientError, UnsupportedModelError, RowOutOfRangeError: a gradient
                is not what it must be.
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
        for table, keys, values in read:
            rule = rules[table.placed.group]
            if rule is None:
                raise InternalError(f"no rule for table {table.placed.found.name!r}")
            table.update(self.exchange, rule, keys, values)
