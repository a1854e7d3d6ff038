# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Replicas of a model: modules of their own over parameters that are the model's.

A replica's parameter is a view of the model's, or a copy, and has a gradient of its
own. Modules are copies, so that what a forward leaves on them (and whether they train)
is the replica's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torch_cpudist.errors import ModelChangedError, UnsupportedModelError
from torch_cpudist.ops.tables import Piece
from torch_cpudist.replicas import hooks
from torch_cpudist.replicas.dropout import own_dropout
from torch_cpudist.replicas.pieces import gradient_of, has_rows, piece_of
from torch_cpudist.replicas.table_view import copied_tables
from torch_cpudist.tables.binding import MAX_NORM_OBSTACLE
from torch_cpudist.tables.forwards import hook_copy
from torch_cpudist.tables.local import is_staged, plain_class
from torch_cpudist.tables.remote_weight import is_remote, table_of
from torch_cpudist.tables.weight import values_of

_PLAIN = (bool, int, float, str, type(None))
# Written by torch or by this package, not by users.
_OWN = ("training", "_is_full_backward_hook")


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN)
        and name not in _OWN
        and not name.startswith("_cpudist_")
    }


def _mark(parameter: torch.Tensor) -> tuple[int, int]:
    """Changes when values are written, but for writes through ``tensor.data``."""
    return parameter._version, parameter.data_ptr()


def _check_norms(model: nn.Module, count: int) -> None:
    """Refuses lookups that write to the table that other replicas read."""
    for name, module in model.named_modules():
        if count > 1 and getattr(module, "max_norm", None) is not None:
            raise UnsupportedModelError(
                f"ReplicaExecutor: {name or 'the model'} has max_norm="
                f"{module.max_norm}, which rewrites rows during a lookup, while other "
                f"replicas read them. {MAX_NORM_OBSTACLE[1]}"
            )


