# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Makes docs/configuration.md of the settings classes and the ``CPUDIST_*`` variables.

Without arguments it prints the page; with ``--write`` it writes the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from torch_cpudist.launch.environment import Environment
from torch_cpudist.settings import jobs
from torch_cpudist.settings.fields import scalar_fields, variable_of
from torch_cpudist.strategies.registry import SETTINGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
_LARGE = 2**31 - 1


class Row(NamedTuple):
    """What the page says of one field or variable; "-" where there is none."""

    cls: str
    field: str
    kind: str
    unit: str
    default: str
    variable: str
    meaning: str


HEAD = """\
# Configuration

Made by `python scripts/configuration_page.py --write` from the code; a test compares,
and another changes every line of it and looks for the effect.

The environment wins over an argument, an argument over the default. An unknown
`CPUDIST_*` variable, field or value is an error that names the nearest valid one; a
variable of settings that the running strategy does not have is a warning. Wherever a
settings object is taken, a dict of its fields is too. Settings objects are immutable:
`dataclasses.replace` makes a changed copy. What strategies do:
[strategies.md](strategies.md); layouts: [launch.md](launch.md); names of other systems:
[migrating.md](migrating.md).

Fields of `Strategy` are fields of every strategy; `Sharding`, `Server`, `Replicas` and
`Communicator` are arguments of strategies, `Server` of `init()` too. `CPU_NUM`, without
a prefix, is `CPUDIST_REPLICAS_COUNT` where that is not set. What has no class
is of the process: `init()` reads it, and has an argument for it where one is named.

There are no pools of threads for sending, pulling or prefetching on a trainer: one
thread of the core serves the links to all servers, another sends what `Async` and `Geo`
queue, and pulls are answered on the link's thread. `CPUDIST_SEND_THREADS`,
`CPUDIST_PULL_THREADS` and `CPUDIST_PREFETCH_THREADS` are therefore refused by name;
servers have `CPUDIST_SERVER_THREADS`.

An entry says the field and its variable, in parentheses type, unit and default.
"""

OTHERS = """\
## The process

Variables of no settings class: `init()` reads them, and has an argument for some.
"""
COLUMNS = 100

# Variables of no settings class: argument of init(), type, unit, default ("" takes
# Environment's) and meaning.
VARIABLES = {
    "SERVERS": ("servers", "`int`", "ranks", "0: colocated", "dedicated servers"),
    "ROLE": (
        "",
        '`"server"`, `"trainer"`',
        "",
        "-",
        "what all ranks of this torchrun job do; needs `CPUDIST_RENDEZVOUS`. For "
        "single ranks: torchrun's `--role`, or `init(role=)`",
    ),
    "RENDEZVOUS": (
        "",
        "`host:port`",
        "",
        "-",
        "where server 0 is met by trainers' jobs; with a key the same text on all jobs",
    ),
    "TRAINERS": (
        "",
        "`int`, 1 to 65535",
        "trainers",
        "-",
        "trainers, of all jobs together, to wait for at the start",
    ),
    "REJOIN_S": (
        "",
        "`int`, at least 0",
        "s",
        f"{jobs.REJOIN_S} on servers, 0 on trainers",
        "for how long servers of a job of their own wait for trainers: for the "
        "first ones to connect, for a lost one to come back; and trainers under Async "
        "and Geo for lost servers to come back, 0: not at all",
    ),
    "STRATEGY": (
        "",
        "name",
        "",
        "the script's, else `sync`",
        "strategy by name; naming the one that the script has keeps its arguments",
    ),
    "BACKEND": (
        "",
        '`"auto"`, `"gloo"`, `"shm"`, `"ccl"`, `"nccl"`, `"mpi"`',
        "",
        "",
        "collective backend of torch.distributed's default group and of collective "
        "strategies, see backends.md; a named one never falls back",
    ),
    "TRANSPORT": (
        "",
        '`"tcp"`, `"c10d"`',
        "",
        "`tcp`",
        "push and pull: `tcp`, with unix sockets on one host; `c10d`, over send and "
        "recv of `CPUDIST_BACKEND` (`auto`: gloo)",
    ),
    "BIND": (
        "",
        "address or interface",
        "",
        "loopback on one host, else towards `MASTER_ADDR` or the rendezvous",
        "what servers listen on",
    ),
    "PORTS": (
        "",
        "port, or first-last",
        "",
        "any",
        "ports of the servers of a host",
    ),
    "THREADS": (
        "",
        "`int`, 1 to 1024",
        "threads",
        "`OMP_NUM_THREADS`, but for torchrun's 1, else physical cores / ranks on the "
        "host; a world of one keeps torch's, if that is not more; replicas of an "
        "executor share those of the rank",
        "torch threads of a rank, and of each of its replicas",
    ),
    "PIN": (
        "",
        "`bool`",
        "",
        "0",
        "ranks of a host, and replicas of a rank, have cores of their own, of one NUMA "
        "node where possible: "
        "[replicas.md](replicas.md#pinning)",
    ),
    "SIMD": (
        "",
        '`"scalar"`, `"avx2"`, `"avx512"`',
        "",
        "the best of this processor",
        "vector level of the kernels; the bits are equal. Read once per process",
    ),
    "SNAPSHOT_DIR": (
        "",
        "path",
        "",
        "what `opt.resume(path)` is given",
        "directory of snapshots, one for all processes; servers of their own know it "
        "from here alone",
    ),
    "SECRET_FILE": (
        "",
        "path",
        "",
        "-",
        "file with the run's key, a copy for every process: at least 32 bytes, mode "
        "0600 (root's: at most 0640); a newline at its end is none of it. Both ends of "
        "every link prove it: SECURITY.md",
    ),
    "SECRET": (
        "",
        "text",
        "",
        "-",
        "the key itself, where there is no `CPUDIST_SECRET_FILE`; other programs of "
        "the user can read it",
    ),
    "AUTH": (
        "",
        '`"optional"`, `"require"`',
        "",
        "`optional`",
        "`require`: `init()` refuses to start without a key",
    ),
    "LIVENESS_MS": (
        "",
        "`int`, at least 100",
        "ms",
        "",
        "a process silent for so long is lost; heartbeats go out five times as often",
    ),
    "RECONNECT_MS": (
        "",
        "`int`, at least 1",
        "ms",
        "",
        "a process whose connection broke and was not replaced within that is lost, "
        "unless it is known to have ended, and then at once",
    ),
    "ROUND_DEADLINE_MS": (
        "",
        "`int`, at least 1",
        "ms",
        "",
        "longest wait for a live peer",
    ),
    "RPC_DEADLINE_MS": (
        "",
        "`int`, at least 1",
        "ms",
        "",
        "longest wait for an answer of a live server",
    ),
    "RPC_RETRIES": (
        "",
        "`int`, at least 0",
        "sends",
        "",
        "how often one request is sent again because its connection broke before the "
        "answer; then the server counts as lost",
    ),
    "GRACE_S": (
        "",
        "`int`, at least 0",
        "s",
        "",
        "after SIGTERM a rank leaves or has a snapshot saved, and its process ends "
        "within this time: [launch.md](launch.md#sigterm). torchrun kills after 30 s; "
        "0: it ends at once, without a word",
    ),
    "METRICS": (
        "",
        "port, or `address:port`",
        "",
        "-",
        "the first rank of a host shows there what it does, the others on the next "
        "ports, on loopback unless an address is named: [monitoring.md](monitoring.md)",
    ),
    "LOG": (
        "",
        '`"warning"`, `"info"`, `"debug"`',
        "",
        "",
        "`info` adds roles, addresses and threads, `debug` the place of every block "
        "and every step",
    ),
}


