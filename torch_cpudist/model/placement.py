# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Decides what is a table and what a dense block, and which server owns each block.

Rows of tables are dealt by key (``mix64(key ^ salt) % 4096`` buckets); only dense
parameters are placed here. Every trainer computes the same placement from the model
alone; servers compare them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_cpudist import _core
from torch_cpudist.machine.device import CPU
from torch_cpudist.model.checks import (
    DTYPES,
    check_dense,
    check_dense_embeddings,
    check_initialized,
    check_names,
    check_no_table,
    check_owned,
    check_plain,
    warn_large_embeddings,
)
from torch_cpudist.model.device import model_device
from torch_cpudist.settings.admission import CountFilter, Probability
from torch_cpudist.settings.communicator import Communicator
from torch_cpudist.settings.open_table import OpenTable
from torch_cpudist.tables.found import FoundTable, find_tables
from torch_cpudist.tables.remote_weight import table_of

if TYPE_CHECKING:
    from torch_cpudist.settings.sharding import Sharding
    from torch_cpudist.settings.updates import Updates

logger = logging.getLogger("torch_cpudist")


@dataclass(frozen=True)
class DenseParameter:
    """A parameter that is averaged as a whole.

    Attributes:
        index: counts dense parameters.
        name: in the model.
        parameter: the model's own.
        group: index of its parameter group.
        dtype, shape: as the servers hold it.
        device: that it is on.
    """

    index: int
    name: str
    parameter: nn.Parameter
    group: int
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device = CPU


@dataclass(frozen=True)
class PlacedTable:
    """A table and its index in the layout."""

    index: int
    found: FoundTable
    group: int


# Of each parameter group; None where only torch's optimizer knows how it updates.
Rules = Sequence[_core.OptimizerConfig | None]


@dataclass(frozen=True)
class Placement:
    """What one ``DistributedOptimizer`` trains, and where it lives.

    Attributes:
        tables, dense: in a fixed order.
        layout: what travels to servers; its configs are what they run.
        rules: what the wrapped optimizers run, one per group.
        device: that the model computes on.
        communicator: what its rows may take on this trainer.
    """

    tables: list[PlacedTable]
    dense: list[DenseParameter]
    layout: _core.ParamSetLayout
    rules: Rules
    device: torch.device = CPU
    communicator: Communicator = field(default_factory=Communicator)


def parameter_names(model: nn.Module, groups: list[dict[str, Any]]) -> dict[int, str]:
    """Names parameters by ``id``: as the model does, else by their group."""
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    for g, group in enumerate(groups):
        parameters = group["params"]
        for i, parameter in enumerate(parameters):
            names.setdefault(id(parameter), f"param_groups[{g}][{i}]")
    return names


class _Dealer:
    """Deals blocks to servers; the cursor runs on across parameters."""

    def __init__(self, method: str, server_count: int) -> None:
        self._method = method
        self._server_count = server_count
        self._cursor = 0
        self._loads = [0] * server_count

    def deal(self, name: str, elements: int) -> int:
        if self._method == "hash":
            digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
            return int.from_bytes(digest, "little") % self._server_count
        if self._method == "balanced":
            shard = min(range(self._server_count), key=self._loads.__getitem__)
            self._loads[shard] += elements
            return shard
        shard = self._cursor % self._server_count
        self._cursor += 1
        return shard


def cut(
    dense: Sequence[DenseParameter],
    sharding: Sharding,
    server_count: int,
    uncut: Container[int] = (),
) -> list[_core.BlockSpec]:
    """Cuts dense parameters into blocks and deals these.

    Args:
        dense: the parameters, by index.
        sharding: how.
        server_count: to how many servers, or whoever else owns blocks.
        uncut: indices of parameters that stay whole.
    """
    cuts: list[tuple[int, str, int, int]] = []
    for entry in dense:
        parameter = entry.parameter
        width = parameter[0].numel() if parameter.dim() > 1 and len(parameter) else 1
        spans = _core.slice_parameter(
            parameter.numel(),
            max(width, 1),
            server_count,
            sharding.min_block_size,
            sharding.slice and entry.index not in uncut,
        )
        for i, (begin, size) in enumerate(spans):
            name = entry.name if len(spans) == 1 else f"{entry.name}.block{i}"
            cuts.append((entry.index, name, begin, size))
    # The greedy rule is near its best only when large blocks are dealt first.
    order = list(range(len(cuts)))
    if sharding.split_method == "balanced":
        order.sort(key=lambda i: -cuts[i][3])
    dealer = _Dealer(sharding.split_method, server_count)
    shards = {i: dealer.deal(cuts[i][1], cuts[i][3]) for i in order}
    specs = []
    for i, (index, name, begin, size) in enumerate(cuts):
        parameter = dense[index].parameter
        width = parameter[0].numel() if parameter.dim() > 1 else 1
        specs.append(
            _core.BlockSpec(
                name=name,
                elements=size,
                dtype=DTYPES[parameter.dtype],
                shard=shards[i],
                group=dense[index].group,
                parameter=index,
                offset=begin,
                row_width=max(width, 1),
            )
        )
    return specs


