# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reduce: the owner of a part averages its gradient, steps it and hands it out."""

from __future__ import annotations

from typing import Any

import torch

from torch_cpudist.collective.buckets import Bucket, by_owner, plan, squared_norm
from torch_cpudist.collective.carriers import OwnerCarrier
from torch_cpudist.collective.copied import CopiedParameters
from torch_cpudist.collective.exchange import GradientExchange
from torch_cpudist.collective.header import Header
from torch_cpudist.collective.owned import OwnedParts, owned_pieces
from torch_cpudist.collective.rows import Rows, as_gradient
from torch_cpudist.drivers.base import Wrapped
from torch_cpudist.drivers.gradient import (
    GradientDriver,
    SharedState,
    clip_average,
    clip_tensors,
    open_equal,
)
from torch_cpudist.drivers.owned_saving import OwnedSaving
from torch_cpudist.drivers.registry import register
from torch_cpudist.drivers.saving import Saving
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served import state_exchange
from torch_cpudist.settings.clip import Clip, ClipNorm, ClipTensorNorm
from torch_cpudist.strategies.reduce import Reduce

_WHAT = "handing out parameters"


class OwnedState(SharedState):
    """State of which every trainer keeps its own parts."""

    def __init__(
        self, made: Wrapped, parameters: CopiedParameters, owned: OwnedParts
    ) -> None:
        """Also: keeps the parts of ``owned`` only."""
        super().__init__(made, parameters)
        self._owned = owned
        owned.take_state()

    def fetch(self) -> list[dict[str, Any]]:
        """Returns the state of all trainers' parts. Collective."""
        where = "state_dict(), which under Reduce every trainer calls"
        self._copied.group.meet(where)
        merged = self._owned.gather_state()
        dicts = []
        for inner in self._inners:
            state = {
                i: merged[id(parameter)]
                for i, parameter in enumerate(state_exchange.indexed_parameters(inner))
                if id(parameter) in merged
            }
            groups = state_exchange.saved_groups(inner)
            dicts.append({"state": state, "param_groups": groups})
        return dicts

    def put(self, states: States) -> None:
        """Takes a part of trainer 0's state; weights as ``store_model``."""
        super().put(states)
        self._owned.take_state()

    def give_back(self) -> None:
        """The end: state that is spread over trainers goes with it."""
        if self._owned.drop_state():
            state_exchange.note_left(self._inners)


