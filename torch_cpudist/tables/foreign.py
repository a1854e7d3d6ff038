# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What torch's own transforms and wrappers do to lookups, and what they are told.

A graph that is exported, a call with other parameters and a wrapper that averages
gradients itself all reach a table as something else: as ids without memory, or as
another weight. Each is named here, so that no message blames what it looks like.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn

from torch_cpudist.errors import UnsupportedModelError

_JIT = "torch.jit.trace and torch.jit.script"
_AVERAGING = nn.parallel.DistributedDataParallel


def graph_without_pull(
    name: str, remote: bool, what: str = _JIT, do: str = "trace or script"
) -> UnsupportedModelError:
    """The error for a graph that would read rows as they stand.

    Args:
        name: of the table.
        remote: whether its rows are on the servers only, and in no copy.
        what: makes the graph.
        do: what to do with a plain model instead.
    """
    way_out = (
        f"opt.flush(), then {do} copy.deepcopy(model), which is a plain model; or "
        "close() the optimizer first."
    )
    if remote:
        way_out = (
            "It is a remote table, of which no copy has rows and no graph can be made "
            f"yet. To {do} the model train this one as a static table (leave it out of "
            "remote_tables and shard_tables(remote=)); a part of the model without it "
            f"can be taken by itself: {do} that."
        )
    return UnsupportedModelError(
        f"table {name!r}: {what} cannot record that a lookup brings its rows from the "
        f"servers. {way_out}"
    )


def check_not_exported(name: str, remote: bool) -> None:
    """Refuses ``torch.export``, whose graphs would name a table of this process.

    Raises:
        UnsupportedModelError: a graph is being exported.
    """
    if torch.compiler.is_exporting():
        raise graph_without_pull(name, remote, "torch.export", "export")


def check_own_weight(name: str, weight: object, remote: bool) -> None:
    """Refuses a weight that was put in the place of a table's for one call.

    Raises:
        UnsupportedModelError: it is no parameter, as nobody but
            ``torch.func.functional_call`` and ``torch.fx`` leaves it.
    """
    if weight is None or isinstance(weight, nn.Parameter):
        return
    if isinstance(weight, torch.fx.Proxy):
        raise graph_without_pull(
            name, remote, "torch.fx.symbolic_trace", "symbolically trace"
        )
    way_out = (
        "opt.flush(), then call it on copy.deepcopy(model), which is a plain model; "
        "or close() the optimizer first."
    )
    if remote:
        way_out = (
            "It is a remote table, of which no copy has rows: leave its weight out of "
            "the parameters that are given, look its rows up outside and give these to "
            "the function; or train it as a static table."
        )
    raise UnsupportedModelError(
        f"table {name!r}: torch.func.functional_call with other parameters (as "
        "torch.func.grad and the like need it) looks rows up in another tensor than "
        f"the one that the servers fill. {way_out}"
    )


def whole(ids: torch.Tensor) -> torch.Tensor:
    """The ids of a lookup; under ``torch.vmap`` those of all its calls."""
    inside = torch._C._functorch
    while inside.is_functorch_wrapped_tensor(ids):
        ids = inside.get_unwrapped(ids)
    return ids


def _has(wrapper: nn.Module, parameters: set[int]) -> bool:
    return any(id(p) in parameters for p in getattr(wrapper, "_module_parameters", ()))


def check_not_averaged(name: str, weight: torch.Tensor) -> None:
    """Refuses a lookup in a model that averages its gradients itself.

    Raises:
        UnsupportedModelError: it runs inside a ``DistributedDataParallel`` that was not
            told to leave the table out.
    """
    active = _AVERAGING._active_ddp_module
    if active is not None and _has(active, {id(weight)}):
        raise UnsupportedModelError(
            f"table {name!r} is looked up inside a {averaging_advice()}"
        )


def averaging_advice() -> str:
    """What to do about a ``DistributedDataParallel``; ends a sentence."""
    return (
        "DistributedDataParallel (Accelerate's prepare(model) makes one), which writes "
        "the model's parameters and averages the trainers' gradients itself. Train the "
        "module inside it, its .module, and call that one; do not pass the model to "
        "accelerator.prepare()."
    )


def is_averaged(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a ``DistributedDataParallel`` of this process has any of them.

    For a message only: looks at every object of the process.
    """
    wanted = {id(parameter) for parameter in parameters}
    # issubclass() of an abstract class takes a second for a million of objects.
    classes = {_AVERAGING}
    unseen = [_AVERAGING]
    while unseen:
        unseen = [one for known in unseen for one in known.__subclasses__()]
        classes.update(unseen)
    return any(
        type(found) in classes and _has(found, wanted) for found in gc.get_objects()
    )