def _code(value: object) -> str:
    return f"`{value}`"


def _type(hint: Any, limits: Any) -> str:
    """The type of a field, and what is allowed."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    text = _code(getattr(kinds[0], "__name__", kinds[0]))
    if "type" in limits:
        text = limits["type"]
    elif "choices" in limits:
        text = ", ".join(_code(f'"{choice}"') for choice in limits["choices"])
    elif "least" in limits and limits["most"] >= _LARGE:
        text += f", at least {limits['least']}"
    elif "least" in limits:
        text += f", {limits['least']} to {limits['most']}"
    return text + (", or `None`" if type(None) in get_args(hint) else "")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return _code(f"{field.default_factory.__name__}()")
    return _code(repr(field.default).replace("'", '"'))


def _documented(cls: type) -> tuple[str, dict[str, str]]:
    """The first line of a class's docstring, and what it says of each field."""
    text = (inspect.getdoc(cls) or "").replace("``", "`")
    entries = re.findall(
        r"^    (\w+): (.*?)(?=^    \w+: |\Z)",
        text.partition("Attributes:\n")[2],
        re.MULTILINE | re.DOTALL,
    )
    # The variable has a column of its own.
    says = {
        k: re.sub(r" `CPUDIST_\w+`\.$", "", " ".join(v.split())) for k, v in entries
    }
    return text.split("\n")[0], says


def _wrapped(text: str) -> str:
    """A list entry in the columns of a page; links and code are not cut."""
    lines = textwrap.wrap(
        text,
        COLUMNS,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) + "\n"


def _entry(row: Row) -> str:
    """One field or variable as a list entry."""
    named = [name for name in (row.field, row.variable) if name != "-"]
    unit = f", in {row.unit}" if row.unit not in ("-", "") else ""
    return _wrapped(
        f"{', '.join(named)} ({row.kind}{unit}; default {row.default}): {row.meaning}"
    )


def _rows(cls: type) -> list[Row]:
    """The fields that a class adds to those of its bases."""
    bases = [base for base in cls.__bases__ if dataclasses.is_dataclass(base)]
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    hints, (_, says) = get_type_hints(cls), _documented(cls)
    plain = {field.name for field in scalar_fields(cls)}
    return [
        Row(
            _code(cls.__name__),
            _code(field.name),
            _type(hints[field.name], field.metadata),
            field.metadata.get("unit", "-"),
            _default(field),
            _code(variable_of(cls, field.name)) if field.name in plain else "-",
            says[field.name].rstrip("."),
        )
        for field in dataclasses.fields(cls)
        if field.name not in inherited
    ]


def _process_row(name: str) -> Row:
    """A variable of no settings class."""
    argument, kind, unit, default, meaning = VARIABLES[name]
    return Row(
        "-",
        _code(f"init({argument}=)") if argument else "-",
        kind,
        unit or "-",
        default or _code(getattr(Environment(), name.lower())),
        _code(f"CPUDIST_{name}"),
        meaning,
    )


def rows() -> list[Row]:
    """Every field of every settings class, then the variables without one."""
    found = [row for cls in SETTINGS for row in _rows(cls)]
    return found + [_process_row(name) for name in VARIABLES]


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for cls in SETTINGS:
        entries = "".join(map(_entry, _rows(cls)))
        parts.append(f"## {cls.__name__}\n\n{_documented(cls)[0]}\n\n{entries}")
    others = "".join(_entry(_process_row(name)) for name in VARIABLES)
    return "\n".join([*parts, f"{OTHERS}\n{others}"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")
