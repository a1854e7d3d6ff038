# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Arguments that a function passes on, named where its own are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def passes_on_to(target: Callable[..., Any]) -> Callable[[F], F]:
    """Gives a function the signature that it has with its ``**others`` spelt out.

    ``help()`` and ``inspect.signature`` then name what they are, with defaults; what is
    called stays the function itself.

    Args:
        target: who gets the others, all by name.
    """

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        others = [
            p.replace(kind=p.KEYWORD_ONLY)
            for p in inspect.signature(target).parameters.values()
            if p.name not in own.parameters
        ]
        vars(function)["__signature__"] = own.replace(parameters=[*kept, *others])
        return function

    return decorate
