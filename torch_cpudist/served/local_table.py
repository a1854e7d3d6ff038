# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer state of a table on a trainer that steps by itself, by kind of table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from torch_cpudist import _core
from torch_cpudist.errors import ConfigMismatchError
from torch_cpudist.model.placement import PlacedTable
from torch_cpudist.rules.state_parts import state_parts
from torch_cpudist.served.state_layout import (
    name_table_state,
    received,
    row_elements,
    unname_table_state,
)


class LocalTable(ABC):
    """One table, and its optimizer state on this trainer. Not thread-safe."""

    def __init__(self, placed: PlacedTable, config: _core.OptimizerConfig) -> None:
        """Of a table that ``config`` updates here."""
        self.placed = placed
        self._config = config
        self._parts = state_parts(config)
        dim = placed.found.weight.shape[1]
        self._widths = [row_elements(part, dim) for part in self._parts]
        self._step = 0

    @property
    def kind(self) -> str:
        """The rule that updates its rows."""
        return self._config.kind

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The memory of the state, where that is tensors."""
        return ()

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Replaces the state by one of torch's form; empty means initial.

        Raises:
            InvalidArgumentError: it does not fit; nothing was changed.
        """

    @abstractmethod
    def saved(self) -> dict[str, Any] | None:
        """Returns a copy of the state in torch's form; ``None`` if it has none."""

    @abstractmethod
    def trained_rows(self) -> dict[str, Any]:
        """A copy of the state of rows that have had an update here, for snapshots."""

    @abstractmethod
    def load_rows(self, saved: Mapping[str, Any] | None) -> bool:
        """Replaces the state by what ``trained_rows`` has returned.

        Returns:
            Whether it is of this rule and of rows of this table; else it is initial.
        """

    def go_on_by(self, exchange: _core.GeoExchange) -> None:  # noqa: B027 - all is here
        """There is another exchange, as other servers have come."""

    def put_back(self) -> None:  # noqa: B027
        """Has the state again that went with the exchange before, if any did."""

    def _fits(self, saved: Mapping[str, Any] | None) -> bool:
        if saved is None or saved["rule"] != self._config.kind:
            return False
        return bool(saved["state"].shape[1:] == (sum(self._widths),))

    def _rows(self) -> tuple[int, int, int]:
        """Addresses of weight, state and counts that a step writes to, if any."""
        return 0, 0, 0

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
            RowOutOfRangeError, UnpulledRowError: a key is no row, or one of a remote
                table was not looked up since the last step; nothing was changed.
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
            rows=self._rows(),
            config=config,
            step=self._step + 1,
        )
        self._step += 1


class WholeTable(LocalTable):
    """A static table: the state of all its rows.

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
        super().__init__(placed, config)
        rows = placed.found.weight.shape[0]
        self._state = received((rows, sum(self._widths)), torch.float32)
        self._counts = received(rows, torch.int32)
        self.load(state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Of all rows."""
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
        """Of those rows; the others' is initial."""
        self.load({})
        if saved is None or not self._fits(saved):
            return False
        rows, most = saved["rows"], len(self._counts)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < most:
            return False
        self._state[rows] = saved["state"]
        self._counts[rows] = saved["counts"]
        self._step = saved["step"]
        return True

    def _rows(self) -> tuple[int, int, int]:
        weight = self.placed.found.weight
        return weight.data_ptr(), self._state.data_ptr(), self._counts.data_ptr()


class SlotTable(LocalTable):
    """A remote table: the exchange has a slot for each row that was updated here.

    Memory: see ``Geo.cache_bytes``.
    """

    def __init__(
        self,
        placed: PlacedTable,
        config: _core.OptimizerConfig,
        exchange: _core.GeoExchange,
    ) -> None:
        """Begins without a slot."""
        super().__init__(placed, config)
        self._exchange = exchange
        self._left: dict[str, Any] | None = None

    def go_on_by(self, exchange: _core.GeoExchange) -> None:
        """Takes the slots of the one before along, for ``put_back``."""
        if self._left is None:  # else these servers were lost, too, before that
            self._left = self.trained_rows()
        self._exchange = exchange

    def put_back(self) -> None:
        """Of all slots, once the servers have values."""
        if self._left is not None:
            self.load_rows(self._left)
            self._left = None

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing: a ``state_dict`` leaves remote tables out, and theirs stays."""

    def saved(self) -> None:
        """None: which rows there are is no part of a ``state_dict``."""

    def _arrays(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            torch.empty(count, dtype=torch.int64),
            torch.empty(count, dtype=torch.int32),
            torch.empty(count, sum(self._widths)),
        )

    def trained_rows(self) -> dict[str, Any]:
        """Of all slots."""
        table = self.placed.index
        arrays = self._arrays(self._exchange.slot_count(table))
        self._exchange.read_slots(table, _addresses(arrays))
        keys, counts, state = arrays
        return {
            "rule": self._config.kind,
            "step": self._step,
            "rows": keys,
            "counts": counts,
            "state": state,
        }

    def load_rows(self, saved: Mapping[str, Any] | None) -> bool:
        """Makes slots for these rows, with the servers' values; there are no others."""
        arrays = self._arrays(0)
        fits = saved is not None and self._fits(saved)
        if saved is not None and fits:
            arrays = (
                saved["rows"].contiguous(),
                saved["counts"].contiguous(),
                saved["state"].contiguous(),
            )
            self._step = saved["step"]
        else:
            self._step = 0
        count = len(arrays[0])
        self._exchange.write_slots(self.placed.index, count, _addresses(arrays))
        return fits


def _addresses(
    arrays: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[int, int, int]:
    keys, counts, state = arrays
    return keys.data_ptr(), counts.data_ptr(), state.data_ptr()
