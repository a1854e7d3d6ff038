# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m torch_cpudist doctor``: arguments, and what is printed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from torch_cpudist.doctor.echo import Link, answer_all, listening, time_link
from torch_cpudist.doctor.facts import gather
from torch_cpudist.doctor.judging import PROBLEM, Finding, judge
from torch_cpudist.errors import Error
from torch_cpudist.launch.environment import parse

_MARKS = {"good": "ok     ", "hint": "hint   ", "problem": "PROBLEM"}


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"expected address:port, found {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torch_cpudist doctor",
        description="Checks a machine before a job, and says what to set. Exits with 1 "
        "where something is to be mended first.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="facts and findings for programs")
    add(
        "--listen",
        metavar="ADDRESS:PORT",
        type=_address,
        help="answers --peer of other hosts, until it is interrupted",
    )
    add(
        "--peer",
        metavar="ADDRESS:PORT",
        type=_address,
        action="append",
        default=[],
        help="times the link to a host where --listen runs; may be repeated",
    )
    return parser.parse_args(given)


def _print(findings: Sequence[Finding]) -> None:
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        print(f"{_MARKS[finding.level]}  {finding.topic:<{width}}  {finding.text}")
    problems = sum(finding.level == PROBLEM for finding in findings)
    print(f"{problems} to mend first." if problems else "Nothing to mend.")


def main(given: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 1 with a problem, 2 for an error."""
    arguments = _arguments(given)
    try:
        if arguments.listen is not None:
            with listening(*arguments.listen) as server:
                print(f"answers at {':'.join(map(str, arguments.listen))}", flush=True)
                answer_all(server)
            return 0
        told = parse(os.environ)
        peers: dict[str, Link] = {}
        for host, port in arguments.peer:
            peers[f"{host}:{port}"] = time_link(host, port)
        facts = gather(os.environ, told.ports, peers, told.liveness_ms)
    except KeyboardInterrupt:
        return 0
    except Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    findings = judge(facts)
    if arguments.json:
        found = {
            "facts": dataclasses.asdict(facts),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(found, indent=1))
    else:
        _print(findings)
    return int(any(finding.level == PROBLEM for finding in findings))
