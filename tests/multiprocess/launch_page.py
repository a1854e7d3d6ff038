# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads docs/launch.md: the script, the command lines, the notebook's cells."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from patience import PATIENCE_S

PAGE = Path(__file__).resolve().parents[2] / "docs" / "launch.md"

_BLOCK = re.compile(r"<!-- (.+?) -->\n```\w+\n(.*?)```", re.DOTALL)
_RUN = re.compile(r"run: ([\w-]+); trainers (\d+), servers (\d+)(; any order)?")


@dataclass(frozen=True)
class Example:
    """Command lines that are started together, and what must come of them.

    ``in_rounds``: every trainer ends after the same updates.
    """

    name: str
    trainers: int
    servers: int
    in_rounds: bool
    commands: tuple[str, ...]


def _blocks():
    return _BLOCK.findall(PAGE.read_text())


def script():
    """The page's train.py."""
    (text,) = [body for tag, body in _blocks() if tag == "file: train.py"]
    return text


def cells():
    """The page's notebook cells."""
    return [body for tag, body in _blocks() if tag == "cell"]


def examples():
    """All examples, by name."""
    found = {}
    for tag, body in _blocks():
        match = _RUN.fullmatch(tag)
        if match:
            name, trainers, servers, any_order = match.groups()
            lines = body.replace("\\\n", " ").strip().splitlines()
            commands = tuple(line for line in lines if not line.startswith("#"))
            found[name] = Example(
                name, int(trainers), int(servers), any_order is None, commands
            )
    return found


_LINE = re.compile(
    r"trainer (\d+) of (\d+), servers (\d+), step (\d+), weights (-?[\d.]+)"
)


def check_outcome(example, programs):
    """Every program ends well, every trainer reports; in rounds the same weights."""
    for program in programs:
        status = program.wait(PATIENCE_S)
        assert status == 0, program.text()
    text = "\n".join(program.text() for program in programs)
    reports = _LINE.findall(text)
    assert sorted(int(r[0]) for r in reports) == list(range(example.trainers)), text
    assert {(int(r[1]), int(r[2])) for r in reports} == {
        (example.trainers, example.servers)
    }, text
    if example.in_rounds:
        assert {int(r[3]) for r in reports} == {20}, text
        assert len({r[4] for r in reports}) == 1, text
