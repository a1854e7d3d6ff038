# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who follows Sync through the sources meets no file about Async, and none about Geo.

Counted is all that a file imports or includes, for types only, too, the ``__init__`` of
every package on the way, and with a header the source of its name. Not counted are what
puts the parts together (the package's face; ``Client`` and ``Server``, with the modes
that there are) and the settings of strategies, of which the environment tells all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import pytest
import tidy
from tidy_rules import Sources, layers, within

ROOT = Path(tidy.__file__).resolve().parent.parent
P = "torch_cpudist"


@pytest.fixture(scope="module")
def sources() -> Sources:
    """Every Python and C++ file of the package."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in (P, "csrc")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cpp")
    }


def reached(graph: Mapping[str, Iterable[str]], *roots: str) -> set[str]:
    """All files that these need, themselves among them."""
    found: set[str] = set()
    todo = list(roots)
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += graph[one]
    return found


def python_graph(sources: Sources) -> dict[str, set[str]]:
    """What each file of the package needs: what it imports, and around that."""
    edges = layers.python_edges(sources)
    graph = {name: set(known) - {f"{P}/__init__.py"} for name, known in edges.items()}
    for name, known in graph.items():
        for one in (name, *known):
            for folder in PurePosixPath(one).parents:
                whole = f"{folder}/__init__.py"
                if whole in sources and str(folder) != P and whole != name:
                    graph[name] = graph[name] | {whole}
    return graph


def native_graph(sources: Sources) -> dict[str, set[str]]:
    """What each file of csrc needs: what it includes, and what implements that."""
    graph = {n: set(known) for n, known in layers.native_edges(sources).items()}
    for name, known in graph.items():
        source = name.removesuffix(".h") + ".cpp"
        if name.endswith(".h") and source in sources:
            known.add(source)
    return graph


def test_the_driver_of_sync_needs_no_file_of_another_engine(sources: Sources) -> None:
    graph = python_graph(sources)
    # Settings say what there is to choose; who reads them is not the strategy.
    graph[f"{P}/strategies/__init__.py"] = graph[f"{P}/strategies/registry.py"] = set()
    needed = reached(graph, f"{P}/drivers/sync.py")
    drivers = {PurePosixPath(name).stem for name in within(needed, f"{P}/drivers")}
    needs = {"__init__", "base", "guard", "registry", "server", "sync"}
    assert drivers == needs | {"saving", "served_saving"}
    # Nor do they hold a part of one: the core's queue and exchanges are not Sync's.
    theirs = re.compile(r"_core\.(?:Async|Geo)\w+")
    assert [name for name in sorted(needed) if theirs.search(sources[name])] == []
    served = {PurePosixPath(name).stem for name in within(needed, f"{P}/served")}
    assert "set" in served
    assert not served & {"local", "local_state"}
    strategies = {PurePosixPath(one).stem for one in within(needed, f"{P}/strategies")}
    assert strategies == {"__init__", "base", "half_async", "registry", "sync"}


OTHERS = tuple(
    f"csrc/{name}"
    for name in ("client/arrivals", "client/geo", "server/arrivals", "server/geo")
)
OF_OTHERS = re.compile(r"(?i:\bgeo)|\b(?:PushQueue|QueueOptions|Arrival\w+|Arrivals)\b")
# They put the parts together.
WHOLE = {
    f"csrc/{side}/{name}{suffix}"
    for side in ("client", "server")
    for name in (side, "modes")
    for suffix in (".h", ".cpp")
}


@pytest.mark.parametrize("side", ["client", "server"])
def test_rounds_need_no_file_of_arrivals_or_geo(sources: Sources, side: str) -> None:
    roots = [f"csrc/{side}/param_set.cpp", *within(sources, f"csrc/{side}/rounds")]
    needed = reached(native_graph(sources), *roots)
    met = set(within(needed, f"csrc/{side}"))
    named = [name for name in met if OF_OTHERS.search(sources[name])]
    assert named == []
    assert not met & set(within(sources, *OTHERS))
    # All else is about it: nothing lies where neither is.
    there = set(within(sources, f"csrc/{side}")) - WHOLE
    assert met == there - set(within(sources, *OTHERS))


def test_what_puts_the_parts_together_reaches_all(sources: Sources) -> None:
    """What is reached is seen: the same look finds the others where they are known."""
    native = native_graph(sources)
    client = reached(native, "csrc/client/client.cpp")
    assert {"csrc/client/modes.cpp", "csrc/client/arrivals/join.cpp"} <= client
    server = reached(native, "csrc/server/server.cpp")
    assert {"csrc/server/modes.cpp", "csrc/server/geo/change_log.cpp"} <= server
    graph = python_graph(sources)
    assert f"{P}/drivers/geo.py" in reached(graph, f"{P}/optimizer/distributed.py")
