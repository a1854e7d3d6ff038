# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``word2vec``: word vectors on GCIDE, ours beside torch, DDP and gensim.

Every row trains on the same text, thinned out alike, for the same epochs. A row of ours
is the example word2vec itself, which any torchrun can start, on several hosts too. With
``--rate`` each trainer is on a host of its own, whose cable passes so much.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib import util
from pathlib import Path
from statistics import median
from typing import Any

from hosts import HostsError, hosts
from report import MISSING, Row, add_ratios

from cases import word2vec_hosts
from cases.cnn import ROOT, Launch, Layout, collect
from torch_cpudist.settings.communicator import Communicator

OURS = ROOT / "examples" / "word2vec" / "word2vec.py"
PEERS = ROOT / "benchmarks" / "peers"
TORCH, GENSIM = PEERS / "word2vec_torch.py", PEERS / "word2vec_gensim.py"
STRATEGIES = ("sync", "half_async", "async", "geo", "allreduce", "reduce")
COMMUNICATOR_FIELDS = {entry.name for entry in fields(Communicator)}
OPTIMIZERS = ("adagrad", "sgd", "sparse_adam")
ROWS = (
    *("gensim1", "gensim2", "torch@sgd", "torch@sparse_adam", "torch", "ddp", "alone"),
    *("sync", "half_async:group=0/1", "async", "geo"),
)
# So much less than the reference's is said. Correlations over 313 pairs differ by a few
# hundredths from seed to seed.
EQUAL_RHO = 0.06
FIGURES = ("words_per_s", "cpu_us_per_word", "bytes_per_word", "rho", "loss")
COLUMNS = {
    "rate": "rate",
    "name": "name",
    "trainers": "trainers",
    "words_per_s": "words/s",
    "words_per_s_min": "min",
    "words_per_s_max": "max",
    "ratio_samples_per_s": "ratio",
    "cpu_us_per_word": "CPU us/word",
    "ratio_cpu_us_per_sample": "ratio",
    "bytes_per_word": "bytes/word",
    "waiting_share": "waiting",
    "rho": "rho",
    "loss": "loss",
    "verified": "verified",
}


def layout_of(name: str, count: int) -> tuple[Layout, str]:
    """Returns how the row ``name`` is run with ``count`` processes, and its optimizer.

    Raises:
        ValueError: there is no such row.
    """
    if match := re.fullmatch(r"gensim([1-9]\d?)", name):
        threads = int(match[1])
        return Layout(GENSIM, f"gensim, {threads} thread(s)", threads=threads), ""
    row, _, optimizer = name.partition("@")
    optimizer = optimizer or OPTIMIZERS[0]
    strategy, *given = row.split(":")
    if optimizer not in OPTIMIZERS or (given and strategy not in STRATEGIES):
        raise _unknown(name)
    if row == "torch":
        return Layout(TORCH, f"torch, {optimizer}"), optimizer
    if row == "ddp":
        about = f"DistributedDataParallel over gloo, {optimizer}"
        return Layout(TORCH, about, trainers=count, torchrun=True), optimizer
    if row == "alone":
        about = f"this package, one process that steps by itself, {optimizer}"
        return Layout(OURS, about, variables={"CPUDIST_STRATEGY": "geo"}), optimizer
    if strategy not in STRATEGIES:
        raise _unknown(name)
    variables = {"CPUDIST_STRATEGY": strategy, **variables_of(name)}
    about = f"this package, {row}, {optimizer}"
    return Layout(
        OURS, about, trainers=count, torchrun=True, variables=variables
    ), optimizer


def variables_of(name: str) -> dict[str, str]:
    """Returns the fields of a row of ours as environment variables.

    Raises:
        ValueError: one has no value.
    """
    strategy, *given = name.partition("@")[0].split(":")
    variables = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals:
            raise _unknown(name)
        # 0+1/2 in a row, because a comma ends a row; 0,1;2 in the variable.
        value = value.replace("+", ",").replace("/", ";")
        section = strategy.replace("_", "")
        if key in COMMUNICATOR_FIELDS:
            section = "communicator"
        variables[f"CPUDIST_{section}_{key}".upper()] = value
    return variables


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"--rows: expected gensimTHREADS, torch, ddp, alone or STRATEGY[:FIELD=VALUE]… "
        f"with {', '.join(STRATEGIES)}, each with or without @OPTIMIZER "
        f"({', '.join(OPTIMIZERS)}); found {name!r}"
    )


