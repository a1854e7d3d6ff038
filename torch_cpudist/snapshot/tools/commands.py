# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The commands of ``python -m torch_cpudist.snapshot``.

Exit codes: 0 all is well; 1 something is damaged, missing or different; 2 the command
cannot be carried out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_cpudist.errors import Error, SnapshotCorruptError, SnapshotError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.chain import Found
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.manifest import Manifest
from torch_cpudist.snapshot.reading import Rows, Snapshot
from torch_cpudist.snapshot.tools.compacting import compact
from torch_cpudist.snapshot.tools.comparing import Difference, compare

WELL, DIFFERENT, FAILED = 0, 1, 2
_SHOWN_VALUES = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: what follows the program's name; ``None``: the process's own.

    Returns:
        The exit code.
    """
    chosen = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], tuple[int, Any, list[str]]] = chosen.command
    try:
        code, found, lines = command(chosen)
    except SnapshotCorruptError as error:
        code, found, lines = DIFFERENT, {"damaged": [_damage(error)]}, []
        print(f"damaged: {error}", file=sys.stderr)
    except Error as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    try:
        if chosen.json:
            print(json.dumps(_jsonable(found)))
        elif lines:
            print("\n".join(lines))
        sys.stdout.flush()
    except BrokenPipeError:  # head, less
        sys.stderr.close()
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_cpudist.snapshot",
        description="Looks into snapshots. Nothing of them is changed.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Any, help_text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help_text, description=help_text)
        one.add_argument("--json", action="store_true", help="for programs")
        one.set_defaults(command=command)
        return one

    one = add("list", _list, "Lists the snapshots of a directory, the newest first.")
    one.add_argument("directory", type=Path)
    one = add("verify", _verify, "Reads and checks every byte of snapshots.")
    one.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a snapshot, or a directory of snapshots, all of which are checked",
    )
    one = add("rows", _rows, "Shows rows of a table by their keys.")
    one.add_argument("path", type=Path, help="a snapshot, or a directory: its newest")
    one.add_argument("table")
    one.add_argument("keys", type=int, nargs="+", metavar="KEY")
    one = add(
        "compact", _compact, "Puts a chain of snapshots together to one of all rows."
    )
    one.add_argument("directory", type=Path, help="into which no run saves now")
    one.add_argument(
        "name", nargs="?", help="of the newest one of the chain; default: the newest"
    )
    one = add("diff", _diff, "Compares the parameters of two snapshots.")
    one.add_argument("first", type=Path, help="a snapshot, or a directory: its newest")
    one.add_argument("second", type=Path)
    return parser


def _open(path: Path) -> Snapshot:
    """The snapshot of a path, or the newest one of a directory of snapshots."""
    absolute = path.expanduser().absolute()
    if (absolute / names.MANIFEST).exists():
        return Snapshot(absolute)
    directory = Directory(absolute)
    newest = directory.newest()
    if newest is None:
        raise SnapshotError(f"{path} is no snapshot, and no directory that has one")
    return Snapshot(directory.folder(newest))


def _bytes(manifest: Manifest) -> int:
    sizes = [file.bytes for file in manifest.files]
    return sum(sizes) + sum(trainer.bytes for trainer in manifest.trainers)


def _shown(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _damage(error: SnapshotError) -> dict[str, str]:
    blamed = error if isinstance(error, SnapshotCorruptError) else None
    return {
        "file": blamed.file if blamed else "",
        "table": blamed.table if blamed else "",
        "message": str(error),
    }


def _jsonable(value: Any) -> Any:
    """A value in which numbers that JSON has not are texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(one) for one in value] if isinstance(value, list) else value


# ---- list --------------------------------------------------------------------------


def _describe(found: Found) -> dict[str, Any]:
    manifest = found.manifest
    if manifest is None:
        return {"name": found.name, "damaged": str(found.damage)}
    return {
        "name": found.name,
        **({} if found.damage is None else {"damaged": str(found.damage)}),
        "base": None if manifest.base is None else manifest.base.name,
        "members": list(found.members),
        "number": manifest.number,
        "param_set": manifest.param_set,
        "commit": manifest.commit,
        "time": manifest.time,
        "package": manifest.package,
        "strategy": manifest.strategy,
        "round": manifest.version.round,
        "samples": manifest.version.samples,
        "steps": manifest.version.steps,
        "servers": manifest.servers,
        "trainers": [one.rank for one in manifest.trainers],
        "tables": {
            table.name: sum(file.rows for file in manifest.table_files(index))
            for index, table in enumerate(manifest.tables)
        },
        "dense": [dense.name for dense in manifest.dense],
        "bytes": _bytes(manifest),
    }


def _list(chosen: argparse.Namespace) -> tuple[int, Any, list[str]]:
    directory = Directory(chosen.directory)
    if not directory.path.is_dir():
        raise SnapshotError(f"{chosen.directory} is no directory")
    found = [_describe(one) for one in directory.committed()]
    uncommitted = [
        name
        for name in directory.uncommitted()
        if any(map(names.is_own, directory.files.list(directory.folder(name))))
    ]
    lines = [_line(one) for one in found] or [f"no snapshots in {chosen.directory}"]
    lines += [f"{name}  not committed: no snapshot" for name in uncommitted]
    code = DIFFERENT if any("damaged" in one for one in found) else WELL
    return code, {"snapshots": found, "uncommitted": uncommitted}, lines


