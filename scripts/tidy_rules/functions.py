# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How long functions are, in Python and in C++."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tidy_rules import Violation, syntax

FUNCTION_LINES = 70


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
        every = syntax.nodes(text)
    except SyntaxError as error:
        yield Violation(name, error.lineno or 1, "syntax", error.msg)
        return
    functions = [
        node
        for node in every
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in functions:
        count = (node.end_lineno or node.lineno) - node.lineno + 1
        yield from function_violation(name, node.lineno, node.name, count)
    is_test = name.startswith("tests/") and Path(name).name.startswith("test_")
    if is_test and not any(node.name.startswith("test_") for node in functions):
        yield Violation(name, 1, "no-tests", "a test file without a test")


LITERAL = (
    r'R"(?P<d>[^(\s]*)\(.*?\)(?P=d)"'  # raw string
    r"|//[^\n]*|/\*.*?\*/"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'"  # not the ' of 1'000
)
DIRECTIVE = r"|^[ \t]*#(?:[^\n\\]|\\.|\\\n)*"
NO_CODE = re.compile(LITERAL + DIRECTIVE, re.DOTALL | re.MULTILINE)
COMMENT_OR_LITERAL = re.compile(LITERAL, re.DOTALL)


def blanked(found: re.Match[str]) -> str:
    """Return blanks in place of what was found, with its lines."""
    return re.sub(r"[^\n]", " ", found.group())


def blank_out(text: str) -> str:
    """Replace comments, literals and directives of C++ by blanks, keeping lines."""
    return NO_CODE.sub(blanked, text)


def blank_comments(text: str) -> str:
    """Replace the comments of C++ by blanks, keeping everything else."""

    def replaced(found: re.Match[str]) -> str:
        return blanked(found) if found.group().startswith("/") else found.group()

    return COMMENT_OR_LITERAL.sub(replaced, text)


SCOPE = re.compile(r"\b(?:namespace|class|struct|union|enum|extern)\b")
# What the scanner below looks at, and what lies between.
PIECES = re.compile(r"[{};\n]|[^{};\n]+")
INITIALIZER = re.compile(r"\)[^;]*:\s*.*[\w>]$", re.DOTALL)


def native_functions(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield (line, header, lines) of every function body of a C++ file.

    A small scanner of braces: those of namespaces and types are looked into, the first
    brace after a parameter list opens a function, all others are skipped over.
    """
    kinds: list[str] = []
    header, opened, depth_in_function = "", 0, 0
    line = 1
    for piece in PIECES.findall(blank_out(text)):
        line += piece == "\n"
        if depth_in_function:
            depth_in_function += (piece == "{") - (piece == "}")
            if depth_in_function == 0:
                yield opened, " ".join(header.split()), line - opened + 1
                header = ""
        elif piece == "{":
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
        elif piece == "}":
            if kinds and kinds.pop() == "scope":
                header = ""
        elif piece == ";":
            header = ""
        elif not (kinds and kinds[-1] == "value"):
            header += piece


def check_native(name: str, text: str) -> Iterator[Violation]:
    """Check the functions of a C++ file."""
    for line, header, count in native_functions(text):
        found = re.search(r"[\w~:]+(?=\()", header)
        function = found.group() if found else header[:40]
        yield from function_violation(name, line, function, count)
