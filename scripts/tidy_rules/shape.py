# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The shape of the house: crowded folders, torn classes, privacy, packed calls."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tidy_rules import (
    NATIVE,
    PYTHON,
    TEXT,
    Sources,
    Violation,
    syntax,
    within,
)
from tidy_rules.functions import blank_out, native_functions

FOLDER_FILES = 25
PACKAGE = "torch_cpudist"


def check_crowding(sources: Sources) -> Iterator[Violation]:
    """Check how many sources are in a folder, its `__init__` aside."""
    crowds: Counter[str] = Counter()
    for name in sorted(sources):
        path = PurePosixPath(name)
        if path.suffix in PYTHON | NATIVE and path.stem != "__init__":
            folder = str(path.parent)
            crowds[folder] += 1
            if crowds[folder] == FOLDER_FILES + 1:
                what = f"more than {FOLDER_FILES} source files in {folder}"
                yield Violation(name, 1, "crowded", what)


def check_twin_tests(sources: Sources) -> Iterator[Violation]:
    """Check that no two files of tests have one name: pytest takes them for one."""
    homes: dict[str, str] = {}
    for name in sorted(within(sources, "tests")):
        path = PurePosixPath(name)
        if path.suffix in PYTHON and path.stem not in ("__init__", "conftest"):
            first = homes.setdefault(path.name, name)
            if first != name:
                what = f"{first} has that name, too: pytest takes the two for one"
                yield Violation(name, 1, "twin-test", what)


# ---- torn classes ------------------------------------------------------------------

MEMBER = re.compile(
    r"\b((?:\w+::)*[A-Z]\w*)::(?:~?\w+|operator\s*(?:\(\s*\)|[^\s\w(]+))\s*\("
)


# What opens, namespaces with their names, and what closes.
BRACE = re.compile(r"\bnamespace\b\s*([\w:]*)\s*\{|[{}]")


def open_namespaces(text: str) -> list[str]:
    """Return, by line, which namespace is open where the line begins."""
    by_line: list[str] = []
    opened: list[str] = []
    for line in blank_out(text).split("\n"):
        by_line.append("::".join(filter(None, opened)))
        for brace in BRACE.finditer(line):
            if brace.group() != "}":
                opened.append(brace.group(1) or "")
            elif opened:
                opened.pop()
    return by_line


def member_of(header: str) -> str | None:
    """Return the class whose member a function is that is defined outside of it."""
    plain = header
    while (fewer := re.sub(r"<[^<>]*>", "", plain)) != plain:
        plain = fewer
    found = MEMBER.search(plain)
    return found.group(1) if found else None


def check_torn_classes(sources: Sources) -> Iterator[Violation]:
    """Check that no class has members in two sources, in whatever folders they are."""
    # Classes of one name in two namespaces are two.
    homes: dict[str, dict[str, tuple[int, str]]] = defaultdict(dict)
    for name in within(sources, "csrc"):
        if name.endswith(".cpp"):
            spaces = open_namespaces(sources[name])
            for line, header, _ in native_functions(sources[name]):
                if owner := member_of(header):
                    whole = f"{spaces[line - 1]}::{owner}"
                    homes[whole].setdefault(name, (line, owner))
    for files in homes.values():
        first = next(iter(files))
        for name, (line, owner) in list(files.items())[1:]:
            what = f"{owner} has members in {first}, too: one class, one file"
            yield Violation(name, line, "torn-class", what)


# ---- privacy -----------------------------------------------------------------------


# What torch gives to those who write modules, optimizers and sparse tensors, and Python
# to those who have named tuples.
OF_OTHERS = {"_apply", "_fields", "_indices", "_nnz", "_parameters", "_values"}
OWN = {"self", "cls"}
LOOKED_AT = (PACKAGE, "benchmarks", "examples", "scripts", "tests")
# They take a name as text, behind what has it; `monkeypatch.setattr` and the like too.
BY_TEXT = {"getattr", "setattr", "delattr", "hasattr", "object"}
# They take it alone or at the end of a dotted one: `setattr("torch_cpudist.a._b", …)`.
BY_PATH = {"setattr", "delattr", "patch", "attrgetter"}


def is_private(name: str) -> bool:
    """Tell names with one underscore in front from those with none or two."""
    marked = name.startswith("_") and not name.startswith("__") and name != "_"
    return marked and name not in OF_OTHERS


