# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is refused, or warned of, in a model before its parameters are placed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torch_cpudist.errors import (
    InvalidArgumentError,
    RemoteTableError,
    UnsupportedModelError,
)
from torch_cpudist.log import logger
from torch_cpudist.machine.device import check_device
from torch_cpudist.tables.binding import MAX_NORM_OBSTACLE
from torch_cpudist.tables.found import FoundTable
from torch_cpudist.tables.remote_weight import is_remote

_LARGE_DENSE_EMBEDDING_BYTES = 16 << 20
DTYPES = {torch.float32: "float32", torch.float64: "float64"}


def check_plain(model: nn.Module) -> None:
    """Refuses what averages or updates parameters by itself, besides the servers."""
    for name, module in model.named_modules():
        owner = f"module {name!r}" if name else "the model"
        kind = type(module).__name__
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UnsupportedModelError(
                f"{owner} is a {kind}, which averages the trainers' gradients itself. "
                "Pass the module inside it, and call that one too."
            )
        # torchrec's fused and sharded modules, without importing it.
        if hasattr(type(module), "fused_optimizer"):
            raise UnsupportedModelError(
                f"{owner} is a {kind}, which updates its tables itself, during "
                "backward or on other ranks. Use the plain module, of torchrec the "
                "unsharded EmbeddingBagCollection."
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise UnsupportedModelError(
                f"parameter {name!r} is updated during backward, by torch's "
                "_apply_optimizer_in_backward. Leave that call out: its optimizer runs "
                "on the servers."
            )


def check_owned(model: nn.Module, trained: Sequence[nn.Parameter]) -> None:
    """Refuses an optimizer of another model; parameters of a loss, say, may be apart.

    Raises:
        InvalidArgumentError: nothing of the model would be trained.
    """
    own = {id(parameter) for parameter in model.parameters()}
    apart = sum(id(parameter) not in own for parameter in trained)
    if apart and apart == len(trained):
        raise InvalidArgumentError(
            f"none of the optimizer's {apart} parameters is one of the model's, so "
            "that nothing of the model would be trained. Was the model built anew "
            "after its optimizer? Build the optimizer over this model's parameters()."
        )
    if apart:
        logger.warning(
            "%d of the optimizer's %d parameters are not the model's. They are trained "
            "as dense parameters; if they are of an earlier model, build the optimizer "
            "over this model's parameters().",
            apart,
            len(trained),
        )


def check_names(names: Iterable[str]) -> None:
    """Refuses names of parameters that cannot travel.

    Raises:
        UnsupportedModelError: one has half of a surrogate pair.
    """
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UnsupportedModelError(
                f"parameter {name!r}: its name has a lone surrogate, which UTF-8 has "
                "no bytes for, and names go to servers and into files as UTF-8. "
                "Register the module or parameter under another name."
            ) from None


def check_initialized(name: str, parameter: nn.Parameter) -> None:
    """Refuses a parameter without a shape, or without memory that has its values."""
    if is_lazy(parameter):
        raise UnsupportedModelError(
            f"parameter {name!r} has no shape yet: its lazy module has not run. Run "
            "one forward pass before wrapping the optimizer."
        )
    if parameter.is_neg():
        raise UnsupportedModelError(
            f"parameter {name!r} is a view whose memory has the other sign (is_neg()), "
            "as of the imaginary part of a conjugate. Make it of tensor.resolve_neg()."
        )


def _remedy(parameter: nn.Parameter) -> str:
    """What to do with a parameter of another dtype or layout."""
    if parameter.layout != torch.strided:
        return "Make it dense: parameter.to_dense()."
    if parameter.is_complex():
        return (
            "Keep the real and the imaginary part as float32, in a last dimension of "
            "two, and compute with torch.view_as_complex(parameter)."
        )
    if parameter.dtype in (torch.bfloat16, torch.float16):
        return "Keep parameters in float32 and use torch.autocast for bfloat16."
    return "Convert it with module.float()."


def check_no_table(name: str, parameter: nn.Parameter) -> None:
    """Refuses a remote table's weight that no embedding of the model looks up."""
    if is_remote(parameter):
        raise UnsupportedModelError(
            f"parameter {name!r} is the weight of a remote table, but of no "
            "nn.Embedding or nn.EmbeddingBag of the model: its rows are not here. Look "
            "it up through such a module, or leave it out of the remote tables."
        )


def check_dense(name: str, parameter: nn.Parameter) -> None:
    """Refuses what servers do not keep."""
    if parameter.dtype not in DTYPES or parameter.layout != torch.strided:
        raise UnsupportedModelError(
            f"parameter {name!r} is {parameter.dtype}, {parameter.layout}; trained are "
            f"strided float32 and float64 parameters. {_remedy(parameter)}"
        )
    check_device(name, parameter.device)


def check_no_remote(tables: Sequence[FoundTable]) -> None:
    """Refuses to take over from an optimizer what only its servers' tables have.

    Raises:
        RemoteTableError: a table is remote.
    """
    for table in tables:
        if table.remote:
            raise RemoteTableError(
                f"remote table {table.name!r} is trained by another "
                "DistributedOptimizer, whose rows no trainer can take over. Go on with "
                "that one; or close() it first, with which its rows are gone and "
                "begin anew."
            )


def check_dense_embeddings(model: nn.Module, dense: Sequence[nn.Parameter]) -> None:
    """Refuses lookups that rewrite rows of dense parameters."""
    weights = {id(parameter) for parameter in dense}
    for name, module in model.named_modules():
        embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if embedding and module.max_norm is not None and id(module.weight) in weights:
            found, remedy = MAX_NORM_OBSTACLE
            raise UnsupportedModelError(
                f"embedding {name!r} cannot be trained: {found}. {remedy}"
            )


def warn_large_embeddings(model: nn.Module, tables: Sequence[FoundTable]) -> None:
    """Warns of an embedding that would be far cheaper as a table."""
    sparse = {id(table.weight) for table in tables}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        weight = module.weight
        size_bytes = weight.numel() * weight.element_size()
        apart = id(weight) in sparse or is_remote(weight)
        if not apart and size_bytes > _LARGE_DENSE_EMBEDDING_BYTES:
            logger.warning(
                "%r is a dense embedding of %.0f MiB: all of it travels in every step. "
                "Make it a table with sparse=True or cpudist.shard_tables(model).",
                name,
                size_bytes / 2**20,
            )
            return
