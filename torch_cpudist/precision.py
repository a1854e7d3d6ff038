# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one function, and the class that it gives models
"""``optimize``: bfloat16, layout and compilation for a model that trains on CPUs.

The model's class becomes a subclass of its own whose forward runs under autocast. A
class, not a hook or a wrapper: names in ``state_dict`` stay, copies and replicas keep
it, and compiled code guards it.
"""

from __future__ import annotations

import copyreg
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from torch_cpudist.errors import (
    ConfigurationError,
    InvalidArgumentError,
    UnsupportedModelError,
)
from torch_cpudist.log import logger

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizersT = TypeVar("OptimizersT", bound=Optimizer | Sequence[Optimizer])

# As the kernel names them, best first: x86 has the former two, ARM the last.
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")
# Read by oneDNN, which computes in bfloat16 for torch; the former wins.
_ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
# Values of these that leave it without instructions that multiply in bfloat16: those
# below AVX-512 (AVX2_VNNI_2 can convert only), and the first two of that.
_WITHOUT_BF16 = re.compile(r"SSE.*|AVX|AVX2.*|AVX512_CORE(_VNNI)?")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Optimization:
    """What ``optimize`` did.

    Attributes:
        dtype: what layers that autocast knows compute in: bfloat16 or float32.
        instructions: the best of this CPU's for bfloat16: ``"amx_bf16"``,
            ``"avx512_bf16"``, ``"bf16"`` (ARM); ``None``: it has none.
        channels_last: images come in as oneDNN's convolutions want them.
        compiled: the backend of ``torch.compile``; ``None``: not compiled.
        tables: names of sparse embedding weights, which stay float32.
        notes: what was not done, and why, one sentence each.
    """

    dtype: torch.dtype
    instructions: str | None
    channels_last: bool
    compiled: str | None
    tables: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def autocast(self) -> bool:
        """The forward runs under autocast."""
        return self.dtype != torch.float32

    def __str__(self) -> str:
        """Says it in one line."""
        kind = "autocast to bfloat16" if self.autocast else "float32"
        said = [f"{kind} (this CPU: {self.instructions or 'no bfloat16'})"]
        if self.channels_last:
            said.append("images in channels_last")
        if self.compiled:
            said.append(f"torch.compile with {self.compiled}")
        if self.tables:
            said.append(f"{len(self.tables)} table(s) in float32")
        return "; ".join([*said, *self.notes])


def bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The best instructions for bfloat16 that the kernel lists, or ``None``."""
    for line in cpuinfo.read_text().splitlines():
        if line.partition(":")[0].strip() in ("flags", "Features"):
            flags = line.split()
            return next((name for name in _INSTRUCTIONS if name in flags), None)
    return None


def bf16_obstacle(instructions: str | None) -> str | None:
    """Why bfloat16 would be slower than float32 in this process, or ``None``.

    Args:
        instructions: of this CPU, from ``bf16_instructions``.
    """
    if instructions is None:
        return "this CPU has no instructions for it"
    mkldnn: Any = torch.backends.mkldnn
    if not mkldnn.is_available() or not mkldnn.enabled:
        return f"oneDNN, which would use {instructions} for torch, is switched off"
    for name in _ONEDNN_LIMITS:
        if limit := os.environ.get(name):
            if _WITHOUT_BF16.fullmatch(limit.upper()):
                return f"{name}={limit} keeps oneDNN from using {instructions}"
            break
    return None


# -- the class of an optimized model ---------------------------------------------------


class _Optimized:
    """First base of an optimized model's class."""

    _cpudist_plain_model: ClassVar[type[nn.Module]]
    _cpudist_autocast: ClassVar[bool]
    _cpudist_channels_last: ClassVar[bool]

    def __init_subclass__(cls) -> None:
        """Keeps a class of the user's own from counting this one as its subclass."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and saved models are optimized, too."""
        made = super().__reduce_ex__(max(int(protocol), 2))
        if made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made
        kind = type(self)
        form = (kind._cpudist_autocast, kind._cpudist_channels_last)
        return _restored, (kind._cpudist_plain_model, *form), *made[2:]


def _restored(plain: type[nn.Module], autocast: bool, channels_last: bool) -> nn.Module:
    """An empty optimized model, whose state follows: for copies and saved models."""
    kind = _optimized_class(plain, autocast, channels_last)  # type: ignore[arg-type]
    made: nn.Module = object.__new__(kind)
    return made


