# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tests wait with one deadline, which a busy machine reaches, and with no other."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from patience import PATIENCE, PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
# Shorter than this is a time that a test is about, and not one that it waits.
LONG_S = 10.0
# Of events, threads, processes, futures and ranks; what is waited for comes last.
WAITS = {"wait", "join", "result", "results", "exit_codes", "expect"}
WORDS = {"timeout", "timeout_s"}


def own_deadlines(text: str) -> list[int]:
    """The lines that wait for long with a number of their own."""
    found = []
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call):
            continue
        given = [word.value for word in call.keywords if word.arg in WORDS]
        if isinstance(call.func, ast.Attribute) and call.func.attr in WAITS:
            given += call.args[-1:]
        numbers = [one.value for one in given if isinstance(one, ast.Constant)]
        if any(isinstance(n, int | float) and n >= LONG_S for n in numbers):
            found.append(call.lineno)
    return found


@pytest.mark.parametrize(
    "text",
    [
        "event.wait(30)",
        "thread.join(20.0)",
        "ranks.expect(0, 'report', 60.0)",
        "ranks.results(60)",
        "subprocess.run(command, timeout=100)",
        "process.wait(timeout=10)",
        "cpudist.init(timeout_s=60)",
    ],
)
def test_a_deadline_of_its_own_is_found(text: str) -> None:
    assert own_deadlines(f"\n{text}\n") == [2]


@pytest.mark.parametrize(
    "text",
    [
        "event.wait(PATIENCE_S)",
        "looked.wait(0.5)",
        "cpudist.init(timeout_s=0.2)",
        "', '.join(words)",
        "ranks.expect(0, 'report', PATIENCE_S)",
    ],
)
def test_other_times_are_not(text: str) -> None:
    assert own_deadlines(text) == []


def test_tests_wait_with_the_one_deadline() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (lines := own_deadlines(path.read_text()))
    }
    # These are started as programs, without the folders of helpers.
    programs = {"tests/faults/train_groups.py", "tests/faults/return_servers.py"}
    assert found.keys() <= programs, found


def test_a_test_fails_with_its_own_words_before_pytest_ends_it() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    assert options["ini_options"]["timeout"] == 3 * PATIENCE_S
    assert PATIENCE.total_seconds() == PATIENCE_S