def _list_dense(
    parameters: list[nn.Parameter], names: dict[int, str], group_of: dict[int, int]
) -> list[DenseParameter]:
    dense: list[DenseParameter] = []
    for parameter in parameters:
        name = names[id(parameter)]
        check_initialized(name, parameter)
        # An empty parameter has no block, and nothing to train.
        if not (parameter.requires_grad and parameter.numel()):
            continue
        check_no_table(name, parameter)
        check_dense(name, parameter)
        entry = DenseParameter(
            len(dense),
            name,
            parameter,
            group_of[id(parameter)],
            parameter.dtype,
            parameter.shape,
            parameter.device,
        )
        dense.append(entry)
    return dense


def table_spec(placed: PlacedTable) -> _core.TableSpec:
    """What servers are told of a table; of a remote one also how rows begin."""
    rows, dim = placed.found.weight.shape
    options: dict[str, Any] = {}
    if placed.found.remote:
        table = table_of(placed.found.weight)
        program = table.program
        options = {
            "remote": True,
            "seed": table.seed_of(placed.found.name),
            "initial": list(program.steps),
            "overrides": list(program.overrides),
        }
        if table.open is not None:
            options |= _of_open(table.open)
    return _core.TableSpec(
        name=placed.found.name, rows=rows, dim=dim, group=placed.group, **options
    )


def _of_open(opened: OpenTable) -> dict[str, Any]:
    """What servers are told of a table of any key."""
    options: dict[str, Any] = {
        "open": True,
        "unknown_zeros": opened.unknown == "zeros",
        "max_rows": opened.max_rows or 0,
    }
    match opened.admission:
        case CountFilter(n, sketch_bytes):
            # Servers count in whole cache lines.
            lines = -(-sketch_bytes // 64)
            options["admission"] = ("count", n, 1.0, lines * 64)
        case Probability(p):
            options["admission"] = ("probability", 0, float(p), 0)
    evict = opened.eviction
    if evict is not None:
        options["eviction"] = (
            evict.unseen_steps or 0,
            evict.unseen_ms,
            evict.min_count or 0,
            evict.max_rows or 0,
            evict.order,
        )
    return options


def _compensation(updates: Updates) -> tuple[float, bool, float, float] | None:
    chosen = updates.delay_compensation
    if chosen is None:
        return None
    return chosen.resolved()


def make_layout(
    updates: Updates,
    rules: Rules,
    tables: Sequence[_core.TableSpec],
    blocks: Sequence[_core.BlockSpec],
) -> _core.ParamSetLayout:
    """Makes what servers are told of a placement; see ``place``."""
    return _core.ParamSetLayout(
        configs=updates.served(rules),
        tables=tables,
        blocks=blocks,
        on_arrival=updates.on_arrival,
        max_staleness=updates.max_staleness,
        exchanges_deltas=updates.exchanges_deltas,
        trainer_groups=updates.groups,
        compensation=_compensation(updates),
        push_dtype=updates.communicator.wire_dtype,
        pull_dtype=updates.communicator.pulled_dtype,
        average_decay=updates.average.decay if updates.average else 0.0,
    )


def place(
    model: nn.Module,
    groups: list[dict[str, Any]],
    rules: Rules,
    sharding: Sharding,
    server_count: int,
    updates: Updates,
) -> Placement:
    """Places everything that the optimizer's groups train.

    Args:
        model: where tables are looked for.
        groups: ``param_groups`` of the optimizer (of all of them, concatenated).
        rules: what the optimizers run, one per group.
        sharding: how dense parameters are cut and dealt.
        server_count: number of servers.
        updates: when servers apply gradients.

    Returns:
        Tables and dense parameters in a fixed order, and the layout that travels to
        servers.

    Raises:
        UnsupportedModelError: a parameter cannot be placed, with name and reason.
        InvalidArgumentError: the optimizer trains nothing of ``model``.
    """
    names = parameter_names(model, groups)
    check_plain(model)
    group_of: dict[int, int] = {}
    ordered: list[nn.Parameter] = []
    for g, group in enumerate(groups):
        parameters = group["params"]
        for parameter in parameters:
            group_of[id(parameter)] = g
            ordered.append(parameter)
    check_owned(model, ordered)
    found = find_tables(model, set(group_of))
    check_names([*(t.name for t in found), *(names[id(p)] for p in ordered)])
    tables = [
        PlacedTable(i, table, group_of[id(table.weight)])
        for i, table in enumerate(found)
    ]
    sparse = {id(table.weight) for table in found}
    dense = _list_dense([p for p in ordered if id(p) not in sparse], names, group_of)
    check_dense_embeddings(model, [entry.parameter for entry in dense])
    warn_large_embeddings(model, found)
    tables_spec = [table_spec(t) for t in tables]
    blocks = cut(dense, sharding, server_count)
    layout = make_layout(updates, rules, tables_spec, blocks)
    _log_placement(layout, server_count)
    device = model_device(model, found, [(e.name, e.device) for e in dense])
    return Placement(tables, dense, layout, rules, device, updates.communicator)


def _log_placement(layout: _core.ParamSetLayout, server_count: int) -> None:
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for table in layout.tables:
        logger.debug(
            "table %s: %s, dim %d, by key over %d servers%s",
            table.name,
            "any key" if table.open else f"{table.rows} rows",
            table.dim,
            server_count,
            ", there only" if table.remote else "",
        )
    for block in layout.blocks:
        logger.debug(
            "block %s: elements %d to %d on server %d",
            block.name,
            block.offset,
            block.offset + block.elements,
            block.shard,
        )