def _check_model(model: nn.Module) -> None:
    """Refuses models that cannot be copied as modules over shared parameters."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UnsupportedModelError(
            "ReplicaExecutor: DistributedDataParallel averages by hooks on its own "
            "parameters. Pass the module in it, and wrap the optimizer: "
            "DistributedOptimizer(optimizer, model, strategy=AllReduce())."
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"ReplicaExecutor: {name or 'the model'} is a ScriptModule, whose "
                "parameters cannot be shared. Use torch.compile."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UnsupportedModelError(
                f"ReplicaExecutor: parameter {name!r} is not initialized. Run the "
                "model once before."
            )
        if is_remote(parameter) and not table_of(parameter).wrapped:
            raise UnsupportedModelError(
                f"ReplicaExecutor: {name!r} is the weight of a remote table, whose "
                "rows are on servers, but no optimizer with servers trains it. Wrap "
                "the optimizer in DistributedOptimizer before making the executor."
            )
        if parameter.device.type != "cpu":
            raise UnsupportedModelError(
                f"ReplicaExecutor: parameter {name!r} is on {parameter.device}; "
                "replicas are threads on the CPU."
            )
        hooks.check_parameter(name, parameter)
    for name, module in model.named_modules():
        if is_staged(module):
            raise UnsupportedModelError(
                f"ReplicaExecutor: lookups of {name!r} bring rows to another device; "
                "replicas are threads on the CPU."
            )


class ReplicaModels:
    """The replicas of one model. Not thread-safe."""

    def __init__(self, model: nn.Module, count: int, copied: set[int]) -> None:
        """Copies the modules of ``model`` for every replica.

        Args:
            model: the user's.
            count: replicas.
            copied: ``id`` of parameters that all replicas but the first have a copy of.

        Raises:
            UnsupportedModelError: it cannot be replicated.
        """
        _check_model(model)
        _check_norms(model, count)
        self.model = model
        self.parameters = list(model.parameters())
        self.names = [name for name, _ in model.named_parameters()]
        self._copied = [id(p) in copied for p in self.parameters]
        self._written = [_mark(p) for p in self.parameters]
        self._owners = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        sparse = self.sparse_weights()
        #: By ``id`` of a table's weight, its place among the parameters.
        self.tables = {
            id(p): i for i, p in enumerate(self.parameters) if id(p) in sparse
        }
        self.modules: list[nn.Module] = []
        # By replica, in the order of the model's parameters.
        self.views: list[list[nn.Parameter]] = []
        #: By replica and place, gradients of tables whose keys have been summed.
        self.pieces: list[dict[int, Piece]] = [{} for _ in range(count)]
        for replica in range(count):
            views = [self._view(i, replica) for i in range(len(self.parameters))]
            self.views.append(views)
            self.modules.append(self._copy(replica, views))
        originals = list(model.modules())
        copies = [list(module.modules()) for module in self.modules]
        self._pairs = list(zip(originals, zip(*copies, strict=True), strict=True))
        self._plain = [_plain_attributes(module) for module in originals]
        self._hooks = [hooks.of_module(module) for module in originals]
        self._buffered = [pair for pair in self._pairs if pair[0]._buffers]

    def has_copy(self, index: int, replica: int) -> bool:
        """Whether a replica's parameter has values of its own."""
        return replica > 0 and self._copied[index]

    def _view(self, index: int, replica: int) -> nn.Parameter:
        parameter = self.parameters[index]
        values = values_of(parameter)
        if self.has_copy(index, replica):
            values = values.clone()
        return nn.Parameter(values, requires_grad=parameter.requires_grad)

    def _copy(self, replica: int, views: Sequence[nn.Parameter]) -> nn.Module:
        memo: dict[int, Any] = {
            id(parameter): view
            for parameter, view in zip(self.parameters, views, strict=True)
        }
        for buffer in self.model.buffers():
            memo[id(buffer)] = buffer if replica == 0 else buffer.detach().clone()
        copied_tables(self.model, memo)
        try:
            made: nn.Module = copy.deepcopy(self.model, memo)
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"ReplicaExecutor: the model cannot be copied: {error} An attribute is "
                "computed from parameters (torch.nn.utils.weight_norm, say); use "
                "torch.nn.utils.parametrizations, which computes it in forward."
            ) from error
        own_dropout(made)
        hook_copy(self.model, made)
        return made

    # -- following the model -----------------------------------------------------------

    def follow(self, training: bool | None = None) -> None:
        """Makes replicas what the model is now: modes, values, buffers, attributes.

        Args:
            training: the mode of all modules; ``None`` takes the model's.

        Raises:
            ModelChangedError: the model has other parameters, module hooks or table
                classes by now.
            UnsupportedModelError: a parameter has a hook by now.
        """
        self._check_same()
        for index, parameter in enumerate(self.parameters):
            self._follow_parameter(index, parameter)
        for i, (module, copies) in enumerate(self._pairs):
            mode = module.training if training is None else training
            for made in copies:
                if made.training != mode:
                    made.training = mode
            plain = _plain_attributes(module)
            if plain != self._plain[i]:
                _check_norms(module, len(self.modules))
                changed = plain.items() - self._plain[i].items()
                for made in copies:
                    vars(made).update(changed)
                self._plain[i] = plain
        self._hand_buffers()

    def _check_same(self) -> None:
        for module, name, parameter in self._owners:
            if module._parameters.get(name) is not parameter:
                raise ModelChangedError(
                    f"{type(module).__name__}.{name} is another parameter than when "
                    "the ReplicaExecutor was made (load_state_dict(assign=True), say). "
                    "Make a new one."
                )
        for name, parameter in zip(self.names, self.parameters, strict=True):
            hooks.check_parameter(name, parameter)
        for (module, _), known in zip(self._pairs, self._hooks, strict=True):
            if hooks.of_module(module) != known:
                raise ModelChangedError(
                    f"{type(module).__name__} has other forward or backward hooks than "
                    "when the ReplicaExecutor was made, which copied them. Make a new "
                    "one."
                )

    def _follow_parameter(self, index: int, parameter: nn.Parameter) -> None:
        written = _mark(parameter) != self._written[index]
        for replica, views in enumerate(self.views):
            view = views[index]
            if view.requires_grad != parameter.requires_grad:
                view.requires_grad_(parameter.requires_grad)
            if self.has_copy(index, replica):
                if written or view.shape != parameter.shape:
                    view.data = parameter.detach().clone()
            elif (
                view.data_ptr() != parameter.data_ptr()
                or view.dtype != parameter.dtype
                or view.shape != parameter.shape
            ):
                view.data = values_of(parameter)
        self._written[index] = _mark(parameter)

    def _hand_buffers(self) -> None:
        """Gives the first replica the model's buffers and the others their values."""
        for module, copies in self._buffered:
            for name, buffer in module._buffers.items():
                copies[0]._buffers[name] = buffer
                for made in copies[1:]:
                    own = made._buffers.get(name)
                    if buffer is None or own is None or own.shape != buffer.shape:
                        copied = None if buffer is None else buffer.detach().clone()
                        made._buffers[name] = copied
                    else:
                        own.data.copy_(buffer.detach())

    def take_buffers(self) -> None:
        """Takes buffers over that the first replica has put in the place of others."""
        for module, copies in self._buffered:
            for name in module._buffers:
                module._buffers[name] = copies[0]._buffers[name]

    # -- copies ------------------------------------------------------------------------

    def expect_update(self) -> None:
        """Copies are taken anew, unless ``note_updated`` follows."""
        self._written = [(-1, 0)] * len(self.parameters)

    def note_updated(self) -> None:
        """Copies have the values that the model's parameters have now."""
        self._written = [_mark(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def refresh(self, replica: int, indices: Iterable[int]) -> None:
        """Copies the model's values to a replica's own; run by its thread.

        Args:
            replica: which.
            indices: of parameters.
        """
        for index in indices:
            if self.has_copy(index, replica):
                self.views[replica][index].copy_(self.parameters[index])

    # -- gradients ---------------------------------------------------------------------

    def clear_gradients(self) -> None:
        """Forgets the gradients of all replicas, and those in the model."""
        for parameter in self.parameters:
            parameter.grad = None
        self.drop_gradients(range(len(self.parameters)))

    def drop_gradients(self, indices: Iterable[int]) -> None:
        """Forgets the replicas' gradients of some parameters."""
        for index in indices:
            for views, pieces in zip(self.views, self.pieces, strict=True):
                views[index].grad = None
                pieces.pop(index, None)

    def gradients_of(self, index: int) -> list[torch.Tensor]:
        """The replicas' gradients of a parameter, of those that have one, in order."""
        found: list[torch.Tensor] = []
        for views, pieces in zip(self.views, self.pieces, strict=True):
            grad = views[index].grad
            if index in pieces:
                found.append(gradient_of(pieces[index], views[index]))
            elif grad is not None:
                found.append(grad)
        return found

    def pieces_of(self, index: int) -> list[Piece]:
        """The same as keys and rows; empty unless all of them are such."""
        found: list[Piece] = []
        for views, pieces in zip(self.views, self.pieces, strict=True):
            grad = views[index].grad
            if index in pieces:
                found.append(pieces[index])
            elif grad is not None:
                if not has_rows(grad):
                    return []
                found.append(piece_of(grad))
        return found

    @property
    def has_gradients(self) -> bool:
        """Whether some replica has a gradient."""
        if any(self.pieces):
            return True
        return any(view.grad is not None for views in self.views for view in views)

    @property
    def compiled(self) -> bool:
        """Whether some module runs compiled code."""
        return any(
            isinstance(module, torch._dynamo.OptimizedModule)
            or module._compiled_call_impl is not None
            for module in self.model.modules()
        )

    def sparse_weights(self) -> set[int]:
        """``id`` of embedding weights whose gradients are sparse."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        return {
            id(module.weight)
            for module in self.model.modules()
            if issubclass(plain_class(module), kinds) and module.sparse
        }
