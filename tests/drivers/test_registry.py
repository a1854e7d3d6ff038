# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every strategy has an engine that registered itself, and needs no other's files."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import torch_cpudist as cpudist
from torch_cpudist.drivers.registry import engine_of, open_parameters
from torch_cpudist.strategies.base import Strategy

ROOT = Path(cpudist.__file__).parent
SERVED = (cpudist.Sync(), cpudist.HalfAsync(), cpudist.Async(), cpudist.Geo())
AMONG_TRAINERS = (cpudist.AllReduce(), cpudist.Reduce(), cpudist.LocalSGD())
ENDLESS = cpudist.Geo(outer=cpudist.Outer())


@pytest.mark.parametrize("strategy", [*SERVED, *AMONG_TRAINERS, cpudist.Hybrid()])
def test_every_strategy_has_an_engine(strategy: Strategy) -> None:
    engine = engine_of(strategy)
    assert engine.served == (strategy not in AMONG_TRAINERS)
    assert not engine.waits(strategy)


def test_a_strategy_that_did_not_register_is_refused() -> None:
    @dataclass(frozen=True)
    class Own(cpudist.Sync):
        pass

    with pytest.raises(cpudist.errors.InternalError, match="no driver for Own"):
        engine_of(Own())


@pytest.mark.parametrize("one", [ENDLESS, cpudist.Hybrid(sparse=ENDLESS)])
@pytest.mark.parametrize("other", [cpudist.Sync(), cpudist.Async(), ENDLESS])
def test_rounds_of_several_steps_are_beside_no_others(
    one: Strategy, other: Strategy
) -> None:
    for new, old in ((one, other), (other, one)):
        run: Any = SimpleNamespace(
            participants=lambda old=old: [SimpleNamespace(strategy=old)]
        )
        nothing: Any = None
        with pytest.raises(cpudist.ConfigurationError, match=r"Geo\(outer=\.\.\.\)"):
            open_parameters(new, run, nothing, [], {}, nothing)


def imported(path: Path) -> set[str]:
    """The modules of this package that a file names in its imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("torch_cpudist.")}


def reached(name: str) -> set[str]:
    """All modules that one needs, itself among them."""
    seen, todo = set(), [name]
    while todo:
        one = todo.pop()
        path = ROOT.parent.joinpath(*one.split(".")).with_suffix(".py")
        if one not in seen and path.exists():
            seen.add(one)
            todo += imported(path)
    return seen


def test_sync_needs_no_file_of_other_engines() -> None:
    needed = reached("torch_cpudist.drivers.sync")
    assert "torch_cpudist.served.set" in needed
    engines = {name for name in needed if name.startswith("torch_cpudist.drivers.")}
    own = ("base", "guard", "registry", "saving", "served_saving", "server", "sync")
    assert engines == {f"torch_cpudist.drivers.{name}" for name in own}
    assert not needed & {
        "torch_cpudist.served.local",
        "torch_cpudist.served.local_state",
    }