def owned_names(text: str) -> Iterator[str]:
    """Yield the private names that a file gives to what it makes."""
    for node in syntax.nodes(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in OWN:
                yield node.attr


def check_privacy(sources: Sources) -> Iterator[Violation]:
    """Check that no package touches what another one has marked as its own.

    Private names of other projects are theirs to defend: only names count that a
    folder of this package gives, and that the folder which uses them does not.
    """
    names = [n for n in within(sources, *LOOKED_AT) if n.endswith(".py")]
    owners: dict[str, set[str]] = defaultdict(set)
    for name in names:
        for given in filter(is_private, owned_names(sources[name])):
            owners[given].add(str(PurePosixPath(name).parent))
    for name in names:
        folder = str(PurePosixPath(name).parent)
        for line, found in reach_ins(sources[name]):
            theirs = {one for one in owners[found] if one.startswith(PACKAGE)}
            if theirs and folder not in owners[found]:
                what = f"{found} is private to {', '.join(sorted(theirs))}"
                yield Violation(name, line, "private", what)


def is_itself(node: ast.AST) -> bool:
    """Tell whether an expression is the object whose method stands there."""
    called = getattr(node, "func", None)
    own = isinstance(node, ast.Name) and node.id in OWN
    return own or getattr(called, "id", "") == "super"


def texts_taken(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what stands where an expression names an attribute of another as text."""
    if isinstance(node, ast.Call) and node.args:
        called = node.func
        name = getattr(called, "attr", getattr(called, "id", ""))
        if name in BY_PATH:
            yield node.args[0]
        if name in BY_TEXT and len(node.args) > 1 and not is_itself(node.args[0]):
            yield node.args[1]
        if isinstance(called, ast.Attribute) and holds_attributes(called.value):
            yield node.args[0]
    elif isinstance(node, ast.Subscript) and holds_attributes(node.value):
        yield node.slice


def holds_attributes(node: ast.AST) -> bool:
    """Tell whether an expression is `other.__dict__` or `vars(other)`."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return not is_itself(node.value)
    if isinstance(node, ast.Call) and node.args and not is_itself(node.args[0]):
        return getattr(node.func, "id", "") == "vars"
    return False


def reach_ins(text: str) -> Iterator[tuple[int, str]]:
    """Yield the private names, with lines, that a file takes of something else."""
    for node in syntax.nodes(text):
        for taken in texts_taken(node):
            value = getattr(taken, "value", None)
            last = value.rpartition(".")[2] if isinstance(value, str) else ""
            if is_private(last):
                yield taken.lineno, last
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not is_itself(node.value):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            # Modules of the package itself, such as _core, are for all of it.
            inner = node.level or (node.module or "").startswith(f"{PACKAGE}.")
            for one in node.names if inner else ():
                if is_private(one.name):
                    yield node.lineno, one.name


# ---- packed calls ------------------------------------------------------------------


def check_packed_calls(name: str, text: str) -> Iterator[Violation]:
    """Check that no call hides how many arguments it passes in `*(a, b)`."""
    try:
        every = syntax.nodes(text)
    except SyntaxError:
        return  # said by the rule of functions
    for node in every:
        if isinstance(node, ast.Call):
            for one in node.args:
                packed = isinstance(one, ast.Starred) and one.value
                if isinstance(packed, ast.Tuple | ast.List):
                    what = "a call with `*(…)` of known length: name the arguments"
                    yield Violation(name, one.lineno, "star-arguments", what)


# ---- what is tracked ---------------------------------------------------------------

KNOWN_SUFFIXES = TEXT | {
    *(".cfg", ".cmake", ".css", ".csv", ".in", ".json", ".jsonl", ".png", ".svg"),
    *(".typed", ".yaml", ".yml"),
}
KNOWN_NAMES = {"LICENSE", ".gitignore", ".clang-format", ".ci/run"}
KNOWN_FOLDERS = (
    "tests/fuzz/corpus/",
    "tests/simulator/mutations/",
    "tests/snapshots/",
)


def tracked(root: Path) -> list[str]:
    """Return what git tracks below a root; nothing where there is no repository."""
    if not (root / ".git").exists():
        return []  # an unpacked source distribution
    command = ["git", "-C", str(root), "ls-files", "-z"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]


def check_tracked(names: list[str]) -> Iterator[Violation]:
    """Check that what is tracked is of a kind that belongs to the project."""
    for name in names:
        known = Path(name).suffix in KNOWN_SUFFIXES or name in KNOWN_NAMES
        if not known and not name.startswith(KNOWN_FOLDERS):
            what = "tracked, but of no kind that the project has"
            yield Violation(name, 1, "unknown-file", what)
