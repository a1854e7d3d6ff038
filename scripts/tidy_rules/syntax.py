# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What Python sources are made of: read once, however many rules look at them."""

from __future__ import annotations

import ast
from functools import cache


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Return every node of a source's tree, outer ones first.

    Raises:
        SyntaxError: it is no Python.
    """
    return tuple(ast.walk(ast.parse(text)))