def _as_channels_last(value: Any) -> Any:
    """A 4-dimensional tensor ``[n, c, h, w]`` of floats with ``c`` innermost."""
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return value
    if not value.is_floating_point():
        return value
    made = value.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = made.shape
    # With one channel both layouts are the same memory, and torch takes the other.
    strides = (channels * height * width, 1, channels * width, channels)
    return made if made.stride() == strides else made.as_strided(made.shape, strides)


def _as_float32(value: Any) -> Any:
    """What autocast left in bfloat16, in float32: losses are computed in that."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        return value.float()
    return value


def _forward_of(
    plain: type[nn.Module], autocast: bool, channels_last: bool
) -> Callable[..., Any]:
    inner = plain.forward

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if channels_last:
            args, kwargs = tree_map(_as_channels_last, (args, kwargs))
        casting = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        with casting:
            returned = inner(self, *args, **kwargs)
        return tree_map(_as_float32, returned) if autocast else returned

    return forward


@functools.cache
def _optimized_class(plain: Any, autocast: bool, channels_last: bool) -> Any:
    """One class for all models of a kind, so that code is compiled once."""
    members = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_cpudist_plain_model": plain,
        "_cpudist_autocast": autocast,
        "_cpudist_channels_last": channels_last,
        "forward": _forward_of(plain, autocast, channels_last),
    }
    return type(plain.__name__, (_Optimized, plain), members)


# -- checks ----------------------------------------------------------------------------


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"optimize: expected a torch.nn.Module, found {type(model).__name__}."
        )
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModelError(
            f"optimize: {kind} is compiled by torch.jit, whose forward is fixed. Pass "
            "the model it was made from, and compile=True."
        )
    if "_orig_mod" in model._modules:  # as torch.compile's wrapper has it
        raise UnsupportedModelError(
            "optimize: the model is compiled already, in its present precision. Pass "
            "the model that torch.compile was given, and compile=True."
        )
    if isinstance(model, _EMBEDDINGS):
        raise UnsupportedModelError(
            f"optimize: the model is a lone {kind}, whose lookups stay float32: there "
            "is nothing to compute in another precision. Pass the model it is part of."
        )
    if "forward" in vars(model):
        raise UnsupportedModelError(
            f"optimize: {kind}.forward was replaced on the model itself, which hides "
            "that of its class. Override it in a subclass."
        )


def _trained(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of ``model`` that ``optimizer`` has.

    Raises:
        InvalidArgumentError: it is none, or has none of them.
    """
    inners = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(inners, Sequence) or not all(
        isinstance(inner, Optimizer) for inner in inners
    ):
        raise InvalidArgumentError(
            "optimize: expected a torch.optim optimizer or a list of them, found "
            f"{type(optimizer).__name__}."
        )
    held = {id(p) for o in inners for g in o.param_groups for p in g["params"]}
    found = [(n, p) for n, p in model.named_parameters() if id(p) in held]
    if not found:
        raise InvalidArgumentError(
            "optimize: the optimizer has no parameter of this model. Make it over "
            "model.parameters() of the model that is passed."
        )
    return iter(found)


def _check_parameters(trained: Sequence[tuple[str, nn.Parameter]], cast: bool) -> None:
    for name, parameter in trained:
        if parameter.device.type != "cpu":
            raise UnsupportedModelError(
                f"optimize: parameter {name!r} is on {parameter.device}, expected cpu."
            )
        if parameter.dtype in (torch.bfloat16, torch.float16):
            raise UnsupportedModelError(
                f"optimize: parameter {name!r} is {parameter.dtype}, in which small "
                "updates are lost. Train it in float32 (model.float()); optimize "
                "computes in bfloat16 all the same."
            )
    wide = [n for n, p in trained if p.dtype == torch.float64]
    if cast and len(wide) == len(trained):
        raise UnsupportedModelError(
            f"optimize: all parameters are float64 ({wide[0]!r}, ...), which autocast "
            "leaves alone. Convert the model with model.float()."
        )


def _check_compiler(backend: str) -> None:
    """Raises ConfigurationError: the backend or its C++ compiler is missing."""
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigurationError(
            f"optimize: compile={backend!r}: expected True or one of "
            f"{', '.join(map(str, sorted(known)))}."
        )
    compiler = os.environ.get("CXX", "g++")
    if backend == "inductor" and shutil.which(compiler) is None:
        raise ConfigurationError(
            f"optimize: compile=True needs a C++ compiler, and {compiler!r} is not on "
            "PATH. Install g++, or set CXX to one."
        )


# -- optimize --------------------------------------------------------------------------


