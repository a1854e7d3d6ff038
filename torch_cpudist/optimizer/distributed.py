# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one class, whose docstrings are what users read.
"""``DistributedOptimizer``: a torch optimizer whose updates run on the servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_cpudist.drivers.base import Driver, Wrapped
from torch_cpudist.drivers.guard import InnerGuard
from torch_cpudist.drivers.registry import make_driver, open_parameters
from torch_cpudist.errors import ClosedError
from torch_cpudist.launch import context
from torch_cpudist.launch.baseline import Baseline
from torch_cpudist.launch.run import Run
from torch_cpudist.log import logger
from torch_cpudist.model.checks import check_no_remote
from torch_cpudist.model.first_gradients import FirstGradients
from torch_cpudist.model.placement import Placement, parameter_names, place
from torch_cpudist.optimizer import face
from torch_cpudist.optimizer.averages import Averages
from torch_cpudist.optimizer.foreseeing import foresee, stats_of
from torch_cpudist.optimizer.initial_state import InitialState
from torch_cpudist.optimizer.outliving import Outliving
from torch_cpudist.optimizer.phases import Counted, waited_by
from torch_cpudist.optimizer.prefetching import Prefetching
from torch_cpudist.optimizer.returning import check_return
from torch_cpudist.optimizer.taking_part import Parts, TakingPart
from torch_cpudist.optimizer.untrained import Untrained
from torch_cpudist.resuming.paces import Often
from torch_cpudist.resuming.resumable import Resumable
from torch_cpudist.resuming.snapshots import Snapshots
from torch_cpudist.resuming.subject import Started
from torch_cpudist.rules.groups import OptimizerGroups, wrapped
from torch_cpudist.rules.state_parts import States, check_states
from torch_cpudist.served import row_counts, state_exchange
from torch_cpudist.served.base import Trained
from torch_cpudist.settings.average import EMA, check_average
from torch_cpudist.settings.clip import Clip, check_clip
from torch_cpudist.settings.fields import check_pull
from torch_cpudist.snapshot.choice import Choice
from torch_cpudist.strategies.base import Strategy
from torch_cpudist.strategies.registry import resolve

Inner = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class DistributedOptimizer(face.ServedOptimizer):
    """Trains a model with parameter servers, by a strategy.

    The wrapped optimizer is read, not replaced: its exact class and its options, as
    they stand at each step, choose what the servers do; under Geo it steps here.
    ``param_groups`` are its own dicts: schedulers over either work. Tables are the
    sparse embeddings of the model (see ``shard_tables``), all else that the optimizer
    holds is dense. Buffers (of batch norm, say) and what no wrapped optimizer trains
    stay the trainer's own; the first step warns of what differs from trainer 0's.

    Building one is collective: every trainer builds the same ones in the same order and
    waits for trainer 0, whose model gives the initial values. One over parameters that
    another ``DistributedOptimizer`` holds takes their values over and closes that one;
    over the same inner optimizer also its state.

    Thread safety: lookups (forward) from any thread; all else from one at a time.

    Args:
        optimizer: a ``torch.optim`` optimizer, or several (``SparseAdam`` on tables,
            ``AdamW`` on the rest, say).
        model: the module whose embeddings are looked at.
        strategy: a strategy, its name, or a dict with ``name``; default ``Sync()``;
            ``CPUDIST_STRATEGY`` wins.
        clip: ``ClipNorm``, ``ClipTensorNorm`` or ``ClipValue``: of the mean gradient;
            in Async of a push, in Geo and LocalSGD of the trainer's own gradient.
        average: ``EMA``: of all parameters, kept by the servers; see ``averaged``.

    Raises:
        UnsupportedOptimizerError: the servers do not run this optimizer or option.
        UnsupportedModelError: a parameter cannot be placed.
        InvalidArgumentError: no model, or arguments swapped; an optimizer of another
            model, or one that is wrapped already.
        NotInitializedError: ``cpudist.init()`` was not called in this thread.
        ConfigMismatchError: another trainer built something else.
        PeerLostError, OperationTimeoutError: a server or trainer 0 does not answer.
    """

    def __init__(
        self,
        optimizer: Inner,
        # Without one, an error of this package says so.
        model: nn.Module = None,  # type: ignore[assignment]
        strategy: Strategy | str | Mapping[str, Any] | None = None,
        clip: Clip | None = None,
        average: EMA | None = None,
    ) -> None:
        """See the class."""
        self._run: Run = context.current()
        self._run.trainer_client()
        face.check_not_wrapped(optimizer)
        self._inners = wrapped(optimizer, model)
        check_clip(clip)
        said = self._run.environment
        self.strategy = resolve(strategy, said.strategy, said.values, said.server)
        self.strategy.check_clip(clip)
        self.clip = clip
        check_average(average)
        self.strategy.check_average(average)
        self.average = average
        self._groups = OptimizerGroups(self._inners, self.strategy.local)
        super().__init__([g for i in self._inners for g in i.param_groups], {})
        self.state = face.StateOnServers()  # type: ignore[assignment]
        if self.strategy.shows_state and len(self._inners) == 1:
            self.state = self._inners[0].state
        self.defaults = face.shared_defaults(self._inners)
        placement = place(
            model,
            self.param_groups,
            self._groups.rules(),
            self.strategy.sharding,
            self._run.server_count,
            replace(self.strategy.updates(self._run.trainers()), average=average),
        )
        self._groups.check_use(placement)
        # All begin with trainer 0's values, and state from before wrapping.
        stepped = state_exchange.stepped_states(self._inners)
        check_states(placement, stepped)
        if self._run.trainer_rank == 0:
            state_exchange.warn_of_lost(self._inners)
        earlier = self._earlier()
        states = {**stepped, **self._take_over(earlier, placement)}
        self._untrained = Untrained(self._run, model, placement, not earlier)
        self._parameters: Trained | None = open_parameters(
            self.strategy,
            self._run,
            placement,
            self._inners,
            states,
            tell=self._untrained.tell,
        )
        names = parameter_names(model, self.param_groups)
        self._guard = InnerGuard(self._inners, model, placement, names)
        made = Wrapped(self._run, self._inners, self._guard, states, self._inners)
        self._driver = make_driver(self.strategy, self._parameters, made)
        self._averages = Averages(self._driver, average is not None)
        self._prefetching = Prefetching(self._parameters, self._driver.pulled)
        self._foreseen = foresee(model, self._driver.pulled, self.strategy)
        waited = waited_by(self._open, self._driver, self._run)
        self._counted = Counted(model, waited, phases=said.metrics is not None)
        self.groups_fixed = True
        self._first = FirstGradients([table.found for table in placement.tables])
        self._initial = InitialState(self._inners, self._driver.served)
        self._resumable = Resumable(self._run, model)
        self._outliving = Outliving(self._run, self._driver, self._resumable)
        self._baseline = Baseline()
        self._part = self._taking_part()
        self._run.add_participant(self._part)

    # -- construction ------------------------------------------------------------------

    def _taking_part(self) -> TakingPart:
        parts = Parts(
            run=self._run,
            driver=self._driver,
            counted=self._counted,
            averages=self._averages,
            foreseen=self._foreseen,
            initial=self._initial,
            resumable=self._resumable,
            outliving=self._outliving,
            baseline=self._baseline,
        )
        return TakingPart(self, parts)

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """What is trained, tables first."""
        return [parameter for _, parameter in self._open().trained()]

    # For the rest of this package and for its tests, not for scripts.

    @property
    def trained(self) -> Trained:
        """What is trained; raises ``ClosedError`` after ``close()``."""
        return self._open()

    @property
    def inners(self) -> Sequence[torch.optim.Optimizer]:
        """The wrapped optimizers."""
        return self._inners

    @property
    def prefetching(self) -> Prefetching:
        """Batches to come; raises ``ClosedError`` after ``close()``."""
        self._open()
        return self._prefetching

    @property
    def snapshots(self) -> Snapshots | None:
        """Those of it, after ``resume``."""
        return self._resumable.snapshots

    @property
    def leads(self) -> bool:
        """Whether this is trainer 0's."""
        return self._run.trainer_rank == 0

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called, or ``shutdown()``."""
        return self._parameters is None

    @property
    def baseline(self) -> Baseline:
        """The end of its warm-up in this process."""
        return self._baseline

    @property
    def counted(self) -> Counted:
        """Its steps, and where their time goes."""
        return self._counted

    @property
    def driver(self) -> Driver:
        """What runs the strategy."""
        return self._driver

    def _trained_ids(self) -> set[int]:
        return {id(p) for group in self.param_groups for p in group["params"]}

    def _earlier(self) -> list[DistributedOptimizer]:
        """Open optimizers over parameters of this one."""
        mine = self._trained_ids()
        return [
            other
            for other in (one.optimizer for one in self._run.participants())
            if isinstance(other, DistributedOptimizer) and mine & other._trained_ids()
        ]

    def _take_over(
        self, others: list[DistributedOptimizer], placement: Placement
    ) -> States:
        """Closes optimizers over the same parameters, once their values are here.

        Returns:
            On trainer 0 the state, on the servers, of inner optimizers that go on.
        """
        for other in others:
            other._averages.check_not_entered("a new DistributedOptimizer")
            placement = other._open().placement
            check_no_remote([table.found for table in placement.tables])
        if others:
            self._run.barrier()  # after every trainer's last push
        states: dict[torch.Tensor, Mapping[str, Any]] = {}
        for other in others:
            # What was on the servers goes there again from trainer 0.
            local = self.strategy.keeps_state or other.strategy.keeps_state
            if local or self._run.trainer_rank == 0:
                state_exchange.refresh(other._open())
                fetched = other._driver.keeper.fetch()
                for inner, one in zip(other._inners, fetched, strict=True):
                    if any(inner is own for own in self._inners):
                        states |= state_exchange.by_parameter([inner], [one])
                check_states(placement, states)
            if other.strategy.keeps_state:
                other._driver.keeper.give_back()
            other._close()
        if others:
            self._run.barrier()  # servers have let go of theirs: it counts as room
        return states

    # -- training ----------------------------------------------------------------------

    def _open(self) -> Trained:
        if self._parameters is None:
            raise ClosedError(
                "this DistributedOptimizer is closed: shutdown() was called or a new "
                "one took over its parameters."
            )
        return self._parameters

    def step(
        self, closure: Callable[[], Any] | None = None, *, samples: int | None = None
    ) -> Any:
        """One step: pushes this trainer's gradients and takes the updated values in.

        Under Sync it returns when every member of the round has pushed and every server
        has applied the mean, under HalfAsync when those of this trainer's group have;
        under Async when the gradient is queued, under Geo when this trainer's optimizer
        has stepped. A step after ``leave()`` joins again first. No gradient at all is a
        zero one of weight 1.

        Cost: one push and its reply per server (and a commit with ``ClipNorm``): the
        touched rows with their keys out, the dense values out and back.

        Args:
            closure: evaluates the model again and returns the loss.
            samples: samples behind this gradient of a *mean* loss: weighs the trainers
                of a round, so that uneven batches are exact; 0 has no weight. ``None``
                weighs equally. All of a round do the same. Async, Geo and LocalSGD
                only count them.

        Returns:
            What the closure returned, else ``None``.

        Raises:
            UnpulledRowError, DenseGradientError, ModelChangedError: nothing was sent.
            InvalidArgumentError: after ``leave()``, beside other optimizers in rounds.
            ConfigMismatchError: trainers disagree about options; nothing applied.
            PeerLostError: a process died; the round may be applied on some servers.
            OperationTimeoutError: a live trainer did not get there in time.
            NonFiniteGradientError, TableFullError, OverloadedError: servers refused a
                push: under Async an earlier one, once, and nothing of this step was
                sent; else this round's.
        """
        self._open()
        self._outliving.check()
        self._averages.check_not_entered("step()")
        check_return(self._run, self._driver)
        counted = self._counted
        counted.step_begins()
        self._resumable.before_step(self._counted.counters())
        loss = face.evaluated(closure)
        began_s = counted.step_begins()
        if not counted.steps:
            self._untrained.compare()
        self._guard.check()
        with torch.no_grad():
            counted.rounds = self._outliving.step(
                counted.steps + 1,
                lambda: self._driver.step(self._groups.rules(), samples, self.clip),
                counted.rounds,
            )
        self._first.end()
        if self._foreseen is not None:
            self._foreseen.forget_forward()
        counted.step_ends(began_s, samples or 0)
        logger.debug("step %d: update %d", counted.steps, counted.rounds)
        for inner in self._inners:
            inner._opt_called = True  # type: ignore[attr-defined]
        self._outliving.end_step(lambda: self._resumable.after_step(counted.counters()))
        counted.step_is_over()
        self._baseline.count(self.stats, self._run.loops.totals)
        self._run.leave_if_asked()
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        """For all backward passes of a step but the last: AllReduce sends nothing."""
        self._open()
        return self._driver.no_sync()

    def averaged(self) -> AbstractContextManager[None]:
        """While it is entered, the model has the averages of its parameters.

        Lookups, dense parameters, copies and ``state_dict()`` of the model are those of
        ``average=``, as of this trainer's last step. For evaluating and saving: steps
        and what writes to the servers are refused inside, and gradients of before are
        refused after it. Buffers (of batch norm, say) stay as they are: see torch's
        ``update_bn``. One trainer alone may enter it; under Sync the others wait in
        their next step, unless this one has called ``leave()``.

        Cost: entering and leaving, a pull of all dense parameters each; lookups pull
        their rows as ever, in float32.

        Raises:
            InvalidArgumentError: no average is kept, or it is entered already.
            ModelChangedError: the model was written by others.
        """
        self._open()
        return self._averages.entered()

    def prefetch(self, ids: Mapping[nn.Module, torch.Tensor]) -> None:
        """Asks for the rows of a batch to come, and returns at once.

        Call it once per batch, with all tables, before the forward of an earlier batch
        (``cpudist.data.prefetch`` does). Rows that are here or on their way are not
        asked for again; the forward waits for what has not come. Sync and HalfAsync:
        rows that a round updates meanwhile come anew with its reply, so that results
        are those without prefetch, bit for bit under Sync. Async: rows are as old as
        they are, which ``opt.stats()["staleness"]`` counts. Geo, AllReduce and Reduce:
        nothing to do, all rows are here; what is passed is checked all the same.

        A hint: a lookup of other ids pulls them; a batch whose ids are never used goes
        when 16 newer ones were declared. A batch counts as used in the step that has
        looked up all its ids. ``flush()``, ``leave()``, ``barrier()`` and everything
        that writes to the servers forget what is outstanding; while this trainer takes
        no part (after ``leave()``) the call does nothing.

        Cost: one request and reply per server that owns rows that are missing; in
        rounds 8 bytes per row held, and the updated ones again, in the push and its
        reply. Thread safety: as ``step``.

        Args:
            ids: int32 or int64, any shape, on the CPU, by the module that looks them
                up.

        Raises:
            InvalidArgumentError: no mapping, or a module that is no table; with
                ``max_staleness``, which prefetched rows would exceed.
            IdTypeError, UnsupportedModelError: ids of another dtype or device.
            RowOutOfRangeError: an id is no row; nothing was asked for.
            ModelChangedError: the table was written by others.
            PeerLostError: a server is lost.
        """
        self._open()
        self._prefetching.ask(ids, managed=False)

    def flush(self, pull: str = "all", *, overwrite: bool = False) -> None:
        """Returns when every push of this trainer is applied and copies are fresh.

        May be called by one trainer alone.

        Args:
            pull: ``"all"`` refreshes tables and dense parameters, ``"dense"`` the
                latter, ``"none"`` nothing.
            overwrite: drop what was written to the model since the last step.

        Raises:
            ModelChangedError: it was written, without ``overwrite``; all is as before.
        """
        parameters = self._open()
        self._averages.check_not_entered("flush()")
        check_pull("flush", pull)
        if not overwrite:
            parameters.check_unchanged()
        changed = bool(parameters.changed())
        self._outliving.lasting(lambda: self._driver.flush(pull, changed))

    def leave(self) -> None:
        """Ends this trainer's part in rounds: the others go on without it.

        The next ``step()`` joins again. ``barrier()`` and ``shutdown()`` imply it.
        """
        self._open()
        self._outliving.lasting(self._leave)
        self._counted.said_left = True

    def _leave(self) -> None:
        self._resumable.leaving(self._counted.counters())
        self._driver.leave()
        self._resumable.settle()

    def join(self) -> None:
        """Takes part again after ``leave()``, before the next forward.

        Needed with ``Async(max_staleness=)`` only, which refuses a step on values from
        before; refreshes dense parameters. As tables of ``Hybrid(dense=Sync())`` it
        waits for the others' step, and they from then on for this trainer's.
        """
        parameters = self._open()
        self._averages.check_not_entered("join()")
        parameters.check_unchanged()
        self._outliving.lasting(self._driver.join)

    @property
    def rounds(self) -> int:
        """Updates behind the dense values as of this trainer's last step; 0 before."""
        return self._counted.rounds

    def count_phases(self) -> None:
        """Counts from now on where time goes: ``stats()["phase_s"]``. Idempotent.

        Seconds of ``data``, ``forward``, ``backward``, ``push`` and ``wait``, as in
        docs/monitoring.md; ``CPUDIST_METRICS`` asks for it, too. Cost: 75 µs a step.

        Raises:
            ClosedError: ``close()`` was called.
        """
        self._open()
        self._counted.count_phases()

    def stats(self) -> dict[str, Any]:
        """Returns what this trainer has done so far.

        Returns:
            ``steps``, ``samples`` (as told to ``step``), ``step_s`` (in ``step``),
            ``phase_s`` (if counted), and since ``init()`` of the client:
            ``bytes_sent``, ``bytes_received``, ``wait_s`` (blocked on servers),
            ``round_wait_s`` (of which for rounds), ``rows_pulled``, ``rows_pushed``,
            ``requests``, ``resent``, ``reconnects``, ``rows_prefetched``,
            ``prefetch_hits``, ``prefetch_refreshed``, ``cache_dropped`` and
            ``residues_dropped`` (rows that went for memory), ``early_bytes`` (before
            their push), ``early_changed_bytes``, ``staleness``; ``lookups`` (a dict):
            ``together``, forwards whose rows were asked for at once, ``tables``
            that this covers now, ``alone``, lookups that asked by themselves,
            ``in_vain``, rows that were asked for and not looked up; what the strategy
            has, see its page; and after ``resume``, ``snapshot`` (a dict): ``parts``,
            of which this trainer has written its own; ``saved``, those that are
            committed, and ``last``, the name of the newest, on trainers that do not
            commit as far as this one has seen; ``failed`` and ``skipped`` (not taken)
            here; ``deltas`` and ``last_s``, from its moment to its end, of who commits;
            ``pause_s_max``, the longest time that one has kept a step. Under Async and
            Geo in jobs of their own also ``recovered`` (a dict): ``count``, how often
            servers have come back, and ``rejoined``, how often they had counted this
            trainer as lost; ``lost_updates`` of it in all, ``torn_updates``, those some
            servers have; ``lost_s``, of training that went with servers. Counters of
            the client begin anew each time.
        """
        return {
            **self._counted.stats(),
            **self._open().client.stats(),
            "lookups": stats_of(self._foreseen),
            **self._driver.stats(),
            **self._resumable.stats(),
            **self._outliving.stats(),
        }

    def table_stats(self) -> dict[str, dict[str, int]]:
        """Asks the servers what they have of remote tables, by the parameter's name.

        May be called by one trainer alone; a moment of each server, while others train.

        Returns:
            Of each table, summed over servers: ``rows`` and their ``bytes`` (records,
            index, and the sketch of a ``CountFilter``), and since it was opened:
            ``created`` rows, ``filtered`` (rows of pushes that were dropped, as their
            keys had not been admitted), ``evicted`` rows, and ``unknown_reads``, of
            keys without a row. Empty where no table is remote.

        Raises:
            PeerLostError, OperationTimeoutError: a server does not answer.

        Cost: a request and reply per server and table.
        """
        self._open()
        return self._outliving.lasting(
            lambda: row_counts.table_stats(self._driver.pulled)
        )

    def shrink(self, name: str | None = None) -> dict[str, int]:
        """Evicts now every row whose time has come, by the tables' ``Evict``.

        Any trainer may call it. Under ``Sync`` servers do it between two updates: for
        the same rows in every run, call it at the same step, after a ``step()`` that
        all have made (trainer 0 alone, at a barrier, say).

        Args:
            name: of a table's parameter; default: all that have an ``eviction``.

        Returns:
            By the parameter's name, how many rows went.

        Raises:
            InvalidArgumentError: ``name`` is no table that evicts.
            PeerLostError, OperationTimeoutError: a server does not answer.

        Cost: servers look at every row, some thousand at a time, between updates.
        """
        self._open()
        return self._outliving.lasting(
            lambda: row_counts.shrink(self._driver.pulled, name)
        )

    # -- state -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Pulls the servers' optimizer state, in the form of the plain torch optimizer.

        May be called by one trainer alone. The result loads into the wrapped
        optimizer's class and back. Cost: all weights and state once over the wire.

        Returns:
            torch's ``{"state", "param_groups"}``; for a list of optimizers
            ``{"optimizers": [one of these each]}``. Tables have an extra entry
            ``cpudist_row_step``, the number of updates of each row. Remote tables are
            left out, and named under ``"remote"``.
        """
        face.run_before_saving(self)
        self._open()
        self._averages.check_not_entered("state_dict() of the optimizer")
        dicts = self._outliving.lasting(self._driver.keeper.fetch)
        found = dicts[0] if len(dicts) == 1 else {"optimizers": dicts}
        tables = self._open().placement.tables
        remote = [table.found.name for table in tables if table.found.remote]
        if remote:
            found = {**found, "remote": remote}
        return face.run_after_saving(self, found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads optimizer state into the servers. Collective.

        Every trainer passes the same ``state_dict``; trainer 0's state goes to the
        servers, with the weights that stand there, or trainer 0's where its model was
        loaded after wrapping. Hyper-parameters are set on every trainer. Rows of remote
        tables are not in it, and a warning says so: snapshots have them.

        Args:
            state_dict: from ``state_dict()`` or from the plain torch optimizer.

        Raises:
            InvalidArgumentError: it belongs to other optimizers or another model;
                nothing was changed or sent.
            ModelChangedError: see ``store_model``.
        """
        self._open()
        self._averages.check_not_entered("load_state_dict()")
        if isinstance(state_dict, dict):
            state_dict = face.run_before_loading(self, state_dict)
        self._driver.keeper.load(state_dict)
        if state_dict.get("remote"):
            logger.warning(
                "load_state_dict: the rows of remote tables %s and their state are not "
                "in it and stay as they are on the servers, of another moment than the "
                "rest. opt.resume() and opt.load_snapshot() bring all of one moment.",
                ", ".join(map(repr, state_dict["remote"])),
            )
        face.run_after_loading(self)

    def store_model(self, *, all_rows: bool = False) -> None:
        """Sends trainer 0's weights to the servers, keeping state. Collective.

        For weights written after the optimizer was wrapped (``model.load_state_dict``,
        say): whole parameters only, of those that were written. Call ``flush()`` before
        writing to some rows of a table, so that the others are the servers'.

        Args:
            all_rows: every row of a written table was written, so that it matters not
                whether rows were stale before.

        Raises:
            ModelChangedError: trainer 0 wrote to a table whose rows were not all
                current; nothing was sent, and the other trainers wait for it.
        """
        self._open()
        self._averages.check_not_entered("store_model()")
        self._driver.keeper.store_model(all_rows)

    # -- snapshots ---------------------------------------------------------------------

    def resume(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        delta_every_steps: int | None = None,
        delta_every_s: float | None = None,
        full_every: int = 10,
        keep: int = 3,
        state: Mapping[str, Any] | None = None,
        staging: str | os.PathLike[str] | None = None,
        load: bool = True,
    ) -> Started:
        """Goes on from the newest snapshot if there is one, and saves more. Collective.

        Once, after wrapping and before the first step, with equal arguments on all.
        docs/snapshot.md says what is in a snapshot and how trainers agree on its
        moment; training goes on while it is written. In jobs of their own, a trainer
        that comes back under Async or Geo gets its own state, and values stay.

        Cost: 2 s per GB to load; to save, a copy of own state, a message per server.

        Args:
            path: the directory, one for all processes; default
                ``CPUDIST_SNAPSHOT_DIR``, which servers of their own need. Or the URL of
                a prefix in an object store (``s3://bucket/prefix``), by fsspec.
            every_steps: steps between them; of trainer 0 under Async, HalfAsync, Geo.
            every_s: seconds between snapshots, by trainer 0's clock.
            delta_every_steps: steps between snapshots, beside the others, of only the
                rows that have changed since the one before.
            delta_every_s: seconds between those.
            full_every: of how many a chain of those consists at most, from 2 up;
                refused without them.
            keep: how many stay, besides those with a name of their own and those that
                they are put over.
            state: objects with ``state_dict()`` and ``load_state_dict()``, by name: a
                dataset of ``cpudist.data``, a schedule of the rate; or a
                ``torch.Generator``. Saved as they stand at the end of ``step``;
                schedules that go on with every step as they stand after that.
            staging: with a URL, the directory, one for all processes, to which
                snapshots are written before trainer 0 copies them; default
                ``CPUDIST_SNAPSHOT_DIR``. Where it is empty they come from the store.
            load: ``False`` begins anew; ``load_snapshot`` says what to go on from.

        Returns:
            ``step``: steps that this trainer has made, 0 where there was no snapshot;
            ``name`` of the snapshot or ``None``; ``report``: what was taken, and, also
            as a warning, what was not.

        Raises:
            InvalidArgumentError: an argument is wrong, or it is too late.
            ConfigurationError: nobody has said where snapshots are.
            ConfigMismatchError: not all see one directory, or data are others.
            SnapshotError: the strategy has none, or nothing of the newest one fits.
            SnapshotCorruptError: there are some, and none is whole. One that is not is
                passed over with a warning where there is an older one.
        """
        self._open()
        subject = self._resumable.subject(
            groups=self.param_groups,
            driver=self._driver,
            strategy=(self.strategy.name, {"given": repr(self.strategy)}),
            average_decay=0.0 if self.average is None else self.average.decay,
            counters=self._counted,
            readers=self._prefetching.readers,
        )
        pace = (every_steps, every_s, delta_every_steps, delta_every_s)
        given = (path, Often(*pace, full_every, keep), state, staging, load)
        return self._resumable.resume(subject, self._counted.steps > 0, *given)

    def _resumed(self, what: str) -> Snapshots:
        self._open()
        self._averages.check_not_entered(f"{what}()")
        return self._resumable.resumed(what)

    def save_snapshot(self, name: str | None = None) -> str:
        """Saves one now, between two steps, and returns when it is there.

        Under Sync and among trainers that average by themselves collective; under
        Async, Geo and HalfAsync on trainer 0 alone, while the others go on. Where
        trainer 0 is in a group of HalfAsync all trainers of it call this after the same
        step. Under Geo with ``outer`` collective, after whatever step, and a barrier.

        Args:
            name: 1 to 64 of a-z, 0-9 and -; it is never overwritten, and stays however
                many follow. Default: one by its number.

        Returns:
            Its name.

        Raises:
            InvalidArgumentError: no such name can be, or another trainer has to say so.
            SnapshotError: it was not taken or not saved. Training is as before.
        """
        snapshots, counted = self._resumed("save_snapshot"), self._counted
        return self._outliving.lasting(lambda: snapshots.save(name, counted.counters()))

    def load_snapshot(
        self,
        name: str | os.PathLike[str],
        *,
        only: Sequence[str] | None = None,
        map: Mapping[str, str] | None = None,
    ) -> Started:
        """Goes back to a snapshot, or takes some of its values. Collective.

        Without ``only`` the run goes back to it, as by ``resume``. With it tables and
        dense parameters get its values, and their optimizer state where the rule is the
        same; everything else, steps and generators too, stays as it is: a warm start.

        Args:
            name: of a snapshot in the directory of ``resume`` or its object store; or
                the path of one that lies elsewhere, which all trainers have to see
                (servers need not); or the URL of one.
            only: names of parameters of this model, or patterns (``"users.*"``).
            map: names in this model by names in the snapshot, ``{"old": "new"}``; with
                a dot at the end of both, of all names that begin so.

        Returns:
            As ``resume``; ``taken``, ``missing`` and ``unused`` say what of the
            snapshot went where.

        Raises:
            InvalidArgumentError: an argument cannot be.
            SnapshotCorruptError: a file of it is damaged.
            SnapshotError: there is none of that name, nothing of it fits, or something
                that ``only`` or ``map`` has named is not there, or of another shape.
                Nothing was changed.
        """
        snapshots = self._resumed("load_snapshot")
        return snapshots.load(name, Choice.of(only, map), self._counted.counters())

    def add_generators(self, generators: Sequence[torch.Generator]) -> None:
        """Takes the generators of replicas into snapshots."""
        self._resumable.add_generators(generators)

    # -- the end -----------------------------------------------------------------------

    def close(self, tell_servers: bool = True) -> None:
        """Gives the model its classes back, the servers their memory. Idempotent.

        Values stay as they are here: ``flush()`` before makes them the servers'. The
        optimizer state goes with the servers: save ``state_dict()`` before.

        Args:
            tell_servers: ``False`` where servers can no longer be reached.
        """
        # Where it runs here, wrapping took the state of tables out of the optimizer.
        stepped = self._counted.steps > 0 or self.strategy.keeps_state
        if stepped and self._parameters is not None:
            self._driver.keeper.give_back()
        self._close(tell_servers)

    def _close(self, tell_servers: bool = True) -> None:
        """``close()`` where the state goes on elsewhere."""
        if self._parameters is not None:
            self._resumable.close(tell_servers)
        parameters, self._parameters = self._parameters, None
        self.groups_fixed = False
        if parameters is not None:
            self._guard.release()
            self._first.end()
            if self._foreseen is not None:
                self._foreseen.close()
            self._counted.close()
            self._initial.give_back()
            parameters.close(tell_servers)
            self._run.remove_participant(self._part)