def command(
    layout: Layout,
    args: argparse.Namespace,
    results: Path,
    optimizer: str = "",
    rendezvous: Sequence[str] = ("--standalone",),
) -> list[str]:
    """Returns the command line of one launch.

    Args:
        layout: of the row.
        args: of the benchmark.
        results: file that trainer 0 writes.
        optimizer: of the row; empty: the example's own default.
        rendezvous: torchrun's options besides the number of processes, as
            ``--nnodes=2 --node-rank=0 --master-addr=10.0.0.1``; the processes of
            ``layout`` are those of one host.
    """
    start = [sys.executable]
    if layout.torchrun:
        start += ["-m", "torch.distributed.run", *rendezvous]
        start += [f"--nproc-per-node={layout.trainers}"]
    told = ["--epochs", args.epochs, "--results", results]
    told += ["--batch-size", args.batch_words]
    if optimizer:
        told += ["--optimizer", optimizer]
    if args.words:
        told += ["--words", args.words]
    for name in ("data", "wordsim"):
        if (path := getattr(args, name)) is not None:
            told += [f"--{name}", Path(path).resolve()]
    return [*start, str(layout.script), *map(str, told)]


def missing_reason(layout: Layout) -> str | None:
    """Returns why a row cannot run here, or None."""
    if layout.script == GENSIM and util.find_spec("gensim") is None:
        return "gensim is not installed; to have it: pip install gensim==4.4.0"
    return None


def make_row(
    name: str, layout: Layout, args: argparse.Namespace, launches: list[Launch]
) -> Row:
    """Returns the row of one layout: medians over the launches."""
    row: Row = {
        "case": "word2vec",
        "name": name,
        "about": layout.about,
        "trainers": layout.trainers,
        "threads": layout.threads,
        "epochs": args.epochs,
        "batch_words": args.batch_words,
        "words": median(one["words"] for one in launches),
        "launches": len(launches),
        "staleness": [one.get("staleness") for one in launches],
    }
    for figure in FIGURES:
        values = [one[figure] for one in launches if one.get(figure) is not None]
        row[figure] = median(values) if values else None
        row[f"{figure}_min"] = min(values, default=None)
        row[f"{figure}_max"] = max(values, default=None)
    return row


def compare(rows: Iterable[Row], reference: str, verify: bool) -> None:
    """Adds ratios to every row that ran, and whether its vectors are as good."""
    ran = [row for row in rows if MISSING not in row]
    # add_ratios speaks of samples, which are words here.
    for row in ran:
        row["samples_per_s"] = row["words_per_s"]
        row["cpu_us_per_sample"] = row["cpu_us_per_word"]
    add_ratios(ran, reference)
    base = next((row for row in ran if row["name"] == reference), None)
    for row in ran:
        if not verify or base is None or None in (row["rho"], base["rho"]):
            continue
        row["problems"] = []
        if row["rho"] < base["rho"] - EQUAL_RHO:
            row["problems"] = [
                f"rho {row['rho']:.3f}, {reference} has {base['rho']:.3f}: expected "
                f"at most {EQUAL_RHO:g} less"
            ]
        row["verified"] = not row["problems"]


def run(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Returns a row per layout; with ``--rate``, per rate and layout.

    Raises:
        ValueError: unknown rows or rates, or hosts cannot be made here.
    """
    names = args.rows or (word2vec_hosts.ROWS if args.rate else ROWS)
    on_host = 1 if args.rate else args.trainers
    chosen = {name: layout_of(name, on_host) for name in names}
    reference = args.reference or next(iter(chosen))
    if reference not in chosen:
        known = ", ".join(chosen)
        raise ValueError(f"--reference: expected one of {known}; found {reference!r}")
    if args.rate:
        word2vec_hosts.check(chosen, args)
        return [
            row
            for rate in args.rate
            for row in run_between_hosts(rate, chosen, args, reference)
        ]
    optimizers = {id(layout): optimizer for layout, optimizer in chosen.values()}
    missing = {
        name: {"case": "word2vec", "name": name, "failed": False, MISSING: reason}
        for name, (layout, _) in chosen.items()
        if (reason := missing_reason(layout)) is not None
    }
    layouts = {name: one for name, (one, _) in chosen.items() if name not in missing}
    done, absent = collect(
        layouts,
        args,
        lambda layout, args, results: command(
            layout, args, results, optimizers[id(layout)]
        ),
    )
    absent = {**missing, **absent}
    result = [
        absent[name]
        if name in absent
        else make_row(name, layouts[name], args, done[name])
        for name in chosen
    ]
    compare(result, reference, args.verify)
    return result


def run_between_hosts(
    rate: str,
    chosen: dict[str, tuple[Layout, str]],
    args: argparse.Namespace,
    reference: str,
) -> list[Row]:
    """Returns a row per layout whose trainers are behind cables of one rate."""
    try:
        with hosts(args.trainers, rate) as made:
            done, absent = word2vec_hosts.collect(
                chosen,
                args,
                made,
                lambda layout, results, optimizer, rendezvous: command(
                    layout, args, results, optimizer, rendezvous
                ),
            )
    except HostsError as error:
        raise ValueError(f"cannot make hosts here: {error}") from error
    rows = []
    for name, (layout, _) in chosen.items():
        row = absent[name] if name in absent else None
        if row is None:
            row = make_row(name, layout, args, done[name])
            row["trainers"] = args.trainers
            waiting = word2vec_hosts.waiting_share(done[name], args.trainers)
            row["waiting_share"] = waiting
        rows.append({**row, "rate": rate})
    compare(rows, reference, args.verify)
    return rows
