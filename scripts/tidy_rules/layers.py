# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who may know whom: folders are layers, and no files know each other in a circle.

Imports for types only count as others do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from tidy_rules import Sources, Violation, syntax, within
from tidy_rules.functions import blank_comments

PACKAGE = "torch_cpudist"
# Made by the build: they import nothing of the package.
BUILT = {"_core", "_c10d", "_build_info"}
# Calls that import, or look for, what their first argument names.
LATE = {"import_module", "__import__", "find_spec"}


def stacked(*rows: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Make layers of rows: each imports those of the rows before, none beside it."""
    below: list[str] = []
    layers = {}
    for row in rows:
        layers |= {f"{PACKAGE}/{name}": tuple(below) for name in row}
        below += [f"{PACKAGE}/{name}" for name in row]
    return layers


def native(**rows: str) -> dict[str, tuple[str, ...]]:
    """Make layers of C++ folders, `__` for `/`, and what each of them may include."""
    return {
        f"csrc/{name.replace('__', '/')}": tuple(f"csrc/{o}" for o in others.split())
        for name, others in rows.items()
    }


# A folder, or a module that lies beside the folders, and what its files may import.
LAYERS: dict[str, tuple[str, ...]] = {
    **stacked(
        ("errors", "log", "ranges", "_build_check", "_version"),
        ("settings",),
        ("machine",),
        ("snapshot",),
        ("exports",),
        ("ops",),
        ("optim",),
        ("strategies",),
        ("tables",),
        ("model",),
        ("rules",),
        ("backends",),
        ("launch",),
        ("monitor",),
        ("runtime",),
        ("served",),
        ("collective",),
        ("drivers",),
        ("resuming",),
        ("optimizer",),
        ("inference",),
        ("replicas", "metrics", "losses"),
        ("data",),
        ("advice",),
        ("precision", "launcher", "integrations"),
        ("compat",),
        ("testing",),
        ("doctor", "top"),
        ("__init__",),
        ("__main__",),
    ),
    **native(
        base="",
        kernels="",
        precompiled="",
        wire="base kernels",
        transport="base wire/frame wire/handshake",
        table="base kernels wire",
        inference="base kernels",
        # What a set stands on, the set, what stands on it, and who puts that together.
        server__layout="base kernels wire server/options",
        server__update="base kernels wire table server/counters server/outbox "
        "server/layout",
        server__snapshot="base kernels wire table server/outbox",
        server="base kernels wire transport table server/layout server/update "
        "server/snapshot",
        server__rounds="base kernels wire server server/layout server/update",
        server__arrivals="base kernels wire table server server/layout server/update",
        server__geo="base wire table server server/update",
        server__modes="wire server server/rounds server/arrivals server/geo",
        server__server="base wire transport server server/modes",
        client__cache="base kernels",
        client__links="base wire transport",
        client__push="base kernels wire client/cache client/links client/session "
        "client/state client/prefetch",
        client__values="base kernels wire client/shared client/state client/prefetch "
        "client/push",
        client__rounds="base wire client/membership client/shared client/state "
        "client/prefetch client/push",
        client="base kernels wire transport client/cache client/links client/push "
        "client/values client/rounds",
        client__arrivals="base kernels wire client client/push",
        client__geo="base kernels wire client client/cache client/push client/arrivals",
        client__modes="wire client client/rounds client/arrivals",
        client__client="base wire transport client client/modes",
        data="base kernels wire transport",
        bind__gil="",
        backends="base transport/ranks backends/shm backends/foreign_errors bind/gil",
        backends__foreign_errors="base",
        backends__shm="base",
        ops="kernels",
        bind="base kernels wire transport table inference server/server server/options "
        "client client/client client/push client/arrivals client/geo data bind/gil "
        "backends/foreign_errors",
        library="ops",
    ),
}

# Where a file says that it knows another one: its line, and that file.
Edges = Mapping[str, Mapping[str, int]]


def belongs(name: str, place: str) -> bool:
    """Tell whether a file is this module, or is in this folder."""
    return name.rpartition(".")[0] == place or name.startswith(f"{place}/")


def layer_of(name: str) -> str | None:
    """Return the layer of a file: the deepest row of the table that it belongs to."""
    return deepest(name, LAYERS)


def deepest(name: str, places: Iterable[str]) -> str | None:
    """Return the innermost of these places that a file belongs to."""
    found = [place for place in places if belongs(name, place)]
    return max(found, key=len, default=None)


def check_rows(sources: Sources) -> Iterator[Violation]:
    """Check that there is a file in every place that the table names."""
    for place in dict.fromkeys([*LAYERS, *(o for row in LAYERS.values() for o in row)]):
        if not any(belongs(name, place) for name in sources):
            what = f"LAYERS names {place}, where no file is"
            yield Violation("scripts/tidy_rules/layers.py", 1, "layer-row", what)


def python_module(name: str) -> str:
    """Return the dotted name of a file of the package."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the dotted names that one statement may import, the longest first."""
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".") if node.level else []
        parts = parts[: len(parts) - max(node.level - 1, 0)]
        base = ".".join([*parts, *filter(None, [node.module])])
        names = [one.name for one in node.names]
        if base == PACKAGE:
            names = [name for name in names if name not in BUILT]
        yield from (f"{base}.{name}" for name in names)
    elif isinstance(node, ast.Call) and node.args:
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        named = getattr(node.args[0], "value", None)
        if called in LATE and isinstance(named, str):
            if named.removeprefix(f"{PACKAGE}.") not in BUILT:
                yield named


