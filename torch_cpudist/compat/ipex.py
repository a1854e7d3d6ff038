# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``ipex.optimize`` by ``cpudist.optimize``, argument by argument."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.log import logger
from torch_cpudist.precision import optimize as optimize_here

_LEVELS = ("O0", "O1")
_DTYPES = (torch.float32, torch.bfloat16)
# Arguments that change no number here, and why each has nothing to do.
_NOTHING = {
    "conv_bn_folding": "batch norm stays a layer of its own",
    "linear_bn_folding": "batch norm stays a layer of its own",
    "weights_prepack": "oneDNN packs weights by itself at each call",
    "replace_dropout_with_identity": "dropout does nothing in evaluation anyway",
    "optimize_lstm": "torch's LSTM uses oneDNN by itself",
    "split_master_weight_for_bf16": "weights are whole float32 numbers always",
    "fuse_update_step": "the optimizer stays as it is; torch's have fused=True",
    "auto_kernel_selection": "oneDNN chooses its kernels by itself",
    "sample_input": "nothing is traced, so that no sample is needed",
    "concat_linear": "linear layers stay as they are",
}
# After the first five, as the original takes them by place.
_ORDER = (*list(_NOTHING)[:-1], "graph_mode", "concat_linear")


def optimize(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    optimizer: Optimizer | None = None,
    level: str = "O1",
    inplace: bool = False,
    *others: Any,
    **named: Any,
) -> Any:
    """As ``intel_extension_for_pytorch.optimize`` is called; see ``cpudist.optimize``.

    Args:
        model: to be trained, or only to be used.
        dtype: ``torch.bfloat16``: the model's forward runs under autocast, whether or
            not the script enters it, and parameters stay float32; ``None`` or
            ``torch.float32``: in float32.
        optimizer: over parameters of ``model``.
        level: ``"O1"``; ``"O0"``: nothing is changed, whatever ``dtype`` is.
        inplace: change this model and optimizer; else copies of both.
        others: the remaining arguments of the original, in its order;
            ``graph_mode`` compiles the model (``torch.compile``), the others change no
            number here, and those given are named in the log, with the reason.
        named: likewise, by name.

    Returns:
        The model; with ``optimizer`` that and the optimizer.

    Raises:
        InvalidArgumentError: a level or dtype that is none of these, an argument that
            the original does not have, or an optimizer to be copied that has
            parameters of something else.
        UnsupportedModelError, ConfigurationError: as ``cpudist.optimize``.
    """
    if level not in _LEVELS:
        raise InvalidArgumentError(
            f"ipex.optimize: level={level!r}, expected one of {', '.join(_LEVELS)}"
        )
    if dtype is not None and dtype not in _DTYPES:
        raise InvalidArgumentError(
            f"ipex.optimize: dtype={dtype}, expected torch.bfloat16, torch.float32 or "
            "None"
        )
    given = _given(others, named)
    graph_mode = bool(given.pop("graph_mode", None))
    _tell_of(given)
    if not inplace:
        model, optimizer = _copied(model, optimizer)
    if level == "O0":
        logger.warning("ipex.optimize: level='O0': nothing was changed")
    else:
        _optimize(model, optimizer, dtype or torch.float32, graph_mode)
    return model if optimizer is None else (model, optimizer)


def _given(others: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """By name, as they would be given to the original."""
    given = dict(zip(_ORDER, others, strict=False))
    wrong = sorted(set(named) - set(_ORDER)) + sorted(set(named) & set(given))
    if wrong or len(others) > len(_ORDER):
        raise InvalidArgumentError(
            f"ipex.optimize: {', '.join(wrong) or 'too many arguments'}: the original "
            "has, once each, model, dtype, optimizer, level, inplace, "
            f"{', '.join(_ORDER)}"
        )
    return {**given, **named}


def _tell_of(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            logger.warning(
                "ipex.optimize: %s=%s: %s",
                name,
                value if isinstance(value, (bool, int, str)) else "…",
                _NOTHING[name],
            )


def _copied(
    model: nn.Module, optimizer: Optimizer | None
) -> tuple[nn.Module, Optimizer | None]:
    """Copies of both, in which they belong together as these do."""
    own = {id(parameter) for parameter in model.parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    if any(id(one) not in own for group in groups for one in group["params"]):
        raise InvalidArgumentError(
            "ipex.optimize: the optimizer has parameters that are not of this model, "
            "which a copy of it would not share. Pass inplace=True."
        )
    found: tuple[nn.Module, Optimizer | None] = copy.deepcopy((model, optimizer))
    return found


def _optimize(
    model: nn.Module, optimizer: Optimizer | None, dtype: torch.dtype, compiles: bool
) -> None:
    if optimizer is None:
        parameters = list(model.parameters())
        if not parameters:
            logger.warning("ipex.optimize: a model without parameters stays as it is")
            return
        # It steps nothing: what is asked for is which parameters are the model's.
        optimizer = torch.optim.SGD(parameters, lr=0.0)
    optimize_here(model, optimizer, dtype, compile=compiles, report=_say)


def _say(done: str) -> None:
    logger.warning("ipex.%s", done)
