# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parts of parameters that one trainer each updates, with their optimizer state.

The wrapped optimizers step parts in the place of the parameters, so that torch makes
state for this trainer's parts only. A part is a view of its parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist.collective.buckets import Piece
from torch_cpudist.collective.group import CollectiveGroup
from torch_cpudist.collective.state import send_states
from torch_cpudist.model.device import state_beside
from torch_cpudist.model.placement import DenseParameter, cut
from torch_cpudist.optim import FTRL, RowWiseAdagrad
from torch_cpudist.served import state_exchange
from torch_cpudist.settings.sharding import Sharding

# Whose update of an element, or of a row, needs nothing of the others.
_BY_ELEMENT = (
    *(torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.RMSprop, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop, FTRL, RowWiseAdagrad),
)


def owned_pieces(
    entries: Sequence[DenseParameter],
    inners: Sequence[Optimizer],
    sharding: Sharding,
    owners: int,
) -> dict[int, list[Piece]]:
    """Deals dense parameters, by index, to ``owners`` trainers."""
    by_element = {
        id(parameter)
        for inner in inners
        if type(inner) in _BY_ELEMENT
        for parameter in state_exchange.indexed_parameters(inner)
    }
    uncut = {
        entry.index
        for entry in entries
        if id(entry.parameter) not in by_element or not entry.parameter.is_contiguous()
    }
    pieces: dict[int, list[Piece]] = {}
    for block in cut(list(entries), sharding, owners, uncut):
        entry = entries[block.parameter]
        shape = entry.shape
        if block.elements < entry.parameter.numel():
            shape = torch.Size([block.elements // block.row_width, *entry.shape[1:]])
        piece = Piece(entry, block.offset, block.elements, shape, block.shard)
        pieces.setdefault(entry.index, []).append(piece)
    return pieces


@dataclass(frozen=True)
class Part:
    """What one trainer updates of a parameter.

    Attributes:
        entry: the parameter.
        piece: of a dense parameter; ``None`` for every ``step``-th row of a table.
        first, step: the rows of a table.
    """

    entry: DenseParameter
    piece: Piece | None
    first: int = 0
    step: int = 1

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor of the parameter's shape; a view."""
        if self.piece is not None:
            return self.piece.of(tensor)
        return tensor[self.first :: self.step]

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor with something for each row; a view."""
        if self.piece is None:
            return tensor[self.first :: self.step]
        width = max(self.entry.parameter.numel() // len(self.entry.parameter), 1)
        begin = self.piece.begin // width
        return tensor[begin : begin + self.piece.count // width]

    def of_state(self, value: Any) -> Any:
        """This part of one entry of torch's state of the parameter; a copy."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape == self.entry.shape:
            return self.of(value.contiguous()).clone()
        if value.dim() and self.entry.shape and len(value) == self.entry.shape[0]:
            return self.of_rows(value).clone()
        return value

    def place(self) -> dict[str, Any]:
        """Which part it is, in words that ``placed`` understands."""
        place = {"name": self.entry.name, "first": self.first, "step": self.step}
        if self.piece is not None:
            place |= {"begin": self.piece.begin, "count": self.piece.count}
        return place

    @classmethod
    def placed(cls, entry: DenseParameter, place: Mapping[str, Any]) -> Part:
        """The part of a parameter that ``place`` has told."""
        if "begin" not in place:
            return cls(entry, None, place["first"], place["step"])
        begin, count = place["begin"], place["count"]
        shape = entry.shape
        if count < entry.parameter.numel():
            width = max(entry.parameter.numel() // len(entry.parameter), 1)
            shape = torch.Size([count // width, *entry.shape[1:]])
        return cls(entry, Piece(entry, begin, count, shape))

    def merge(self, merged: dict[str, Any], state: Mapping[str, Any]) -> None:
        """Puts a part's state to where the parameter's is put together."""
        own = self.of(torch.empty(self.entry.shape, device="meta")).shape
        for name, value in state.items():
            tensor = isinstance(value, torch.Tensor) and value.dim() > 0
            if tensor and value.shape == own:
                whole = merged.setdefault(name, value.new_zeros(self.entry.shape))
                self.of(whole).copy_(value)
            elif tensor and own and len(value) == own[0]:
                shape = (self.entry.shape[0], *value.shape[1:])
                whole = merged.setdefault(name, value.new_zeros(shape))
                self.of_rows(whole).copy_(value)
            else:
                merged.setdefault(name, value)


class OwnedParts:
    """This trainer's parts, and those of the others. Not thread-safe."""

    def __init__(
        self,
        group: CollectiveGroup,
        inners: Sequence[Optimizer],
        pieces: Mapping[int, Sequence[Piece]],
        tables: Sequence[DenseParameter],
    ) -> None:
        """Makes parts, without state.

        Args:
            group: of all trainers.
            inners: the wrapped optimizers.
            pieces: of dense parameters, by index.
            tables: whose row k belongs to trainer k % n.
        """
        self._group = group
        self._inners = list(inners)
        self._owners = {
            id(parameter): inner
            for inner in inners
            for parameter in state_exchange.indexed_parameters(inner)
        }
        n = group.size
        self._parts: list[list[Part]] = [[] for _ in range(n)]
        for cut_pieces in pieces.values():
            for piece in cut_pieces:
                self._parts[piece.owner].append(Part(piece.entry, piece))
        for entry in tables:
            for rank in range(min(n, entry.shape[0])):
                self._parts[rank].append(Part(entry, None, rank, n))
        self._own = self._parts[group.rank]
        self._stepped = [self._made(part) for part in self._own]
        self._by_piece = {
            id(part.piece): made
            for part, made in zip(self._own, self._stepped, strict=True)
            if part.piece is not None
        }
        self._by_table = {
            part.entry.index: made
            for part, made in zip(self._own, self._stepped, strict=True)
            if part.piece is None
        }

    @staticmethod
    def _made(part: Part) -> nn.Parameter:
        return nn.Parameter(part.of(part.entry.parameter.detach()), requires_grad=False)

    def of_piece(self, piece: Piece) -> nn.Parameter:
        """What is stepped for one of this trainer's pieces."""
        return self._by_piece[id(piece)]

    def of_table(self, index: int) -> nn.Parameter | None:
        """What is stepped for a table; ``None`` if it has fewer rows than trainers."""
        return self._by_table.get(index)

    @contextmanager
    def in_place_of_parameters(self) -> Iterator[None]:
        """While it is entered, the wrapped optimizers hold parts. Drops gradients."""
        made: dict[int, list[nn.Parameter]] = {}
        for part, stepped in zip(self._own, self._stepped, strict=True):
            stepped.data = part.of(part.entry.parameter.detach())
            made.setdefault(id(part.entry.parameter), []).append(stepped)
        kept = []
        for inner in self._inners:
            groups = inner.param_groups
            kept.append((inner, groups, [group["params"] for group in groups]))
        try:
            for inner, groups, lists in kept:
                for group, parameters in zip(groups, lists, strict=True):
                    parts = [part for p in parameters for part in made.get(id(p), ())]
                    group["params"] = parts
                inner.param_groups = [group for group in groups if group["params"]]
            yield
        finally:
            for inner, groups, lists in kept:
                inner.param_groups = groups
                for group, parameters in zip(groups, lists, strict=True):
                    group["params"] = parameters
            for stepped in self._stepped:
                stepped.grad = None

    # -- state -------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Bytes of the tensors of this trainer's optimizer state."""
        return sum(
            value.nbytes
            for part, stepped in zip(self._own, self._stepped, strict=True)
            for value in self._owners[id(part.entry.parameter)].state[stepped].values()
            if isinstance(value, torch.Tensor)
        )

    def take_state(self) -> None:
        """Takes this trainer's parts of the state that stands in the optimizers.

        The rest of it goes.
        """
        whole = {}
        for parts in self._parts:
            for part in parts:
                parameter = part.entry.parameter
                state = self._owners[id(parameter)].state
                if parameter in state:
                    whole[id(parameter)] = state.pop(parameter)
        for part, stepped in zip(self._own, self._stepped, strict=True):
            parameter = part.entry.parameter
            state = whole.get(id(parameter), {})
            self._owners[id(parameter)].state[stepped] = {
                name: part.of_state(value) for name, value in state.items()
            }

    def saved_parts(self) -> list[dict[str, Any]]:
        """Copies of the state of this trainer's parts, with which parts they are."""
        return [
            {
                **part.place(),
                "state": {
                    key: value.detach().cpu().clone()
                    if isinstance(value, torch.Tensor)
                    else value
                    for key, value in self._state_of(part, stepped).items()
                },
            }
            for part, stepped in zip(self._own, self._stepped, strict=True)
        ]

    def _state_of(self, part: Part, stepped: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self._owners[id(part.entry.parameter)].state[stepped]
        return state

    def are_own(self, saved: Sequence[Mapping[str, Any]]) -> bool:
        """Whether parts that were saved are this trainer's, all of them."""
        found = [{k: v for k, v in one.items() if k != "state"} for one in saved]
        return found == [part.place() for part in self._own]

    def put_parts(
        self,
        saved: Sequence[Mapping[str, Any]],
        names: Mapping[str, str],
        anew: Collection[str],
    ) -> set[str]:
        """Replaces the state of this trainer's parts by what was saved of them.

        Args:
            saved: from ``saved_parts``, of as many trainers as have any of it.
            names: of the parameters whose state is replaced, by those they had.
            anew: names of parameters whose state begins anew.

        Returns:
            Names of the parameters of which this trainer has parts, and there was none.
        """
        entries = {part.entry.name: part.entry for one in self._parts for part in one}
        merged: dict[str, dict[str, Any]] = {}
        for one in saved:
            name = names.get(one["name"])
            if name in entries:
                part = Part.placed(entries[name], one)
                part.merge(merged.setdefault(name, {}), one["state"])
        for part, stepped in zip(self._own, self._stepped, strict=True):
            if part.entry.name not in {*names.values(), *anew}:
                continue
            parameter = part.entry.parameter
            owner = self._owners[id(parameter)]
            whole = state_beside(owner, parameter, merged.get(part.entry.name, {}))
            owner.state[stepped] = {
                name: part.of_state(value) for name, value in whole.items()
            }
        own = {part.entry.name for part in self._own}
        return own.intersection(names.values()).difference(merged)

    def drop_state(self) -> bool:
        """Takes the parts' state out of the optimizers; returns whether there was any.

        torch's Adagrad makes its state when it is built, and gets that back.
        """
        found = False
        for part, stepped in zip(self._own, self._stepped, strict=True):
            found |= bool(self._owners[id(part.entry.parameter)].state.pop(stepped, {}))
        for inner in self._inners:
            if type(inner) is not torch.optim.Adagrad:
                continue
            for group in inner.param_groups:
                first = group["initial_accumulator_value"]
                for parameter in group["params"]:
                    if parameter not in inner.state:
                        inner.state[parameter] = {
                            "step": torch.tensor(0.0, dtype=torch.float32),
                            "sum": torch.full_like(parameter.detach(), first),
                        }
        return found

    def gather_state(self) -> dict[int, dict[str, Any]]:
        """Returns all state, by ``id`` of the parameter. Collective.

        Cost: from each trainer a broadcast of its state.
        """
        merged: dict[int, dict[str, Any]] = {}
        for source, parts in enumerate(self._parts):
            states: list[Mapping[str, Any]] = [{} for _ in parts]
            if source == self._group.rank:
                states = [
                    self._owners[id(part.entry.parameter)].state[stepped]
                    for part, stepped in zip(parts, self._stepped, strict=True)
                ]
            names = [part.entry.name for part in parts]
            sent = send_states(self._group, source, names, states)
            for part, state in zip(parts, sent, strict=True):
                if state:
                    found = merged.setdefault(id(part.entry.parameter), {})
                    part.merge(found, state)
        return merged