def python_edges(sources: Sources) -> dict[str, dict[str, int]]:
    """Return which file of the package imports which, and in which line first."""
    files = {
        python_module(name): name
        for name in within(sources, PACKAGE)
        if name.endswith(".py")
    }
    edges: dict[str, dict[str, int]] = {}
    for module, name in files.items():
        whole = name.endswith("/__init__.py")
        package = module if whole else module.rpartition(".")[0]
        known = edges.setdefault(name, {})
        for node in syntax.nodes(sources[name]):
            for wanted in imported(node, package):
                # What is no module is a name out of the one that holds it.
                other = files.get(wanted) or files.get(wanted.rpartition(".")[0])
                if other and other != name:
                    line = getattr(node, "lineno", 1)
                    known[other] = min(line, known.get(other, line))
    return edges


INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def native_edges(sources: Sources) -> dict[str, dict[str, int]]:
    """Return which file of csrc includes which, and in which line first."""
    edges: dict[str, dict[str, int]] = {}
    for name in within(sources, "csrc"):
        if not name.endswith((".h", ".cpp")):
            continue
        known = edges.setdefault(name, {})
        code = blank_comments(sources[name])
        for found in INCLUDE.finditer(code):
            beside = PurePosixPath(name).parent / found.group(1)
            for other in (f"csrc/{found.group(1)}", str(beside)):
                if other in sources:
                    line = code.count("\n", 0, found.start(1)) + 1
                    known.setdefault(other, line)
                    break
    return edges


def check_layers(edges: Edges) -> Iterator[Violation]:
    """Check that nothing knows a layer that is not in the row of its own."""
    for name, known in edges.items():
        own = layer_of(name)
        if own is None:
            what = "its folder has no row in LAYERS (scripts/tidy_rules/layers.py)"
            yield Violation(name, 1, "layer", what)
            continue
        allowed = (own, *LAYERS[own])
        for other, line in known.items():
            # A folder with a row of its own is no part of the one around it.
            if deepest(other, {*LAYERS, *allowed}) not in allowed:
                what = f"{own} may not know {other}"
                yield Violation(name, line, "layer", what)


def circles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yield every largest set of nodes that reach each other, if there are several."""

    def reached(start: str) -> set[str]:
        found, open_ = set(), [start]
        while open_:
            fresh = graph.get(open_.pop(), set()) - found
            found |= fresh
            open_ += fresh
        return found

    reach = {node: reached(node) for node in graph}
    done: set[str] = set()
    for node in sorted(graph):
        members = [o for o in sorted(reach[node]) if node in reach.get(o, set())]
        if len(members) > 1 and node not in done:
            done.update(members)
            yield members


def check_circles(edges: Edges) -> Iterator[Violation]:
    """Check that no files know each other, however many are between them."""
    for members in circles({name: set(known) for name, known in edges.items()}):
        first = members[0]
        line = min(edges[first][other] for other in members if other in edges[first])
        what = f"{len(members)} files know each other: {', '.join(members)}"
        yield Violation(first, line, "circle", what)
