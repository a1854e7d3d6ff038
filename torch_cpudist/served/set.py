# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one class, from opening it to its end, on servers that may come back between
"""What one ``DistributedOptimizer`` trains, as the servers hold it.

Opens the parameter set, sends trainer 0's initial values, keeps the trainer's copies,
and carries gradients to the servers. When to do so is the strategy's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_cpudist import _core, ranges
from torch_cpudist.errors import ClosedError, Error, PeerLostError
from torch_cpudist.log import logger
from torch_cpudist.model.dense_memory import dense_memory
from torch_cpudist.model.gradients import read_table_gradient
from torch_cpudist.model.placement import PlacedTable, Placement
from torch_cpudist.served.base import Trained
from torch_cpudist.served.early import EarlyPushes
from torch_cpudist.served.progress import tell_waiting
from torch_cpudist.settings.clip import Clip, ClipNorm, ClipTensorNorm, ClipValue
from torch_cpudist.tables.binding import TableBinding, bound_ids
from torch_cpudist.tables.learned import Guess
from torch_cpudist.tables.local import attach, detach
from torch_cpudist.tables.remote_binding import RemoteBinding
from torch_cpudist.tables.remote_weight import table_of
from torch_cpudist.tables.staged import HostedWeights
from torch_cpudist.tables.weight import as_it_stands

RUN_BYTES = 64 << 20
Outlive = Callable[[Error, _core.Client | None], None]


def row_runs(rows: int, elements: int) -> Iterator[tuple[int, int]]:
    """Yields the first and the last row (exclusive) of runs that are sent at once.

    Args:
        rows: of the table; with none there is one run, of no rows.
        elements: float32 values that travel with a row.
    """
    size = max(1, RUN_BYTES // (4 * max(1, elements)))
    for begin in range(0, max(rows, 1), size):
        yield begin, min(begin + size, rows)


class ParameterSet(Trained):
    """Tables and dense parameters of one optimizer, open on every server.

    Thread safety: lookups from any thread; everything else from one thread at a time.
    """

    def __init__(
        self,
        client: _core.Client,
        placement: Placement,
        store: Callable[[ParameterSet], None] | None,
        check_room: Callable[[], None],
        trainer_rank: int,
    ) -> None:
        """Opens the set, and waits until trainer 0's values are on the servers.

        Args:
            client: this trainer's client.
            placement: tables, dense parameters and their layout.
            store: sends the initial values once the set is open; on trainer 0 only.
            check_room: raises if the values have no room; before they are sent.
            trainer_rank: of this trainer.

        Raises:
            ConfigMismatchError: another trainer opened a different layout.
            PeerLostError, OperationTimeoutError: a server or trainer 0 does not answer.
        """
        super().__init__(client, placement)
        self._trainer_rank = trainer_rank
        self._bindings: list[TableBinding] = []
        self._closed = False
        self._outlive: Outlive | None = None
        self._early: EarlyPushes | None = None
        self._dense = dense_memory(placement.dense, placement.device)
        self._hosted = HostedWeights(
            [(table.found.name, table.found.weight) for table in placement.tables]
        )
        try:
            self._open(store, check_room)
        except BaseException:
            self._hosted.give_back()
            raise

    def _open(
        self,
        store: Callable[[ParameterSet], None] | None,
        check_room: Callable[[], None],
    ) -> None:
        placement = self.placement
        self.opened = self._opened_on(self.client)
        self._bound = self.opened, self.client  # what lookups ask, and of which client
        try:
            check_room()
        except BaseException:
            with contextlib.suppress(Error):
                self.opened.close()
            raise
        # A trainer 0 that comes back finds the values of a run that went on.
        stored = store is not None and not self.opened.holds_values()
        if store is not None and stored:
            store(self)
        elif not self.opened.holds_values():
            tell_waiting(self._trainer_rank, placement)
        self.opened.ready()
        for table in placement.tables:
            if table.found.remote:
                table_of(table.found.weight).free_values()
            self._bind(table)
        self.tables_current = stored
        self.pull_dense()

    def _opened_on(self, client: _core.Client) -> _core.ParamSet:
        communicator = self.placement.communicator
        return client.open(
            self.placement.layout,
            cache_bytes=communicator.cache_bytes,
            residue_bytes=communicator.residue_bytes,
        )

    # -- servers that come back --------------------------------------------------------

    def outlives_by(self, outlive: Outlive) -> None:
        """Has lookups go on when servers have come back.

        Args:
            outlive: called with what a call has failed with, and its client, ``None``
                for one that was replaced since; returns when lookups can go on.
        """
        self._outlive = outlive
        for binding in self._bindings:
            binding.outlive = self._outlived

    def _outlived(self, error: Error, opened: _core.ParamSet) -> None:
        outlive, (now, client) = self._outlive, self._bound
        if outlive is None:
            raise error
        outlive(error, client if opened is now else None)

    def _lasting(self, ask: Callable[[_core.ParamSet], Any]) -> Any:
        while True:
            opened, _ = self._bound
            try:
                return ask(opened)
            except (PeerLostError, ClosedError) as error:
                self._outlived(error, opened)

    def reopen(self, client: _core.Client) -> None:
        """Opens it on other servers, in the place of those that were lost.

        Lookups go on with ``rebind``.

        Raises:
            ConfigMismatchError: another trainer opened a different layout.
            PeerLostError, OperationTimeoutError: a server does not answer.
        """
        with contextlib.suppress(Error):
            self.opened.forget_weights()
        self.client = client
        self.opened = self._opened_on(client)

    def begin_anew(self) -> None:
        """All rows here are old, and dense values come now."""
        for binding in self._bindings:
            binding.forget_rows(self.opened)
        self.opened.drop_prefetched()
        self.tables_current = False
        self.join()
        self.accept_changes()

    def rebind(self) -> None:
        """Has lookups ask the servers that it was reopened on: they have values."""
        self._bound = self.opened, self.client
        for binding in self._bindings:
            binding.go_on_with(self.opened)

    def _bind(self, table: PlacedTable) -> None:
        found = table.found
        bound = (
            self.opened,
            table.index,
            found.name,
            found.weight,
            self._versions,
            self.placement.device,
        )
        binding = (
            RemoteBinding(*bound)
            if found.remote
            else TableBinding(
                *bound,
                self._hosted.home_of(found.weight),
                self.placement.layout.pull_dtype == "fp32",
            )
        )
        self._bindings.append(binding)
        self._attach(table, binding)
        self._versions[id(found.weight)] = found.weight._version

    def _attach(self, table: PlacedTable, binding: TableBinding) -> None:
        """Makes the lookups of a table pull their rows."""
        for module in table.found.modules:
            attach(module, binding)

    @property
    def tables_current(self) -> bool:
        """Whether every row of every table is as after this trainer's last step."""
        return not any(binding.stale for binding in self._bindings)

    @tables_current.setter
    def tables_current(self, current: bool) -> None:
        for binding in self._bindings:
            binding.stale = not current

    def age_rows(self) -> None:
        """Notes that others may have stepped since this trainer's last step."""
        for binding in self._bindings:
            binding.age()

    # -- values from the servers -------------------------------------------------------

    @property
    def bounded(self) -> bool:
        """Whether the staleness of gradients has a bound."""
        return self.placement.layout.max_staleness is not None

    def join(self) -> None:
        """Takes part again after ``leave`` or a barrier, with values as of now.

        Only a bound on staleness needs it: values read before would exceed it.
        """
        if self.bounded:
            self.opened.join()
        self.pull_dense()

    def pull_dense(self) -> None:
        """Overwrites every dense parameter with the servers' values."""
        with self._dense.weights() as addresses:
            if addresses:
                with ranges.of(ranges.PULL):
                    self.opened.pull_dense(addresses)
        self.note_written([entry.parameter for entry in self.placement.dense])

    def pull_tables(self) -> None:
        """Overwrites every row of every table with the servers' values."""
        changed = self.changed()
        for binding in self._bindings:
            if binding.name in changed:
                binding.forget_rows(self.opened)
            else:
                binding.bind_weight(self.opened)
        with ranges.of(ranges.PULL):
            self.opened.pull_all_rows()
        self.tables_current = True
        self.note_written([table.found.weight for table in self.placement.tables])

    def prefetch(self, ids: Mapping[nn.Module, torch.Tensor], managed: bool) -> int:
        """Asks for rows of a batch to come; see ``DistributedOptimizer.prefetch``.

        Args:
            ids: by module that will look them up.
            managed: ``use_prefetched`` tells when the batch is computed.

        Returns:
            The number of the batch, 0 if nothing was asked for.
        """
        coming: list[tuple[int, int, int, bool]] = []
        alive: list[torch.Tensor] = []
        for binding, tensor in bound_ids(self._bindings, ids):
            flat = binding.checked_ids(tensor)
            binding.bind_weight(self.opened)
            alive.append(flat)
            coming.append(
                (
                    binding.table,
                    flat.data_ptr(),
                    flat.numel(),
                    flat.dtype == torch.int32,
                )
            )
        with ranges.of(ranges.PULL):
            number: int = self._lasting(lambda opened: opened.prefetch(coming, managed))
        return number

    @property
    def bindings(self) -> Sequence[TableBinding]:
        """Those of its tables."""
        return self._bindings

    def pull_together(self, guesses: Sequence[Guess]) -> Sequence[int]:
        """Pulls what lookups are likely to want; see ``tables/learned.py``.

        Cost: one request and reply per server that owns rows that are missing.

        Returns:
            How many rows were asked for, of each guess.

        Raises:
            PeerLostError, OperationTimeoutError: a server does not answer.
        """
        with ranges.of(ranges.PULL):
            asked: Sequence[int] = self._lasting(
                lambda opened: opened.pull_together(guesses)
            )
        return asked

    # -- gradients ---------------------------------------------------------------------

    def push_early(self) -> None:
        """From now on dense gradients go when backward has them; see ``early.py``.

        Only to servers of other hosts that take them, and from the CPU.
        """
        on_cpu = self.placement.device.type == "cpu"
        if on_cpu and self.placement.dense and self.opened.may_push_early():
            self._early = EarlyPushes(lambda: self.opened, self.placement.dense)

    def push(
        self,
        configs: list[_core.OptimizerConfig],
        samples: int | None,
        clip: Clip | None,
    ) -> int:
        """Sends the gradients of one step and takes the updated values in.

        Args:
            configs: hyper-parameters of this step, one per group.
            samples: this trainer's weight in the mean; ``None`` weighs all equally.
            clip: how the averaged gradient is clipped.

        Returns:
            The number of the round that was applied.

        Raises:
            UnpulledRowError, DenseGradientError, ModelChangedError: nothing was sent.
            ConfigMismatchError: trainers disagree; nothing was applied.
            PeerLostError, OperationTimeoutError: the round may have been applied on
                some servers.
        """
        number = self.send(
            self.opened.push,
            configs,
            clip,
            weight=1.0 if samples is None else float(samples),
            samples=samples or 0,
            by_samples=samples is not None,
        )
        if self._early is not None:
            self._early.stepped()
        return number

    def send(
        self,
        send: Callable[..., int],
        configs: list[_core.OptimizerConfig],
        clip: Clip | None,
        **options: Any,
    ) -> int:
        """Hands the gradients of one step to the client, and notes what it wrote.

        Args:
            send: the client's method that takes them.
            configs: hyper-parameters of this step, one per group.
            clip: how the gradient is clipped.
            options: of ``send``, besides.

        Returns:
            What ``send`` returned: the number of updates behind the dense values.

        Raises:
            UnpulledRowError, DenseGradientError, ModelChangedError: nothing was sent.
        """
        self.check_unchanged()
        gradients = self._gradients()
        norm = clip if isinstance(clip, (ClipNorm, ClipTensorNorm)) else None
        try:
            with self._dense.weights() as addresses, ranges.of(ranges.PUSH):
                updates = send(
                    clip_value=clip.value if isinstance(clip, ClipValue) else 0.0,
                    clip_norm=0.0 if norm is None else norm.max_norm,
                    clip_each=isinstance(clip, ClipTensorNorm),
                    configs=configs,
                    parameters=gradients.parameters,
                    tables=gradients.tables,
                    weights=addresses,
                    **options,
                )
        finally:
            # Not before: what another thread reads meanwhile is from before the step.
            self.tables_current = False
        self.note_written([parameter for _, parameter in self.trained()])
        return updates

    def _gradients(self) -> _Gradients:
        found = _Gradients()
        for index, grad in self._dense.gradients():
            found.alive.append(grad)
            found.parameters.append((index, grad.data_ptr()))
        with as_it_stands():
            rows = [table.found.weight.grad for table in self.placement.tables]
        for table, sparse in zip(self.placement.tables, rows, strict=True):
            if sparse is not None:
                keys, values = read_table_gradient(table.found.name, sparse)
                found.alive += (keys, values)
                found.tables.append(
                    (table.index, keys.data_ptr(), keys.numel(), values.data_ptr())
                )
        return found

    def check_kept(self) -> None:
        """Refuses parameters that are no longer what the servers hold.

        Raises:
            ModelChangedError: a parameter has another shape, dtype or device.
        """
        self._dense.check_kept()
        for binding in self._bindings:
            binding.bind_weight(self.opened)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def _tell_of_rows(self) -> None:
        """Warns, once for all trainers, of rows that go with their servers."""
        names = [t.found.name for t in self.placement.tables if t.found.remote]
        if names and self._trainer_rank == 0 and self._bindings:
            logger.warning(
                "the rows of %s, whatever they have learned since the last snapshot, "
                "go with the servers. Wrapped again, they begin anew; opt.resume() "
                "saves them and goes on from what was saved.",
                f"remote tables {', '.join(map(repr, names[:3]))}"
                + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            )

    def close(self, tell_servers: bool) -> None:
        """Gives modules their classes back; can free the servers' memory."""
        self._tell_of_rows()
        self._closed = True
        self._outlive = None
        if self._early is not None:
            self._early.close()
        for table in self.placement.tables:
            for module in table.found.modules:
                detach(module)
        for binding in self._bindings:
            binding.close()
        self._bindings.clear()
        try:
            if tell_servers:
                self.opened.close()
        finally:
            with contextlib.suppress(Error):
                self.opened.forget_weights()
            # Not before: a step that was interrupted ends there, and writes rows.
            self._hosted.give_back()


@dataclass
class _Gradients:
    """Gradients of one step as the client takes them."""

    parameters: list[tuple[int, int]] = field(default_factory=list)
    tables: list[tuple[int, int, int, int]] = field(default_factory=list)
    alive: list[torch.Tensor] = field(default_factory=list)  # what addresses point to