def _line(found: dict[str, Any]) -> str:
    if "damaged" in found:
        return f"{found['name']}  damaged: {found['damaged']}"
    rows = sum(found["tables"].values())
    base = f"  on {found['base']}" if found["base"] else ""
    return (
        f"{found['name']}  {found['time']}  {found['strategy']}  "
        f"update {found['round']}, {rows} rows, {_shown(found['bytes'])}, "
        f"{_counted(found['servers'], 'server')}, "
        f"{_counted(len(found['trainers']), 'trainer')}{base}"
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


# ---- verify ------------------------------------------------------------------------


def _verify(chosen: argparse.Namespace) -> tuple[int, Any, list[str]]:
    checked: list[dict[str, Any]] = []
    lines = []
    known: dict[Path, list[dict[str, str]]] = {}  # what is wrong with own files
    for path in chosen.paths:
        absolute = path.expanduser().absolute()
        if (absolute / names.MANIFEST).exists():
            wanted = [absolute]
        else:
            there = Directory(absolute).names()
            if not there:
                raise SnapshotError(f"{path} is no snapshot, and no directory of any")
            wanted = [absolute / name for name in there]
        for folder in wanted:
            damages, size = _verify_one(folder, known)
            name = folder.name
            checked.append(
                {"name": name, "path": str(folder), "bytes": size, "damaged": damages}
            )
            lines += [f"{name}  DAMAGED: {one['message']}" for one in damages]
            if not damages:
                lines.append(f"{name}  {_shown(size)} are as they were written")
    code = DIFFERENT if any(one["damaged"] for one in checked) else WELL
    return code, {"snapshots": checked}, lines


def _verify_one(
    folder: Path, known: dict[Path, list[dict[str, str]]]
) -> tuple[list[dict[str, str]], int]:
    """What is wrong with a snapshot, and all that it is put over; its own bytes."""
    try:
        snapshot = Snapshot(folder)
    except SnapshotError as error:
        return [_damage(error)], 0
    for member in snapshot.members:
        if member.folder not in known:
            known[member.folder] = [_damage(one) for one in member.verify_own()]
    damages = [one for member in snapshot.members for one in known[member.folder]]
    return damages, _bytes(snapshot.manifest)


# ---- rows --------------------------------------------------------------------------


def _rows(chosen: argparse.Namespace) -> tuple[int, Any, list[str]]:
    snapshot = _open(chosen.path)
    table = snapshot.manifest.tables[snapshot.manifest.table_index(chosen.table)]
    outside = [key for key in chosen.keys if not 0 <= key < table.rows]
    if outside and table.open is None:
        raise SnapshotError(
            f"table {table.name!r} has keys 0 to {table.rows - 1}, "
            f"and {outside} are none"
        )
    rows = snapshot.rows(chosen.table, chosen.keys)
    listed = [_row(rows, i, key) for i, key in enumerate(chosen.keys)]
    lines = [f"{snapshot.manifest.name}, table {table.name}, {table.dim} elements"]
    for one in listed:
        if not one["found"]:
            lines.append(f"{one['key']}  no row: it is as the table began")
            continue
        shown = "  ".join(
            f"{name} {_values(one[name])}" for name in rows.columns if name in one
        )
        lines.append(f"{one['key']}  {shown}")
    code = WELL if all(one["found"] for one in listed) else DIFFERENT
    return code, {"name": snapshot.manifest.name, "rows": listed}, lines


def _row(rows: Rows, i: int, key: int) -> dict[str, Any]:
    row: dict[str, Any] = {"key": key, "found": bool(rows.found[i])}
    if row["found"]:
        row |= {name: column[i].tolist() for name, column in rows.columns.items()}
    return row


def _values(values: Any) -> str:
    if not isinstance(values, list):
        return str(values)
    shown = ", ".join(f"{value:.6g}" for value in values[:_SHOWN_VALUES])
    more = f", … {len(values)}" if len(values) > _SHOWN_VALUES else ""
    return f"[{shown}{more}]"


# ---- compact -----------------------------------------------------------------------


def _compact(chosen: argparse.Namespace) -> tuple[int, Any, list[str]]:
    directory = Directory(chosen.directory)
    name = chosen.name or directory.newest()
    if name is None:
        raise SnapshotError(f"no snapshots in {chosen.directory}")
    made = compact(directory, name)
    rows = sum(file.rows for file in made.files)
    lines = [f"{made.name}  {rows} rows, {_shown(_bytes(made))}: what {name} was"]
    return WELL, {"name": made.name, "of": name, "bytes": _bytes(made)}, lines


# ---- diff --------------------------------------------------------------------------


def _diff(chosen: argparse.Namespace) -> tuple[int, Any, list[str]]:
    first, second = _open(chosen.first), _open(chosen.second)
    found = compare(first, second)
    lines = [f"{first.manifest.name} against {second.manifest.name}"]
    lines += [_difference_line(one) for one in found]
    different = [one for one in found if not one.equal]
    if not different:
        lines.append("all parameters are equal")
    code = DIFFERENT if different else WELL
    return (
        code,
        {"parameters": [vars(one) | {"equal": one.equal} for one in found]},
        lines,
    )


def _difference_line(one: Difference) -> str:
    if one.note:
        return f"{one.name}: {one.note}"
    if one.equal:
        return f"{one.name}: equal"
    if one.kind == "dense":
        return (
            f"{one.name}: {one.changed} elements differ, by at most {one.largest:.6g}"
        )
    return (
        f"{one.name}: {one.only_first} rows only in the first, {one.only_second} only "
        f"in the second, {one.changed} differ, weights by at most {one.largest:.6g}"
    )
