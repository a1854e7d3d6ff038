# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one table of rules and the checks behind it
"""Checks the rules of CONTRIBUTING.md that no formatter knows.

Prints `file:line: rule: what` for every violation and exits 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    *("torch_cpudist", "csrc", "tests", "scripts", "examples", "benchmarks"),
    *("docs", ".ci"),
)
CODE = {".py", ".pyi", ".cpp", ".h", ".sh"}
TEXT = CODE | {".md", ".toml", ".txt"}
# A longer file says in its first lines why: `// long: one class`.
FILE_LINES = 400
MOST_FILE_LINES = 900
LONG = re.compile(r"(?m)^(?:#|//) long: \S")
HEAD_LINES = 5
FUNCTION_LINES = 70
COLUMNS = {".cpp": 100, ".h": 100, ".sh": 100}
LICENSE = (
    "Copyright (c) 2026 The torch_cpudist authors.",
    "SPDX-License-Identifier: BSD-3-Clause",
)
# These two spell the banned words out.
SPELLS_RULES = {"scripts/tidy.py", "tests/scripts/test_tidy.py"}


@dataclass(frozen=True)
class Violation:
    """One broken rule at one line of one file."""

    path: str
    line: int
    rule: str
    what: str

    def __str__(self) -> str:
        """Return the form that editors can jump to."""
        return f"{self.path}:{self.line}: {self.rule}: {self.what}"


@dataclass(frozen=True)
class Banned:
    """A pattern that must not occur, in which files, and why."""

    rule: str
    pattern: re.Pattern[str]
    why: str
    suffixes: frozenset[str]
    folders: tuple[str, ...] = ("",)


def banned(
    rule: str, pattern: str, why: str, suffixes: set[str], *folders: str
) -> Banned:
    """Make one entry of the table below."""
    where = folders or ("",)
    return Banned(rule, re.compile(pattern), why, frozenset(suffixes), where)


PYTHON = {".py", ".pyi"}
NATIVE = {".cpp", ".h"}
RUNTIME = ("torch_cpudist/", "csrc/", "examples/")
BANNED = (
    banned(
        "pickle",
        r"^\s*(?:from|import)\s+(?:cloud)?pickle\b|\bpickle\.(?:loads?|dumps?)\b",
        "bytes from elsewhere must not run code",
        PYTHON,
        *RUNTIME,
    ),
    banned("pickle", r"weights_only\s*=\s*False", "use weights_only=True", PYTHON),
    banned("pickle", r"allow_pickle\s*=\s*True", "use allow_pickle=False", PYTHON),
    banned(
        "pickle",
        r"\b(?:broadcast_object_list|all_gather_object|gather_object"
        r"|scatter_object_list|(?:send|recv)_object_list)\b",
        "object collectives pickle; send tensors",
        PYTHON,
        *RUNTIME,
    ),
    banned(
        "eval",
        r"(?<![\w.])(?:eval|exec)\(",
        "bytes from elsewhere must not run code",
        PYTHON,
        *RUNTIME,
    ),
    banned(
        "bind-all",
        r"\b0\.0\.0\.0\b|\bINADDR_ANY\b",
        "listen on one named address",
        PYTHON | NATIVE,
        *RUNTIME,
    ),
    banned(
        "include",
        r"#\s*include\s*[<\"]torch/extension\.h",
        "costs 80 s and 1.6 GB a file; use the stable ABI",
        NATIVE,
    ),
    banned(
        "include",
        r"#\s*include\s*[<\"](?:torch|ATen|c10|pybind11|Python\.h)",
        "the core and the kernels know nothing of torch or Python",
        NATIVE,
        "csrc/base/",
        "csrc/kernels/",
        "csrc/wire/",
        "csrc/transport/",
        "csrc/table/",
        "csrc/server/",
        "csrc/client/",
        "csrc/data/",
        "csrc/backends/shm/",
        "tests/native/",
    ),
    banned("fast-math", r"-ffast-math\b", "results must be bit-equal", TEXT - {".md"}),
    banned("unfinished", r"\b(?:TODO|FIXME|XXX)\b", "finish it or leave it out", TEXT),
    banned(
        "machine-path",
        r"(?<![\w.$}/])/(?:root|home|work|Users|farm)/\w",
        "a path of one machine",
        TEXT,
    ),
)


def files_in(root: Path) -> Iterator[Path]:
    """Yield every checked file below a root, in a fixed order."""
    yield from sorted(p for p in root.iterdir() if p.is_file() and p.suffix in TEXT)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            generated = "__pycache__" in path.parts or path.name == "_build_info.py"
            named = path.suffix in TEXT or folder == ".ci"
            if path.is_file() and named and not generated:
                yield path


def check_text(name: str, text: str) -> Iterator[Violation]:
    """Check what holds for every text file: blanks, ends, banned words."""
    suffix = Path(name).suffix
    if text and not text.endswith("\n"):
        last = text.count("\n") + 1
        yield Violation(name, last, "end", "the last line has no newline")
    for number, line in enumerate(text.split("\n"), start=1):
        if line != line.rstrip() and suffix != ".md":
            yield Violation(name, number, "blank", "trailing blanks")
        if "\t" in line:
            yield Violation(name, number, "blank", "a tab")
        if len(line) > COLUMNS.get(suffix, len(line)):
            what = f"{len(line)} columns, at most {COLUMNS[suffix]}"
            yield Violation(name, number, "columns", what)
        if name in SPELLS_RULES:
            continue
        for ban in BANNED:
            if suffix in ban.suffixes and name.startswith(ban.folders):
                found = ban.pattern.search(line)
                if found:
                    what = f"{found.group().strip()!r}: {ban.why}"
                    yield Violation(name, number, ban.rule, what)


def check_size(name: str, text: str) -> Iterator[Violation]:
    """Check the length of a source file."""
    lines = text.split("\n")
    explained = LONG.search("\n".join(lines[:HEAD_LINES])) is not None
    most = MOST_FILE_LINES if explained else FILE_LINES
    if len(lines) - 1 > most:
        what = f"{len(lines) - 1} lines, at most {most}"
        if not explained:
            what += ", or a reason (`long: …`) in the first lines"
        yield Violation(name, most + 1, "file-lines", what)


def check_license(name: str, text: str) -> Iterator[Violation]:
    """Check the two comment lines at the top, after a `#!` line."""
    lines = text.split("\n")
    first = 1 if lines[0].startswith("#!") else 0
    mark = "//" if Path(name).suffix in NATIVE else "#"
    for offset, wanted in enumerate(LICENSE):
        number = first + offset
        if number >= len(lines) or lines[number] != f"{mark} {wanted}":
            yield Violation(name, number + 1, "license", f"expected '{mark} {wanted}'")
            return


def function_violation(
    name: str, line: int, function: str, count: int
) -> Iterator[Violation]:
    """Yield a violation if a function has too many lines."""
    if count > FUNCTION_LINES:
        what = f"{function} has {count} lines, at most {FUNCTION_LINES}"
        yield Violation(name, line, "function-lines", what)


def check_python(name: str, text: str) -> Iterator[Violation]:
    """Check the functions of a Python file, and that a test file has tests."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield Violation(name, error.lineno or 1, "syntax", error.msg)
        return
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in functions:
        count = (node.end_lineno or node.lineno) - node.lineno + 1
        yield from function_violation(name, node.lineno, node.name, count)
    is_test = name.startswith("tests/") and Path(name).name.startswith("test_")
    if is_test and not any(node.name.startswith("test_") for node in functions):
        yield Violation(name, 1, "no-tests", "a test file without a test")


