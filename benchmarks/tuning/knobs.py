# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``tuning``: allocators, the OpenMP runtime and pinning, each with and without.

The model of the case ``ctr``, in two layouts: ``processes``, as many trainers as
``--trainers`` under Sync, one thread each, and ``threads``, a world of one with as many
torch threads as there are cores. Rows of a layout differ in variables of the
environment only; ratios are to its first row, which has none. All rows take turns. A
library that is not installed is said to be missing, with what installs it: ld.so would
go on without it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ctr_data
from cases import ctr
from peers import PeerSpec, strategy_row
from report import MISSING, Row, add_ratios

COLUMNS = {
    "name": "name",
    "trainers": "trainers",
    "threads": "threads",
    "samples_per_s": "samples/s",
    "samples_per_s_min": "min",
    "samples_per_s_max": "max",
    "ratio_samples_per_s": "ratio",
    "cpu_us_per_sample": "CPU us/sample",
    "ratio_cpu_us_per_sample": "ratio",
    "rss_mb": "RSS MB",
}
AS_IT_COMES = "as it comes"
PROBE_DEADLINE_S = 60.0
_PROBE = "print(open('/proc/self/maps').read())"
# What launchers of other packages set beside jemalloc: large pieces in an arena of
# their own, and freed memory is kept.
_JEMALLOC = (
    "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
    "dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
)


class Knob(NamedTuple):
    """What is set, the library that it needs, and what installs that."""

    variables: Mapping[str, str]
    library: str = ""
    install: str = ""


_IOMP = str(Path(sys.prefix) / "lib" / "libiomp5.so")
_WITH_IOMP = (_IOMP, "pip install intel-openmp")
_WITH_JEMALLOC = ("libjemalloc.so.2", "apt install libjemalloc2")
_WITH_TCMALLOC = (
    "libtcmalloc_minimal.so.4",
    "apt install libtcmalloc-minimal4 (or libtcmalloc-minimal4t64)",
)
KNOBS: Mapping[str, Knob] = {
    AS_IT_COMES: Knob({}),
    "jemalloc": Knob({}, *_WITH_JEMALLOC),
    "jemalloc that keeps": Knob({"MALLOC_CONF": _JEMALLOC}, *_WITH_JEMALLOC),
    "tcmalloc": Knob({}, *_WITH_TCMALLOC),
    "iomp": Knob({}, *_WITH_IOMP),
    "iomp, blocktime 1": Knob({"KMP_BLOCKTIME": "1"}, *_WITH_IOMP),
    "passive": Knob({"OMP_WAIT_POLICY": "passive"}),
    "pinned": Knob({"CPUDIST_PIN": "1"}),
}
# One thread of a process has nobody to wait for in OpenMP, and one process alone no
# core to leave to another.
LAYOUTS = {
    "processes": (
        *(AS_IT_COMES, "jemalloc", "jemalloc that keeps", "tcmalloc"),
        "pinned",
    ),
    "threads": (
        *(AS_IT_COMES, "jemalloc", "jemalloc that keeps", "tcmalloc"),
        *("iomp", "iomp, blocktime 1", "passive"),
    ),
}


def preloaded(library: str) -> bool:
    """Tells whether ld.so finds a library that is to be loaded before all others."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env={**os.environ, "LD_PRELOAD": library},
        capture_output=True,
        text=True,
        timeout=PROBE_DEADLINE_S,
        check=True,
    )
    return Path(library).name.partition(".so")[0] in done.stdout


def missing(knob: Knob) -> str | None:
    """Returns why a knob cannot be turned here; ``None`` if it can."""
    if not knob.library or preloaded(knob.library):
        return None
    return f"{Path(knob.library).name} is not there; to have it: {knob.install}"


def _spec(layout: str, knob: Knob, strategy: str) -> PeerSpec:
    spec = strategy_row(strategy)
    if layout == "threads":
        cores = len(os.sched_getaffinity(0))
        spec = replace(spec, launcher="plain", trainers=1, threads=cores, servers=False)
    variables = dict(knob.variables)
    if knob.library:
        variables["LD_PRELOAD"] = knob.library
    return replace(spec, variables=tuple(variables.items()))


def select(args: argparse.Namespace) -> dict[str, tuple[str, PeerSpec | str]]:
    """Returns rows by name: their layout, and how they run or why they cannot.

    Raises:
        ValueError: a row is not known, or there is not one strategy.
    """
    if len(args.strategies) != 1:
        raise ValueError(f"--strategies: expected one, found {args.strategies}")
    names = {f"{layout}: {knob}": (layout, knob) for layout in LAYOUTS
             for knob in LAYOUTS[layout]}  # fmt: skip
    for name in args.rows:
        if name not in names:
            known = "; ".join(names)
            raise ValueError(f"--rows: expected some of {known}; found {name!r}")
    found: dict[str, tuple[str, PeerSpec | str]] = {}
    for name, (layout, knob) in names.items():
        if args.rows and name not in args.rows and knob != AS_IT_COMES:
            continue
        if args.rows and not any(row.startswith(f"{layout}:") for row in args.rows):
            continue
        reason = missing(KNOBS[knob])
        spec = _spec(layout, KNOBS[knob], args.strategies[0])
        found[name] = (layout, reason or spec)
    return found


def run(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Returns a row per layout and knob.

    Raises:
        ValueError: a row is not known, or one that can run has failed.
    """
    rows = select(args)
    runs = {
        name: spec for name, (_, spec) in rows.items() if isinstance(spec, PeerSpec)
    }
    data = ctr_data.prepare(ctr_data.CtrSpec(), ctr.CACHE)
    done, absent = ctr.collect(runs, args, data)
    if absent:
        name, reason = next(iter(absent.items()))
        raise ValueError(f"{name}: {reason}")
    result: list[Row] = []
    for name, (_, spec) in rows.items():
        if isinstance(spec, str):
            result.append({"case": "tuning", "name": name, MISSING: spec})
            continue
        row = ctr.make_row(name, spec, args, done[name])
        result.append({**row, "case": "tuning", "threads": spec.threads})
    for layout in LAYOUTS:
        own = [row for row in result if row["name"].startswith(f"{layout}:")]
        add_ratios(own, f"{layout}: {AS_IT_COMES}")
    return result
