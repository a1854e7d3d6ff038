# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sends torch's optimizer state from one trainer to the others: JSON and raw bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torch_cpudist.collective.copied import inner_state
from torch_cpudist.collective.group import CollectiveGroup
from torch_cpudist.errors import InternalError, UnsupportedOptimizerError
from torch_cpudist.model.device import state_beside
from torch_cpudist.model.placement import DenseParameter
from torch_cpudist.served import state_exchange

_WHAT = "sending optimizer state"
_TENSOR, _VALUE, _REFUSED = "tensor", "value", "refused"

# State of one parameter, by torch's names.
State = Mapping[str, Any]


def _described(name: str, state: State) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """State of parameter ``name`` as JSON has it, and its tensors in order."""
    forms: dict[str, Any] = {}
    tensors = []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            kind = str(value.dtype).removeprefix("torch.")
            forms[key] = [_TENSOR, kind, list(value.shape)]
            tensors.append(value.detach().cpu().contiguous())
        elif isinstance(value, (bool, int, float, str, type(None))):
            forms[key] = [_VALUE, value]
        else:
            raise UnsupportedOptimizerError(
                f"the optimizer keeps {key!r} of {name!r} as {type(value).__name__}, "
                "expected tensors and plain numbers: other trainers cannot be sent it. "
                "Use another optimizer, or Sync, Async or LocalSGD."
            )
    return forms, tensors


def _packed(
    names: Sequence[str], states: Sequence[State]
) -> tuple[bytes, torch.Tensor]:
    try:
        pairs = [_described(*one) for one in zip(names, states, strict=True)]
    except UnsupportedOptimizerError as error:
        return json.dumps([_REFUSED, str(error)]).encode(), torch.empty(0)
    flat = [one.view(-1).view(torch.uint8) for _, tensors in pairs for one in tensors]
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    text = json.dumps([_VALUE, [forms for forms, _ in pairs]]).encode()
    return text, torch.cat([nothing, *flat])


def _dtype(kind: str) -> torch.dtype:
    found = getattr(torch, kind, None)
    if not isinstance(found, torch.dtype):
        raise InternalError(f"optimizer state of dtype {kind!r}")
    return found


def _unpacked(text: bytes, memory: torch.Tensor) -> list[dict[str, Any]]:
    kind, content = json.loads(text)
    if kind == _REFUSED:
        raise UnsupportedOptimizerError(content)
    states, begin = [], 0
    for forms in content:
        state: dict[str, Any] = {}
        for key, form in forms.items():
            if form[0] == _VALUE:
                state[key] = form[1]
                continue
            made = torch.empty(form[2], dtype=_dtype(form[1]), device="cpu")
            size = made.nbytes
            made.view(-1).view(torch.uint8).copy_(memory[begin : begin + size])
            state[key] = made
            begin += size
        states.append(state)
    return states


def send_states(
    group: CollectiveGroup, source: int, names: Sequence[str], states: Sequence[State]
) -> list[dict[str, Any]]:
    """Returns trainer ``source``'s states on every trainer. Collective.

    Cost: three broadcasts, of the state's bytes in all.

    Args:
        group: of all trainers.
        source: whose state is sent; the others' arguments do not matter.
        names: of the parameters, for messages.
        states: one per parameter.

    Raises:
        UnsupportedOptimizerError: state that is no tensor or number; on every trainer.
        PeerLostError, OperationTimeoutError: a trainer died or does not come.
    """
    text, memory = b"", torch.empty(0, dtype=torch.uint8, device="cpu")
    if group.rank == source:
        text, memory = _packed(names, states)
        if group.alone:
            return _unpacked(text, memory)
    sizes = torch.tensor([len(text), memory.numel()], device="cpu")
    group.broadcast(sizes, _WHAT, source)
    letters = torch.empty(int(sizes[0]), dtype=torch.uint8, device="cpu")
    if group.rank == source:
        letters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    else:
        memory = torch.empty(int(sizes[1]), dtype=torch.uint8, device="cpu")
    group.broadcast(letters, _WHAT, source)
    if memory.numel():
        group.broadcast(memory, _WHAT, source)
    return _unpacked(bytes(letters.tolist()), memory)


def share_state(
    group: CollectiveGroup,
    inners: Sequence[Optimizer],
    entries: Sequence[DenseParameter],
) -> None:
    """Makes trainer 0's state of ``entries`` everybody's. Collective."""
    if group.alone:
        return
    names = [entry.name for entry in entries]
    own = [inner_state(inners, entry.parameter) for entry in entries]
    sent = send_states(group, 0, names, own)
    if group.rank == 0:
        return
    owners = {
        id(parameter): inner
        for inner in inners
        for parameter in state_exchange.indexed_parameters(inner)
    }
    for entry, state in zip(entries, sent, strict=True):
        inner = owners[id(entry.parameter)]
        inner.state.pop(entry.parameter, None)
        if state:
            inner.state[entry.parameter] = state_beside(inner, entry.parameter, state)
