# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``DistributedOptimizer``: an ordinary torch optimizer whose updates run on the servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_cpudist import _core, context, optimizer_rules, optimizer_state
from torch_cpudist import strategies as strategy_registry
from torch_cpudist.clip import Clip, ClipNorm, ClipValue
from torch_cpudist.errors import ClosedError, InvalidArgumentError, UnsupportedOptimizerError
from torch_cpudist.parameter_set import ParameterSet
from torch_cpudist.placement import DenseParameter, PlacedTable, place
from torch_cpudist.strategies.base import Strategy
from torch_cpudist.strategies.sync_driver import SyncDriver

Inner = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class DistributedOptimizer(torch.optim.Optimizer):
    """Trains a model with parameter servers, by a strategy.

    The wrapped optimizer is read, not replaced: its exact class and its options, as they stand
    at each step, choose what the servers do. ``param_groups`` are its own dicts, so schedulers
    made over either of the two work. Tables are the sparse embeddings of the model (see
    ``shard_tables``); everything else that the optimizer holds is dense. Buffers (running
    statistics of batch norm, say) stay the trainer's own.

    Building one is collective: every trainer builds the same ones in the same order and waits
    for trainer 0, whose model gives the initial values. One over parameters that another
    ``DistributedOptimizer`` holds closes that one.

    Thread safety: lookups (forward) from any thread; ``step`` and the rest from one at a time.

    Args:
        optimizer: a ``torch.optim`` optimizer, or several (``SparseAdam`` on tables, ``AdamW``
            on the rest, say).
        model: the module whose embeddings are looked at.
        strategy: a strategy, its name, or a dict with ``name``; default ``Sync()``;
            ``CPUDIST_STRATEGY`` wins.
        clip: ``ClipNorm`` or ``ClipValue``, applied to the averaged gradient.

    Raises:
        UnsupportedOptimizerError: the servers do not run this optimizer or option.
        UnsupportedModelError: a parameter cannot be placed.
        NotInitializedError: ``cpudist.init()`` was not called in this thread.
        ConfigMismatchError: another trainer built something else.
        PeerLostError, OperationTimeoutError: a server or trainer 0 does not answer.
    """

    def __init__(
        self,
        optimizer: Inner,
        model: nn.Module,
        strategy: Strategy | str | Mapping[str, Any] | None = None,
        clip: Clip | None = None,
    ) -> None:
        """See the class."""
        self._context = context.current()
        self._parameters: ParameterSet | None = None
        client = self._context.trainer_client()
        self._inners = (
            [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        )
        if not self._inners:
            raise InvalidArgumentError("DistributedOptimizer: the list of optimizers is empty")
        if clip is not None and not isinstance(clip, (ClipNorm, ClipValue)):
            raise InvalidArgumentError(
                f"DistributedOptimizer: clip must be ClipNorm or ClipValue, got {clip!r}"
            )
        for inner in self._inners:
            optimizer_rules.check_optimizer(inner)
        self.strategy = strategy_registry.resolve(strategy, self._context.environment)
        self.clip = clip
        self._owner_of_group = [i for i in self._inners for _ in i.param_groups]
        super().__init__([g for i in self._inners for g in i.param_groups], {})
        self._close_overlapping()
        configs = self._configs()
        placement = place(
            model,
            self.param_groups,
            configs,
            self.strategy.sharding,
            self._context.server_count,
        )
        for table in placement.tables:
            self._check_use(configs, table.group, table.found.name, table=True)
        for entry in placement.dense:
            self._check_use(configs, entry.group, entry.name, table=False)
        chief = self._context.trainer_rank == 0
        self._parameters = ParameterSet(client, placement, chief)
        self._driver = SyncDriver(self._parameters)
        self._step_count_total = 0
        self._rounds = 0
        self._sample_count = 0
        self._step_s = 0.0
        self._context.add_optimizer(self)
        self._take_over_state()

    # -- construction ------------------------------------------------------------------------

    def _check_use(
        self, configs: list[_core.OptimizerConfig], group: int, name: str, table: bool
    ) -> None:
        owner = self._owner_of_group[group]
        optimizer_rules.check_use(owner, configs[group], name, table)

    def _configs(self) -> list[_core.OptimizerConfig]:
        pairs = zip(self._owner_of_group, self.param_groups, strict=True)
        return [optimizer_rules.read_group(owner, group) for owner, group in pairs]

    def _trained_ids(self) -> set[int]:
        return {id(p) for group in self.param_groups for p in group["params"]}

    def _close_overlapping(self) -> None:
        mine = self._trained_ids()
        for other in self._context.optimizers():
            if mine & other._trained_ids():
                other.close()

    def _take_over_state(self) -> None:
        """Sends state that the inner optimizers already have, as after a resumed run."""
        stepped = any(
            int(state.get("step", 0) or 0) > 0 or state.get("momentum_buffer") is not None
            for inner in self._inners
            for state in inner.state.values()
        )
        if stepped:
            self._load_states([inner.state for inner in self._inners])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses a group after construction: placement is fixed.

        Raises:
            UnsupportedOptimizerError: always, once built.
        """
        if self._parameters is not None:
            raise UnsupportedOptimizerError(
                "add_param_group: the placement of a DistributedOptimizer is fixed. Add the "
                "group to the inner optimizer and build a new DistributedOptimizer."
            )
        super().add_param_group(param_group)

    # -- training ----------------------------------------------------------------------------

    def _open(self) -> ParameterSet:
        if self._parameters is None:
            raise ClosedError(
                "this DistributedOptimizer is closed: shutdown() was called or a new one took "
                "over its parameters."
            )
        return self._parameters

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, samples: int | None = None
    ) -> Any:
        """One step: pushes this trainer's gradients and takes the updated values in.

        Under Sync it returns when every member of the round has pushed and every server has
        applied the mean. A step after ``leave()`` joins again first. No gradient at all counts
        as a zero gradient of weight 1.

        Cost: one push and its reply per server (and a commit with ``ClipNorm``): the touched
        rows with their keys out, the dense values out and back.

        Args:
            closure: evaluates the model again and returns the loss.
            samples: samples behind this gradient of a *mean* loss: weighs the trainers of the
                round by it, so that uneven batches are exact; 0 has no weight. ``None`` weighs
                equally. All trainers of a round use the same one of the two ways.

        Returns:
            What the closure returned, else ``None``.

        Raises:
            UnpulledRowError, DenseGradientError, ModelChangedError: nothing was sent.
            ConfigMismatchError: trainers disagree about hyper-parameters; nothing applied.
            PeerLostError: a process died; the round may be applied on some servers.
            OperationTimeoutError: a live trainer did not get there in time.
        """
        parameters = self._open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        began = time.perf_counter()
        with torch.no_grad():
            self._rounds = self._driver.step(self._configs(), samples, self.clip) + 1
        self._step_s += time.perf_counter() - began
        self._step_count_total += 1
        self._sample_count += samples or 0
        for inner in self._inners:
            inner._opt_called = True  # type: ignore[attr-defined]
        assert parameters is self._parameters
        return loss

    def flush(self, pull: str = "all") -> None:
        """Returns when every push of this trainer is applied and local copies are refreshed.

        May be called by one trainer alone.

        Args:
            pull: ``"all"`` refreshes tables and dense parameters, ``"dense"`` the latter,
                ``"none"`` nothing.
        """
        self._open()
        self._driver.flush(pull)

    def leave(self) -> None:
        """Ends this trainer's part in rounds: the others go on without it.

        The next ``step()`` joins again at the round that the server names. ``barrier()`` and
        ``shutdown()`` imply it.
        """
        self._open()
        self._driver.leave()

    @property
    def rounds(self) -> int:
        """Rounds applied when this trainer's last step returned; 0 before the first."""
        return self._rounds

    def stats(self) -> dict[str, Any]:
        """Returns what this trainer has done so far.

        Returns:
            ``steps``, ``samples`` (as told to ``step``), ``step_s`` (in ``step``), and the
            client's counters since ``init()``: ``bytes_sent``, ``bytes_received``, ``wait_s``
            (blocked on servers), ``round_wait_s`` (of which for rounds), ``rows_pulled``,
            ``rows_pushed``, ``requests``, ``resent``, ``reconnects``.
        """
        client = self._open().client
        return {
            "steps": self._step_count_total,
            "samples": self._sample_count,
            "step_s": self._step_s,
            **client.stats(),
        }

    # -- state -------------------------------------------------------------------------------

    def _by_parameter(self) -> dict[int, PlacedTable | DenseParameter]:
        placement = self._open().placement
        entries: dict[int, PlacedTable | DenseParameter] = {}
        for table in placement.tables:
            entries[id(table.found.weight)] = table
        for entry in placement.dense:
            entries[id(entry.parameter)] = entry
        return entries

    def state_dict(self) -> dict[str, Any]:
        """Pulls the servers' optimizer state, in the form of the plain torch optimizer.

        May be called by one trainer alone. The result loads into the wrapped optimizer's class
        (``torch.optim.Adagrad.load_state_dict``) and back. Cost: all state once over the wire.

        Returns:
            torch's ``{"state", "param_groups"}``; for a list of optimizers
            ``{"optimizers": [one of these each]}``. Tables have an extra entry
            ``cpudist_row_step``, the number of updates of each row.
        """
        parameters = self._open()
        entries = self._by_parameter()
        configs = self._configs()
        dicts = []
        for inner in self._inners:
            packed = inner.state_dict()
            indexed = [p for group in inner.param_groups for p in group["params"]]
            state = {}
            for i, parameter in enumerate(indexed):
                entry = entries.get(id(parameter))
                if entry is None:
                    continue
                config = configs[entry.group]
                if isinstance(entry, PlacedTable):
                    state[i] = optimizer_state.fetch_table_state(parameters, entry, config)
                else:
                    state[i] = optimizer_state.fetch_dense_state(parameters, entry, config)
            dicts.append({"state": state, "param_groups": packed["param_groups"]})
        return dicts[0] if len(dicts) == 1 else {"optimizers": dicts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads optimizer state into the servers. Collective.

        Every trainer passes the same ``state_dict``; trainer 0's state goes to the servers,
        with the weights that stand there, or trainer 0's where its model was loaded after
        wrapping. Hyper-parameters are set on every trainer.

        Args:
            state_dict: from ``state_dict()`` or from the plain torch optimizer.

        Raises:
            InvalidArgumentError: it belongs to other optimizers.
        """
        self._open()
        dicts = state_dict.get("optimizers", [state_dict])
        if len(dicts) != len(self._inners):
            raise InvalidArgumentError(
                f"load_state_dict: state of {len(dicts)} optimizers for {len(self._inners)}"
            )
        states: list[Mapping[Any, Any]] = []
        for inner, one in zip(self._inners, dicts, strict=True):
            groups = inner.param_groups
            kept = [dict(group) for group in groups]
            inner.load_state_dict(one)
            states.append(dict(inner.state))
            inner.state.clear()
            # Schedulers and this object hold the dicts, so values go into the same ones.
            for old, saved, new in zip(groups, kept, inner.param_groups, strict=True):
                old.clear()
                old.update({**new, "params": saved["params"]})
            inner.param_groups = groups
        self._load_states(states)

    def _load_states(self, states: Sequence[Mapping[Any, Any]]) -> None:
        """Sends state per parameter, and weights, from trainer 0; every trainer takes part."""
        parameters = self._open()
        self._context.barrier()
        if self._context.trainer_rank == 0:
            changed = set(parameters.changed())
            configs = self._configs()
            merged = {p: s for state in states for p, s in state.items()}
            if any(table.found.name not in changed for table in parameters.placement.tables):
                self._refresh_unchanged_tables(changed)
            for table in parameters.placement.tables:
                weight = table.found.weight
                optimizer_state.store_table_state(
                    parameters, table, configs[table.group], merged.get(weight, {}), weight
                )
            for entry in parameters.placement.dense:
                optimizer_state.store_dense_state(
                    parameters,
                    entry,
                    configs[entry.group],
                    merged.get(entry.parameter, {}),
                    entry.parameter,
                )
        self._context.barrier()
        parameters.accept_changes()
        parameters.pull_dense()

    def _refresh_unchanged_tables(self, changed: set[str]) -> None:
        """Fills the cached tables from the servers, but keeps those that the user loaded."""
        parameters = self._open()
        kept = {
            table.index: table.found.weight.detach().clone()
            for table in parameters.placement.tables
            if table.found.name in changed
        }
        parameters.pull_tables()
        with torch.no_grad():
            for table in parameters.placement.tables:
                if table.index in kept:
                    table.found.weight.copy_(kept[table.index])

    def store_model(self) -> None:
        """Sends trainer 0's weights to the servers, keeping optimizer state. Collective.

        For weights written after the optimizer was wrapped (``model.load_state_dict``, say):
        whole parameters only, of those that were written.
        """
        states: list[Mapping[Any, Any]] = []
        if self._context.trainer_rank == 0:
            state_dict = self.state_dict()
            for inner, one in zip(
                self._inners, state_dict.get("optimizers", [state_dict]), strict=True
            ):
                indexed = [p for group in inner.param_groups for p in group["params"]]
                states.append({indexed[i]: state for i, state in one["state"].items()})
        self._load_states(states)

    # -- the end -----------------------------------------------------------------------------

    def close(self, tell_servers: bool = True) -> None:
        """Gives the model its own classes back and the servers their memory. Idempotent.

        Args:
            tell_servers: ``False`` where servers can no longer be reached.
        """
        parameters, self._parameters = self._parameters, None
        if parameters is not None:
            parameters.close(tell_servers)
            self._context.remove_optimizer(self)
