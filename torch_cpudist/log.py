# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ``torch_cpudist`` logger: its level, and a handler where there is none."""

from __future__ import annotations

import logging

LEVELS = {"warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
_CORE_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)

logger = logging.getLogger("torch_cpudist")


def setup(level: str, who: str) -> None:
    """Sets the level, and writes to stderr if the root logger has no handler.

    Args:
        level: ``warning``, ``info`` or ``debug``.
        who: role and rank, put before every line.
    """
    if logger.level != LEVELS[level]:  # setting it empties the caches of all loggers
        logger.setLevel(LEVELS[level])
    if logging.getLogger().handlers:
        return
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    formatter = logging.Formatter(f"[{who}] %(levelname)s %(name)s: %(message)s")
    for handler in logger.handlers:
        handler.setFormatter(formatter)


def from_core(level: int, text: str) -> None:
    """Takes a message of the compiled core: level 0 is a warning, 1 info, 2 debug."""
    logger.log(_CORE_LEVELS[level], "%s", text)