def blank_out(text: str) -> str:
    """Replace comments, literals and directives of C++ by blanks, keeping lines."""
    pattern = re.compile(
        r'R"(?P<d>[^(\s]*)\(.*?\)(?P=d)"'  # raw string
        r"|//[^\n]*|/\*.*?\*/"
        r'|"(?:\\.|[^"\\\n])*"'
        r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'"  # not the ' of 1'000
        r"|^[ \t]*#(?:[^\n\\]|\\.|\\\n)*",
        re.DOTALL | re.MULTILINE,
    )
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


SCOPE = re.compile(r"\b(?:namespace|class|struct|union|enum|extern)\b")
INITIALIZER = re.compile(r"\)[^;]*:\s*.*[\w>]$", re.DOTALL)


def native_functions(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield (line, header, lines) of every function body of a C++ file.

    A small scanner of braces: those of namespaces and types are looked into, the first
    brace after a parameter list opens a function, all others are skipped over.
    """
    kinds: list[str] = []
    header, opened, depth_in_function = "", 0, 0
    line = 1
    for character in blank_out(text):
        line += character == "\n"
        if depth_in_function:
            depth_in_function += (character == "{") - (character == "}")
            if depth_in_function == 0:
                yield opened, " ".join(header.split()), line - opened + 1
                header = ""
        elif character == "{":
            if kinds and kinds[-1] == "value":
                kinds.append("value")
            elif "(" in header and INITIALIZER.search(header):
                kinds.append("value")  # a member initialised with braces
            elif SCOPE.search(header.split("(")[0]):
                kinds.append("scope")
                header = ""
            elif "(" in header and not header.rstrip().endswith("="):
                opened, depth_in_function = line, 1
            else:
                kinds.append("value")
        elif character == "}":
            if kinds and kinds.pop() == "scope":
                header = ""
        elif character == ";":
            header = ""
        elif not (kinds and kinds[-1] == "value"):
            header += character


def check_native(name: str, text: str) -> Iterator[Violation]:
    """Check the functions of a C++ file."""
    for line, header, count in native_functions(text):
        found = re.search(r"[\w~:]+(?=\()", header)
        function = found.group() if found else header[:40]
        yield from function_violation(name, line, function, count)


def check_headers(root: Path) -> Iterator[Violation]:
    """Check that every C++ header is included by somebody."""
    sources = [p for p in files_in(root) if p.suffix in NATIVE]
    pattern = re.compile(r'#\s*include\s*"([^"]+)"')
    included = {
        Path(found).name
        for path in sources
        for found in pattern.findall(path.read_text(encoding="utf-8"))
    }
    for path in sources:
        # Those that are precompiled are read by the build.
        read = path.name in included or path.parent.name == "precompiled"
        if path.suffix == ".h" and not read:
            name = path.relative_to(root).as_posix()
            yield Violation(name, 1, "dead-file", "no file includes this header")


# gcc reads the precompiled headers before every source, so it misses no #include.
STANDARD = {
    "algorithm": r"(?:sort|stable_sort|min|max|clamp|copy|copy_n|fill|fill_n|find"
    r"|find_if|all_of|any_of|none_of|equal|lower_bound|upper_bound|max_element)",
    "array": r"array",
    "atomic": r"(?:atomic|atomic_\w+|memory_order\w*)",
    "bit": r"(?:bit_cast|endian|bit_ceil|bit_width|countr_zero|popcount)",
    "chrono": r"chrono",
    "cmath": r"(?:sqrt|isfinite|isnan|pow|ldexp|ceil|floor|fabs)",
    "condition_variable": r"condition_variable",
    "cstdint": r"u?int(?:8|16|32|64)_t",
    "cstring": r"(?:memcpy|memcmp|memset|memmove|strlen|strerror)",
    "deque": r"deque",
    "functional": r"function",
    "limits": r"numeric_limits",
    "map": r"map",
    "memory": r"(?:unique_ptr|shared_ptr|weak_ptr|make_unique|make_shared)",
    "mutex": r"(?:mutex|lock_guard|unique_lock|scoped_lock|once_flag|call_once)",
    "optional": r"(?:optional|nullopt)",
    "set": r"set",
    "span": r"(?:span|as_bytes|as_writable_bytes)",
    "string": r"(?:string|to_string)",
    "string_view": r"string_view",
    "thread": r"(?:thread|this_thread)",
    "utility": r"(?:pair|exchange|swap)",
    "vector": r"vector",
}
USES = {one: re.compile(rf"\bstd::{names}\b") for one, names in STANDARD.items()}
INCLUDE = re.compile(r"^\s*#\s*include\s*([<\"])([^>\"]+)", re.MULTILINE)


def check_includes(root: Path) -> Iterator[Violation]:
    """Check that what is used of the standard library is included, however deep."""
    folders = [root / "csrc", root / "tests" / "native"]
    paths = [p for f in folders for p in sorted(f.rglob("*")) if p.suffix in NATIVE]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    for path, text in texts.items():
        reached, seen = [path], set()
        for one in reached:
            for kind, what in INCLUDE.findall(texts[one]):
                local = [folder / what for folder in (*folders, one.parent)]
                reached += [p for p in local if p in texts and p not in reached]
                seen.add(what if kind == "<" else "")
        code = blank_out(text)
        for header, uses in USES.items():
            found = uses.search(code)
            if found and header not in seen:
                line = code.count("\n", 0, found.start()) + 1
                what = f"{found.group()} is used without #include <{header}>"
                name = path.relative_to(root).as_posix()
                yield Violation(name, line, "includes", what)


CHECKS: dict[str, Callable[[str, str], Iterator[Violation]]] = {
    ".py": check_python,
    ".cpp": check_native,
    ".h": check_native,
}


def check_file(name: str, text: str) -> Iterator[Violation]:
    """Check one file.

    Args:
        name: its path from the root, with forward slashes.
        text: its contents.
    """
    yield from check_text(name, text)
    suffix = Path(name).suffix
    if suffix in CODE or name.startswith(".ci/"):
        yield from check_size(name, text)
        yield from check_license(name, text)
    if suffix in CHECKS:
        yield from CHECKS[suffix](name, text)


def check_tree(root: Path) -> Iterator[Violation]:
    """Check every file below a root."""
    for path in files_in(root):
        name = path.relative_to(root).as_posix()
        yield from check_file(name, path.read_text(encoding="utf-8"))
    yield from check_headers(root)
    yield from check_includes(root)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    violations = list(check_tree(parser.parse_args().root))
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
