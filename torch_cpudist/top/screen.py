# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Figures of all ranks as tables, by the package rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch_cpudist.errors import BackendUnavailableError
from torch_cpudist.top.cluster import Shown
from torch_cpudist.top.figures import PHASES, WAITS, Figures, Server, Trainer

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise BackendUnavailableError(
        f"python -m torch_cpudist top needs the package rich: {error}. pip install "
        "rich, or this package with its extra 'monitor'."
    ) from error

_LONGEST = 60
# Of a pipe or a file, which have no width.
_COLUMNS = 140
_NONE = "-"
_TRAINERS = (
    *("steps/s", "samples/s", "sent/s", "received/s", "rows/s"),
    *("stale p50", "p99", "retries", "server"),
)
_SERVERS = (
    *("rounds/s", "pushes/s", "sent/s", "received/s", "rows", "tables", "waiting"),
    *("memory", "lost"),
)


def plain(text: str) -> str:
    """What others said, without what would move a terminal's cursor."""
    shown = "".join(one if one.isprintable() else "?" for one in text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


def number(value: float | None) -> str:
    """Three digits and a unit of thousands; of 0 as it is."""
    if value is None:
        return _NONE
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            digits = 0 if value == int(value) and not unit else _digits(value)
            return f"{value:.{digits}f}{unit}"
        value /= 1000
    return f"{value:.3g}P"


def _digits(value: float) -> int:
    return 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0


def _size(value: float | None) -> str:
    return _NONE if value is None else f"{number(value)}B"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.1f}"


def _name(shown: Shown, found: Figures) -> tuple[str, str]:
    who = found.who
    kind = "trainer" if found.trainer is not None else "server"
    return f"{plain(who.get('rank', '?'))} {kind}", plain(str(shown.address))


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("rank", no_wrap=True)
    table.add_column("page", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _trainer(one: Trainer) -> list[str]:
    half, most = one.staleness or (None, None)
    return [
        number(one.steps),
        number(one.samples),
        _size(one.sent),
        _size(one.received),
        number(one.rows),
        number(half) if half != float("inf") else "more",
        number(most) if most != float("inf") else "more",
        number(one.retries),
        "LOST" if one.lost else "there",
    ]


def _second(one: Trainer) -> list[str]:
    phases = [_share(one.phases.get(phase)) for phase in PHASES]
    return phases + [_share(one.waits.get(wait)) for wait in WAITS]


def _server(one: Server) -> list[str]:
    memory = _size(one.memory_bytes)
    if one.cap_bytes:
        memory += f" of {_size(one.cap_bytes)}"
    return [
        number(one.rounds),
        number(one.pushes),
        _size(one.sent),
        _size(one.received),
        number(one.rows),
        _size(one.table_bytes),
        _size(one.pending_bytes),
        memory,
        number(one.lost),
    ]


def _summary(cluster: Sequence[Shown], known: Sequence[Figures]) -> Text:
    trainers = [one.trainer for one in known if one.trainer is not None]
    steps = [one.steps for one in trainers if one.steps is not None]
    samples = [one.samples for one in trainers if one.samples is not None]
    seconds = max((one.seconds for one in known), default=0.0)
    words = [
        f"{len(known)} of {len(cluster)} ranks answer",
        f"{number(sum(steps) if steps else None)} steps/s",
        f"{number(sum(samples) if samples else None)} samples/s",
        f"over {seconds:.1f} s",
    ]
    lost = sum(one.server.lost for one in known if one.server is not None)
    without = sum(one.lost for one in trainers)
    if lost or without:
        words.append(f"LOST: {number(lost)} trainers, servers of {without} trainers")
    return Text(" · ".join(words), style="bold")


def drawn(cluster: Sequence[Shown]) -> Group:
    """One screen.

    Args:
        cluster: what is known of all ranks.
    """
    known = [(one, one.figures) for one in cluster if one.figures is not None]
    tables: list[Table | Text] = [_summary(cluster, [found for _, found in known])]
    silent = [one for one in cluster if one.figures is None]
    if silent:
        table = Table(title="No answer", title_justify="left", box=SIMPLE_HEAD)
        table.add_column("page", no_wrap=True)
        table.add_column("why")
        for one in silent:
            table.add_row(Text(plain(str(one.address))), Text(plain(one.reason)))
        tables.append(table)
    trainers = [(one, f, f.trainer) for one, f in known if f.trainer is not None]
    if trainers:
        table = _table("Trainers", _TRAINERS)
        second = _table(
            "Of a second, %; waiting for …, in step() and in lookups", (*PHASES, *WAITS)
        )
        for one, found, trainer in trainers:
            table.add_row(*map(Text, (*_name(one, found), *_trainer(trainer))))
            second.add_row(*map(Text, (*_name(one, found), *_second(trainer))))
        tables += [table, second]
    servers = [(one, f, f.server) for one, f in known if f.server is not None]
    if servers:
        table = _table("Servers", _SERVERS)
        for one, found, server in servers:
            table.add_row(*map(Text, (*_name(one, found), *_server(server))))
        tables.append(table)
    return Group(*tables)


def console() -> Console:
    """Standard output: a terminal as wide as it is."""
    made = Console()
    return made if made.is_terminal else Console(width=_COLUMNS)


@contextmanager
def drawing() -> Iterator[Callable[[Group], None]]:
    """What shows a screen in the place of the last one; below it, in a pipe."""
    place = console()
    if not place.is_terminal:
        yield place.print
        return
    with Live(console=place, screen=True, auto_refresh=False) as live:

        def show(screen: Group) -> None:
            live.update(screen, refresh=True)

        yield show
