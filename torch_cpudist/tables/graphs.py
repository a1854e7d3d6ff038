# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Uses of a table's weight that torch.compile comes upon.

Imported while it compiles, not before: these decorators import the whole compiler,
which takes a process longer than torch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def is_true(question: Callable[[Any], bool], about: Any) -> bool:
    """Asks a question whose answer never changes."""
    return question(about)


@torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
    reason="the weight of a table is read, whose rows are on servers. Look rows up "
    "through its module, or read the weight outside of compiled code."
)
def outside(call: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function outside of graphs."""
    return call(*arguments)
