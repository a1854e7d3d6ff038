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
from pathlib import Path
from typing import Any, get_args, get_type_hints

from torch_cpudist import config, group_settings
from torch_cpudist.environment import Environment

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
_LARGE = 2**31 - 1

HEAD = """\
# Configuration

Made by `python scripts/configuration_page.py --write` from the code; a test compares.

The environment wins over an argument, an argument over the default. An unknown
`CPUDIST_*` variable is an error of `init()`. Wherever a settings object is taken, a
dict of its fields is too. Settings objects are immutable: `dataclasses.replace` makes
a changed copy. What strategies do: [strategies.md](strategies.md); layouts:
[launch.md](launch.md).

## Settings

Fields of `Strategy` are fields of every strategy.
"""

# Variables of no settings class: default ("" takes Environment's) and meaning.
VARIABLES = {
    "SERVERS": ("0: colocated", "dedicated servers"),
    "ROLE": ("-", "`server` or `trainer`: of all ranks of this torchrun job"),
    "RENDEZVOUS": ("-", "`host:port` at which server 0 is met by trainers' jobs"),
    "TRAINERS": ("-", "trainers, of all jobs together, to wait for at the start"),
    "REJOIN_S": (
        f"{group_settings._REJOIN_S}",
        "seconds for which servers of a job of their own wait for trainers: for the "
        "first ones to connect, for a lost one to come back",
    ),
    "STRATEGY": (
        "the script's, else `sync`",
        "strategy by name; naming the one that the script has keeps its arguments",
    ),
    "BACKEND": ("", "collective backend: `auto` is `gloo`"),
    "TRANSPORT": ("`tcp`", "push and pull: `tcp`, with unix sockets on one host"),
    "BIND": (
        "loopback on one host, else towards `MASTER_ADDR` or the rendezvous",
        "address or interface that servers listen on",
    ),
    "PORTS": ("any", "port, or range of ports, of the servers of a host"),
    "THREADS": ("cores / ranks on the host", "torch threads of a rank, 1 to 1024"),
    "SIMD": (
        "the best of this processor",
        "vector level of the kernels: `scalar`, `avx2`, `avx512`; the bits are equal",
    ),
    "LIVENESS_MS": ("", "a process silent for so long is lost; at least 100"),
    "ROUND_DEADLINE_MS": ("", "longest wait for a live peer"),
    "RPC_DEADLINE_MS": ("", "longest wait for an answer of a live server"),
    "LOG": ("", "`warning`, `info`, `debug`"),
}


def _code(value: object) -> str:
    return f"`{value}`"


def _type(hint: Any, limits: Any) -> str:
    """The type of a field, and what is allowed."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    text = _code(kinds[0].__name__)
    if "type" in limits:
        text = limits["type"]
    elif "choices" in limits:
        text = ", ".join(_code(f'"{choice}"') for choice in limits["choices"])
    elif "least" in limits and limits["most"] >= _LARGE:
        text += f", at least {limits['least']}"
    elif "least" in limits:
        text += f", {limits['least']} to {limits['most']}"
    return text + (", or `None`" if get_args(hint) else "")


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


def _table(*lines: tuple[str, ...]) -> str:
    head, *rows = ["| " + " | ".join(line) + " |\n" for line in lines]
    return "".join(["\n", head, "|---" * len(lines[0]) + "|\n", *rows])


def _section(cls: type) -> str:
    """A class, and the fields that it adds to those of its bases."""
    bases = [base for base in cls.__bases__ if dataclasses.is_dataclass(base)]
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    hints, (first, says) = get_type_hints(cls), _documented(cls)
    plain = {field.name for field in config.scalar_fields(cls)}
    rows = [
        (
            _code(field.name),
            _type(hints[field.name], field.metadata),
            _default(field),
            _code(config.variable_of(cls, field.name)) if field.name in plain else "-",
            says[field.name].rstrip("."),
        )
        for field in dataclasses.fields(cls)
        if field.name not in inherited
    ]
    head = ("field", "type", "default", "variable", "meaning")
    return f"\n### {cls.__name__}\n\n{first}\n" + (_table(head, *rows) if rows else "")


def page() -> str:
    """The whole page."""
    made = Environment()
    rows = [
        (_code(f"CPUDIST_{n}"), default or _code(getattr(made, n.lower())), meaning)
        for n, (default, meaning) in VARIABLES.items()
    ]
    settings = "".join(_section(cls) for cls in config.classes())
    others = _table(("variable", "default", "meaning"), *rows)
    return f"{HEAD}{settings}\n## Other variables\n{others}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")
