# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``pytest --may-skip REASON``: a test skipped for another reason fails the run.

For a run whose point is that what it needs is there. REASON is a regular expression and
may be given several times. A plugin of tests/conftest.py.
"""

from __future__ import annotations

import re

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--may-skip",
        action="append",
        metavar="REASON",
        help="fail where a test is skipped for another reason; may be repeated",
    )


def _others(config: pytest.Config) -> list[str]:
    """What was skipped for a reason that is not allowed, a line each."""
    allowed: list[str] | None = config.getoption("--may-skip")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    # Workers of xdist report to the process that started them.
    if allowed is None or reporter is None or hasattr(config, "workerinput"):
        return []
    found = []
    for report in reporter.stats.get("skipped", []):
        path, line, reason = report.longrepr
        if not any(re.search(one, reason) for one in allowed):
            found.append(f"{report.nodeid or path} ({path}:{line}): {reason}")
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _others(session.config) and session.exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    others = _others(config)
    if others:
        terminalreporter.section("skipped, but not to be skipped here")
        for line in others:
            terminalreporter.line(line)
