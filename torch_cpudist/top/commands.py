# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m torch_cpudist top``: arguments, and the loop that draws."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from types import ModuleType

from torch_cpudist.errors import Error
from torch_cpudist.top import addresses
from torch_cpudist.top.cluster import Cluster, Shown

_LONGEST_S = 3600.0


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"expected seconds, above 0 and up to {_LONGEST_S:g}, found {text!r}"
        )
    return found


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torch_cpudist top",
        description="Shows what ranks do that run with CPUDIST_METRICS, until Ctrl-C. "
        "Exits with 2 for a wrong argument, with --once with 1 if no rank answers.",
    )
    add = parser.add_argument
    add(
        "addresses",
        metavar="HOST:PORT",
        nargs="+",
        help="pages of ranks; HOST:FIRST-LAST for those of all ranks of a host",
    )
    add(
        "--once",
        action="store_true",
        help="asks twice, --interval apart, prints one screen and ends",
    )
    add(
        "--interval",
        metavar="S",
        type=_seconds,
        default=2.0,
        help="seconds between two rounds of asking (2)",
    )
    add(
        "--timeout",
        metavar="S",
        type=_seconds,
        default=2.0,
        help="seconds that a rank has for its page (2)",
    )
    return parser.parse_args(given)


def _screen() -> ModuleType:
    """What draws.

    Raises:
        BackendUnavailableError: the package rich is not installed.
    """
    return importlib.import_module("torch_cpudist.top.screen")


def _once(cluster: Cluster, interval_s: float) -> int:
    """Prints one screen; returns the exit status."""
    screen = _screen()
    cluster.look()
    time.sleep(interval_s)
    shown = cluster.look()
    if all(one.figures is None for one in shown):
        print(_nobody(shown), file=sys.stderr)
        return 1
    screen.console().print(screen.drawn(shown))
    return 0


def _nobody(shown: Sequence[Shown]) -> str:
    first = shown[0]
    more = f", and {len(shown) - 1} more" if len(shown) > 1 else ""
    return (
        f"No rank answers: {first.address} ({first.reason}){more}. Start the job with "
        "CPUDIST_METRICS=PORT; ranks listen at PORT + local rank, on loopback unless "
        "it names an address."
    )


def _live(cluster: Cluster, interval_s: float) -> None:
    """Draws until it is interrupted."""
    screen = _screen()
    with screen.drawing() as draw:
        while True:
            draw(screen.drawn(cluster.look()))
            time.sleep(interval_s)


def main(given: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 1 without a rank, 2 for an error."""
    arguments = _arguments(given)
    cluster = None
    try:
        found = addresses.read(arguments.addresses)
        _screen()  # before anybody is asked
        cluster = Cluster(found, arguments.timeout)
        if arguments.once:
            return _once(cluster, arguments.interval)
        _live(cluster, arguments.interval)
    except KeyboardInterrupt:
        return 0
    except Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    finally:
        if cluster is not None:
            cluster.close()
    return 0