def _choose_dtype(
    dtype: torch.dtype, instructions: str | None, force: bool
) -> tuple[torch.dtype, list[str]]:
    if dtype not in (torch.bfloat16, torch.float32):
        raise InvalidArgumentError(
            f"optimize: dtype={dtype}: expected torch.bfloat16 or torch.float32."
            + (
                " float16 would need its losses scaled, and no CPU is faster with it."
                if dtype == torch.float16
                else ""
            )
        )
    obstacle = bf16_obstacle(instructions) if dtype == torch.bfloat16 else None
    if obstacle is not None and not force:
        note = (
            f"asked for bfloat16 but {obstacle}, which makes it slower than float32; "
            "force=True takes it all the same"
        )
        return torch.float32, [note]
    return dtype, []


def _choose_layout(
    model: nn.Module, dtype: torch.dtype, asked: bool | None
) -> tuple[bool, list[str]]:
    convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if asked and not convolves:
        raise InvalidArgumentError(
            "optimize: channels_last=True, but the model has no nn.Conv2d. Leave it "
            "out."
        )
    if asked is None and convolves and dtype == torch.float32:
        note = "channels_last=True is faster, but may change the last bits of float32"
        return False, [note]
    return convolves if asked is None else asked, []


def _change_class(model: nn.Module, cast: bool, layout: bool) -> None:
    plain: Any = type(model)
    if issubclass(plain, _Optimized):
        plain = plain._cpudist_plain_model
    changed = cast or layout
    try:
        model.__class__ = _optimized_class(plain, cast, layout) if changed else plain
    except TypeError as error:
        raise UnsupportedModelError(
            f"optimize: no subclass can stand in for {plain.__name__}: {error}"
        ) from error


def _table_names(model: nn.Module) -> tuple[str, ...]:
    return tuple(
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, _EMBEDDINGS) and module.sparse
    )


def optimize(
    model: ModelT,
    optimizer: OptimizersT,
    dtype: torch.dtype = torch.bfloat16,
    *,
    channels_last: bool | None = None,
    compile: bool | str = False,
    force: bool = False,
    report: Callable[[str], None] | None = None,
) -> tuple[ModelT, OptimizersT, Optimization]:
    """Makes a model train faster on this CPU, with parameters as they are.

    Under bfloat16 ``model(...)`` runs under torch's autocast, and what it returns in
    bfloat16 becomes float32. Parameters, gradients, optimizer state and embedding
    tables stay float32, names stay, and the optimizer is the same. Before or after
    ``DistributedOptimizer``, before ``ReplicaExecutor``. Again with
    ``dtype=torch.float32`` it undoes the former. Only calls of the model itself are
    changed, not other methods or calls of its parts. Local, no messages.

    Args:
        model: changed in place.
        optimizer: a ``torch.optim`` optimizer over parameters of ``model``, or several.
        dtype: ``torch.bfloat16``, or ``torch.float32``, which changes no number.
        channels_last: 4-dimensional inputs ``[n, c, h, w]`` come in with ``c``
            innermost, for oneDNN's convolutions; default: with bfloat16, if the model
            has an ``nn.Conv2d``.
        compile: compile the model in place (``nn.Module.compile``); or the name of a
            backend of ``torch.compile``. Costs tens of seconds at the first step.
        force: bfloat16 also where this CPU has no instructions for it, or oneDNN may
            not use them.
        report: called with a line that says what was done; default: the
            ``torch_cpudist`` logger at ``info``, at ``warning`` if bfloat16 was not
            taken.

    Returns:
        The same model, the same optimizer, and what was done.

    Raises:
        InvalidArgumentError: an argument is none of these, or does not belong together.
        UnsupportedModelError: the model's forward is fixed, or its parameters are
            neither float32 nor float64, or not on the CPU.
        ConfigurationError: no such backend, or no C++ compiler. Nothing was changed.
    """
    _check_model(model)
    trained = list(_trained(model, optimizer))
    instructions = bf16_instructions()
    taken, notes = _choose_dtype(dtype, instructions, force)
    _check_parameters(trained, taken != torch.float32)
    layout, more = _choose_layout(model, taken, channels_last)
    backend = "inductor" if compile is True else compile or None
    if backend is not None:
        _check_compiler(backend)
    _change_class(model, taken != torch.float32, layout)
    if backend is not None:
        model.compile(backend=backend)
    tables = _table_names(model)
    done = Optimization(
        taken, instructions, layout, backend, tables, tuple([*notes, *more])
    )
    say = report or (logger.info if taken == dtype else logger.warning)
    say(f"optimize: {done}")
    return model, optimizer, done
