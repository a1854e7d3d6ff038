# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rows of the migration pages, and whether what they name is really there.

A row is a list item ``- what Fluid has: what stands for it here``. What stands there in
code is looked up: symbols are imported, arguments are those of the symbol's signature,
variables those that ``init()`` reads, tests those of the file.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.run import get_args_parser

import torch_cpudist as cpudist
from torch_cpudist.launch import environment
from torch_cpudist.launch.context import Context
from torch_cpudist.launch.environment import OWN_VARIABLES
from torch_cpudist.settings.fields import scalar_fields, variable_of
from torch_cpudist.strategies.registry import SETTINGS

ROOT = Path(__file__).resolve().parents[2]

# What names at the beginning of a dotted name stand for, in pages and in scripts.
NAMES: dict[str, Any] = {
    "cpudist": cpudist,
    "torch": torch,
    "nn": nn,
    "opt": cpudist.DistributedOptimizer,
    "executor": cpudist.ReplicaExecutor,
    "dataset": cpudist.data.InMemoryDataset,
    "model": nn.Module,
    "context": Context,
}
# Where a name without a dot is looked for, in this order.
PLACES = (
    cpudist,
    cpudist.data,
    cpudist.data.InMemoryDataset,
    cpudist.DistributedOptimizer,
    cpudist.ReplicaExecutor,
    cpudist.metrics,
    cpudist.optim,
    torch.optim,
    torch.distributed,
    torch.utils.data,
    nn,
    torch.Tensor,
)
# Whose arguments may be named without their owner: `threads=`.
OWNERS = (
    cpudist.data.QueueDataset,
    cpudist.data.InMemoryDataset,
    cpudist.train_from_dataset,
    cpudist.DistributedOptimizer,
    cpudist.ReplicaExecutor,
    cpudist.ReplicaExecutor.run,
    cpudist.AllReduce,
    cpudist.Async,
    cpudist.init,
    torch.optim.SGD,
    cpudist.data.InMemoryDataset.global_shuffle,
    nn.EmbeddingBag.forward,
)
TORCHRUN = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID",
}  # fmt: skip
OPTIONS = frozenset(get_args_parser()._option_string_actions)
VARIABLES = {variable_of(cls, f.name) for cls in SETTINGS for f in scalar_fields(cls)}

SPAN = re.compile(r"`([^`]+)`")
DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))?$", re.DOTALL)
VARIABLE = re.compile(r"\b(CPUDIST_[A-Z0-9_]*[A-Z0-9]|CPU_NUM)\b")
OWN = re.compile(r"(?:cpudist|opt|executor|dataset|torch|nn)\.|[A-Z][a-z]\w*\(")


def rows(text: str) -> Iterator[tuple[str, str]]:
    """What Fluid has and what stands for it, of every list item of a page."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for item in re.findall(r"^- (.*?)(?=^\S|^$|\Z)", prose, re.DOTALL | re.MULTILINE):
        joined = " ".join(item.split())
        # The first colon outside of code.
        blank = SPAN.sub(lambda code: "_" * len(code[0]), joined)
        left = blank.removeprefix("2.x:")
        at = left.find(":") + len(blank) - len(left)
        yield joined[:at], joined[at + 1 :].strip()


def references(answer: str) -> list[str]:
    """What a row says in code, with the tests that it names."""
    return SPAN.findall(answer)


def symbol(name: str) -> Any:
    """What a dotted name names.

    Raises:
        LookupError: nothing that is there.
    """
    first, *rest = name.split(".")
    if first in NAMES:
        starts: Iterable[Any] = [NAMES[first]]
    elif first == "torch_cpudist":
        starts = [cpudist]
    else:
        starts = [getattr(place, first) for place in PLACES if hasattr(place, first)]
    for found in starts:
        try:
            for part in rest:
                found = _member(found, part)
            return found
        except LookupError:
            continue
    raise LookupError(name)


def _member(owner: Any, name: str) -> Any:
    if not hasattr(owner, name) and inspect.ismodule(owner):
        try:
            return importlib.import_module(f"{owner.__name__}.{name}")
        except ImportError:
            raise LookupError(name) from None
    if hasattr(owner, name):
        return getattr(owner, name)
    # What only instances have.
    stated = re.search(rf"^\s+{name}\b.*:", inspect.getdoc(owner) or "", re.MULTILINE)
    if name in getattr(owner, "__annotations__", {}) or (
        inspect.isclass(owner) and stated
    ):
        return None
    raise LookupError(name)


def check_arguments(found: Callable[..., Any], arguments: str) -> None:
    """Raises ``LookupError`` if a call names an argument that there is none of."""
    accepted = inspect.signature(found).parameters
    # Of this call, not of calls among its arguments.
    flat = re.sub(r"\([^()]*\)", "", arguments.strip()[1:-1])
    for name in re.findall(r"(?:^|[,\s])(\w+)=", flat):
        if name not in accepted:
            raise LookupError(f"{name}= of {found.__name__}")


def _is_test(reference: str) -> bool:
    path, _, test = reference.partition("::")
    if not test or not (ROOT / path).is_file():
        return False
    name = re.escape(test.split("::")[-1].partition("[")[0])
    source = (ROOT / path).read_text(encoding="utf-8")
    return re.search(rf"^\s*def {name}\b", source, re.MULTILINE) is not None


def _names_option(reference: str) -> bool:
    given = re.findall(r"(?<!\S)(--[a-z][\w-]*)", reference)
    return bool(given) and all(option in OPTIONS for option in given)


def _is_variable(name: str) -> bool:
    """Whether ``init()`` reads it, or refuses it with a reason of its own."""
    if name in OWN_VARIABLES | VARIABLES | {"CPU_NUM"}:
        return True
    try:
        environment.parse({name: "1"})
    except cpudist.ConfigurationError as refused:
        return "unknown variable" not in str(refused)
    return False


def _names_variable(reference: str) -> bool:
    given = VARIABLE.findall(reference)
    return reference in TORCHRUN or (bool(given) and all(map(_is_variable, given)))


def _names_argument(reference: str) -> bool:
    given = re.fullmatch(r"(\w+)=.*", reference)
    if given is None:
        return False
    return any(given[1] in inspect.signature(one).parameters for one in OWNERS)


def _names_symbol(reference: str) -> bool:
    given = DOTTED.match(reference.strip().removeprefix("."))
    if given is None:
        return False
    try:
        found = symbol(given[1])
        if given[2] and callable(found):
            check_arguments(found, given[2])
    except LookupError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def exists(reference: str) -> bool:
    """Whether a row's code names a symbol, setting, variable, option or test."""
    kinds = (_is_test, _names_variable, _names_option, _names_argument, _names_symbol)
    return any(kind(reference) for kind in kinds)


def claims(reference: str) -> bool:
    """Whether it can be nothing but something of this package, torch or the tests."""
    if "::" in reference or VARIABLE.search(reference):
        return True
    return OWN.match(reference) is not None


def absent(answer: str) -> bool:
    """Whether a row says that there is nothing, and why."""
    found = re.match(r"(?:none\b[^:]*|not there yet): \S+ \S+ \S+", answer)
    return found is not None