class ReduceDriver(GradientDriver):
    """Runs the Reduce strategy."""

    def __init__(
        self, strategy: Reduce, parameters: CopiedParameters, made: Wrapped
    ) -> None:
        """See ``GradientDriver``."""
        entries, group = parameters.placement.dense, parameters.group
        pieces = owned_pieces(entries, made.inners, strategy.sharding, group.size)
        buckets = by_owner(plan(entries, strategy.bucket_bytes, halves=True), pieces)
        exchange = GradientExchange(parameters, buckets, OwnerCarrier)
        tables = parameters.entries[len(entries) :]
        self._owned = OwnedParts(group, made.inners, pieces, tables)
        keeper = OwnedState(made, parameters, self._owned)
        super().__init__(parameters, exchange, made, keeper)
        self._saving = OwnedSaving(parameters, self._owned, self._progress, self._go_on)

    @property
    def saving(self) -> Saving:
        """Each trainer's own parts, and values by trainer 0."""
        return self._saving

    # -- a step ------------------------------------------------------------------------

    def _update(self, header: Header, rows: list[Rows], clip: Clip | None) -> None:
        if isinstance(clip, ClipTensorNorm):
            self._clip_tensors(clip, header, rows)
        else:
            self._clip(clip, rows)
        # Parts are views again; gradients are given to them only while they step.
        with self._owned.in_place_of_parameters():
            rank = self._group.rank
            for bucket, i in self._exchange.pieces(header.dense):
                if bucket.pieces[i].owner == rank:
                    self._owned.of_piece(bucket.pieces[i]).grad = bucket.view(i)
            for i in header.tables:
                self._give_rows(i, rows[i])
            self._step_inners()
        self._hand_out(header)
        self._hand_out_rows(header, rows)
        written = [self._dense[i] for i in header.dense]
        written += [self._tables[i].found.weight for i in header.tables]
        self._copied.note_written(written)

    def _own_segments(self, bucket: Bucket) -> list[torch.Tensor]:
        runs = bucket.segments()
        return [bucket.flat[a:b] for owner, a, b in runs if owner == self._group.rank]

    def _clip(self, clip: Clip | None, rows: list[Rows]) -> None:
        """Clips this trainer's part of the mean. Collective with a ``ClipNorm``."""
        own = [part for b in self._exchange.buckets for part in self._own_segments(b)]
        values = [one.view(-1) for _, one in rows]
        squared = 0.0
        if isinstance(clip, ClipNorm):
            squared = sum(map(squared_norm, own))
            if not self._group.alone:
                told = torch.tensor([squared], dtype=torch.float64, device="cpu")
                parts = self._group.gather(told, "summing the norm of gradients")
                squared = sum(float(part) for part in parts)
            squared += sum(map(squared_norm, values))
        clip_average(clip, [*own, *values], squared)

    def _clip_tensors(
        self, clip: ClipTensorNorm, header: Header, rows: list[Rows]
    ) -> None:
        """Clips this trainer's parts by the norms of whole parameters. Collective."""
        indices, parts = [], []
        for bucket, i in self._exchange.pieces(header.dense):
            piece = bucket.pieces[i]
            if piece.owner == self._group.rank:
                indices.append(piece.entry.index)
                parts.append(bucket.view(i))
        squared = torch.zeros(len(self._dense), dtype=torch.float64, device="cpu")
        for index, part in zip(indices, parts, strict=True):
            squared[index] += squared_norm(part.reshape(-1))
        if not self._group.alone:
            told = self._group.gather(squared, "summing the norms of gradients")
            squared = torch.stack(list(told)).sum(dim=0)
        norms = [float(squared[index]) for index in indices]
        values = [one for _, one in rows]
        norms += [squared_norm(one.view(-1)) for one in values]
        clip_tensors(clip, [*parts, *values], norms)

    def _mine(self, keys: torch.Tensor, rank: int) -> torch.Tensor:
        return keys.remainder(self._group.size) == rank

    def _give_rows(self, i: int, rows: Rows) -> None:
        keys, values = rows
        part = self._owned.of_table(len(self._dense) + i)
        if part is None:
            return
        mine = self._mine(keys, self._group.rank)
        of_part = keys[mine].div(self._group.size, rounding_mode="floor")
        part.grad = as_gradient((of_part, values[mine]), part)

    # -- what the others get -----------------------------------------------------------

    def _hand_out(self, header: Header) -> None:
        if self._group.alone:
            return
        pieces = list(self._exchange.pieces(header.dense))
        changed = {id(bucket) for bucket, _ in pieces}
        buckets = [b for b in self._exchange.buckets if id(b) in changed]
        rank, works = self._group.rank, []
        for bucket in buckets:
            for i, piece in enumerate(bucket.pieces):
                if piece.owner == rank:
                    bucket.view(i).copy_(piece.of(piece.entry.parameter))
            for owner, begin, end in bucket.segments():
                part = bucket.flat[begin:end]
                works.append(self._group.start_broadcast(part, owner))
        for work in works:
            self._group.wait(work, _WHAT)
        for bucket, i in pieces:
            piece = bucket.pieces[i]
            if piece.owner != rank:
                piece.of(piece.entry.parameter.detach()).copy_(bucket.view(i))

    def _hand_out_rows(self, header: Header, rows: list[Rows]) -> None:
        """Rows of all tables from one owner travel as one message."""
        if self._group.alone or not header.tables:
            return
        for owner in range(self._group.size):
            parts = []
            for i in header.tables:
                keys = rows[i][0]
                weight = self._tables[i].found.weight.detach()
                parts.append((weight, keys[self._mine(keys, owner)]))
            flat = torch.cat([weight[keys].view(-1) for weight, keys in parts])
            if not flat.numel():
                continue
            self._group.broadcast(flat, _WHAT, owner)
            if owner == self._group.rank:
                continue
            begin = 0
            for weight, keys in parts:
                count = len(keys) * weight.shape[1]
                values = flat[begin : begin + count].view(len(keys), -1)
                weight[keys] = values
                begin += count

    def stats(self) -> dict[str, Any]:
        """Also ``state_bytes``: of this trainer's optimizer state."""
        found = super().stats()
        found["collective"]["state_bytes"] = self._owned.state_bytes
        return found

    def observed(self) -> dict[str, Any]:
        """Without ``state_bytes``: the state is the training thread's."""
        return super().stats()


register(Reduce, opens=open_equal, drives=ReduceDriver, served=False)
