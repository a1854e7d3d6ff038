# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What both datasets are made of: files, a schema, and how they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from torch_cpudist import _core
from torch_cpudist.data.reading import parquet, remote, sources
from torch_cpudist.data.reading.dealing import Part, cut, deal, mixed_seed
from torch_cpudist.data.reading.schema import Format, Slot, checked_slots, known
from torch_cpudist.data.reading.sharing import Share
from torch_cpudist.errors import (
    BadRecordError,
    ConfigMismatchError,
    DataFileError,
    InvalidArgumentError,
)
from torch_cpudist.settings.fields import whole_number

BadLines = Literal["raise", "skip", "quarantine"]
PathLike = str | os.PathLike[str]
_MOST_THREADS = 256
_MOST_BYTES = 2**40
_MOST_RECORDS = 2**24
_SMALLEST_LINE_BYTES = 1024
_LARGEST_LINE_BYTES = 1 << 30
_SILENCE_S = 600.0  # of a command


class Arguments(TypedDict, total=False):
    """What both datasets take by name; see ``QueueDataset``."""

    format: Format
    batch_size: int
    threads: int | None
    pipe_command: str | None
    command_timeout_s: float | None
    drop_last: bool
    shuffle: bool
    seed: int
    buffer_bytes: int
    bad_lines: BadLines
    quarantine: PathLike | None
    instance_ids: bool
    delimiter: str
    separator: str
    line_limit_bytes: int
    timeout_s: float
    share: Share | None


@dataclass(frozen=True)
class Reading:
    """The arguments of a dataset, checked. See ``QueueDataset`` for what they mean."""

    files: tuple[str, ...]
    slots: tuple[Slot, ...]
    format: Format
    batch_size: int
    threads: int
    pipe_command: str | None
    command_timeout_s: float | None
    drop_last: bool
    shuffle: bool
    seed: int
    buffer_bytes: int
    bad_lines: BadLines
    quarantine: PathLike | None
    instance_ids: bool
    delimiter: str
    separator: str
    line_limit_bytes: int
    timeout_s: float

    def __post_init__(self) -> None:
        """Checks what can be checked without opening a file.

        Raises:
            InvalidArgumentError: names the argument, what was found and what is valid.
        """
        if self.format not in get_args(Format):
            self._refuse("format", known(self.format, get_args(Format)))
        if self.bad_lines not in get_args(BadLines):
            self._refuse("bad_lines", known(self.bad_lines, get_args(BadLines)))
        if (self.quarantine is not None) != (self.bad_lines == "quarantine"):
            self._refuse("quarantine", "a path, with bad_lines='quarantine' only")
        if self.format == "parquet" and self.bad_lines != "raise":
            self._refuse("bad_lines", "'raise': a Parquet file has no lines")
        command = self.pipe_command
        if command is not None and not (isinstance(command, str) and command.strip()):
            self._refuse("pipe_command", "a shell command")
        if command is not None and (far := [*filter(remote.is_remote, self.files)]):
            self._refuse(
                "pipe_command",
                f"None: {far[0]} is of another file system, and a command gets an open "
                "file of this one",
            )
        if self.instance_ids and self.format != "multislot":
            self._refuse("instance_ids", "False: only MultiSlot lines have them")
        if self.instance_ids and any(slot.name == "instance_id" for slot in self.slots):
            self._refuse(
                "instance_ids", "False: a slot has the name 'instance_id', too"
            )
        for field in ("delimiter", "separator"):
            value = getattr(self, field)
            if (
                not isinstance(value, str)
                or len(value.encode()) != 1
                or value in '"\r\n'
            ):
                self._refuse(field, "one character of one byte, no quote or line end")
        if self.delimiter == self.separator:
            self._refuse("separator", "another character than delimiter")
        if not _is_seconds(self.timeout_s):
            self._refuse("timeout_s", "a positive number of seconds")
        if self.command_timeout_s is not None:
            if not _is_seconds(self.command_timeout_s):
                self._refuse("command_timeout_s", "a positive number of seconds")
            if command is None:
                self._refuse("command_timeout_s", "None: there is no pipe_command")
        whole_number("batch_size", self.batch_size, 1, _MOST_RECORDS)
        whole_number("threads", self.threads, 1, _MOST_THREADS)
        whole_number("seed", self.seed, 0, 2**63 - 1)
        whole_number("buffer_bytes", self.buffer_bytes, 1 << 16, _MOST_BYTES)
        whole_number(
            "line_limit_bytes",
            self.line_limit_bytes,
            _SMALLEST_LINE_BYTES,
            _LARGEST_LINE_BYTES,
        )

    def _refuse(self, field: str, expected: str) -> None:
        raise InvalidArgumentError(
            f"{field}={getattr(self, field)!r}, expected {expected}"
        )

    @property
    def silence_s(self) -> float:
        """How long a command may neither write nor end."""
        if self.command_timeout_s is None:
            return max(_SILENCE_S, self.timeout_s)
        return self.command_timeout_s

    @property
    def quarantine_name(self) -> str | None:
        """The file for bad lines."""
        return None if self.quarantine is None else os.fsdecode(self.quarantine)

    def core_schema(self) -> _core.DataSchema:
        """The schema as the reader threads have it."""
        return _core.DataSchema(
            format=self.format,
            slots=[
                (
                    slot.name,
                    "int" if slot.integers else "float",
                    slot.dim or 0,
                    slot.hash_range or 0,
                    slot.missing,
                    slot.used,
                    list(slot.columns or ()),
                    slot.kind == "sparse",
                )
                for slot in self.slots
            ],
            delimiter=self.delimiter,
            separator=self.separator,
            instance_ids=self.instance_ids,
        )

    def settings(self) -> dict[str, Any]:
        """What a saved position must agree with, as JSON can hold it."""
        return {
            "files": list(self.files),
            "format": self.format,
            "slots": [slot.settings() for slot in self.slots],
            "batch_size": self.batch_size,
            "threads": self.threads,
            "pipe_command": self.pipe_command,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "instance_ids": self.instance_ids,
            "delimiter": self.delimiter,
            "separator": self.separator,
        }


def _is_seconds(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < float("inf")  # type: ignore[operator]


def checked_files(files: Iterable[PathLike]) -> tuple[str, ...]:
    """A list of paths as texts.

    Raises:
        InvalidArgumentError: one path instead of a list, a set, one twice, or a name
            that is not UTF-8.
    """
    if isinstance(files, (str, os.PathLike)):
        raise InvalidArgumentError(
            f"files: expected a list of paths, got one path {os.fspath(files)!r}"
        )
    if isinstance(files, (set, frozenset)):
        raise InvalidArgumentError(
            "files: expected a list of paths, got a set, whose order is another one in "
            "every process. Pass sorted(files)."
        )
    names = tuple(os.fsdecode(path) for path in files)
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError(
                f"files: {name!r} is not UTF-8, which names must be that stand in "
                "messages and saved positions. Rename the file, or pass a link to it."
            ) from None
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(f"files: {twice[:3]} more than once")
    return names


def make_reading(
    files: Iterable[PathLike], slots: Iterable[Slot], **rest: Any
) -> Reading:
    """Checks all arguments of a dataset.

    Raises:
        InvalidArgumentError: see ``Reading``, ``checked_files`` and ``checked_slots``.
    """
    if rest["threads"] is None:
        rest["threads"] = default_threads()
    return Reading(files=checked_files(files), slots=checked_slots(slots), **rest)


def default_threads() -> int:
    """Reader threads of a process: half of its cores, 1 at least."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


class Files:
    """The files of a reading as they are now: sizes, kinds and parts.

    Raises:
        DataFileError: one is missing, a folder, or cannot be read.
        BadRecordError: a CSV file has no header.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self.sizes_bytes = [_size_bytes(path) for path in reading.files]
        if reading.format == "csv" and reading.pipe_command is None:
            _check_headers(reading.files, self.sizes_bytes)
        self.compressed: list[str | None] = [None] * len(reading.files)
        if reading.pipe_command is None and reading.format != "parquet":
            self.compressed = [sources.compression(path) for path in reading.files]
        # Python opens what C++ cannot, and then all files: a lane has one kind.
        far = any(map(remote.is_remote, reading.files))
        self.fed = reading.format == "parquet" or far or any(self.compressed)

    def shares(
        self, share: tuple[int, int], epoch: int, *, shuffle: bool
    ) -> list[list[Part]]:
        """The parts of each reader thread of one share.

        Args:
            share: which share, of how many; each has ``threads`` reader threads.
            epoch: of the data; another one is dealt in another order.
            shuffle: whether the order changes at all.
        """
        reading = self._reading
        number, count = share
        seed = mixed_seed(reading.seed, epoch) if shuffle else None
        mine = deal(self._parts(count), count, seed)[number]
        return deal(mine, reading.threads)

    def _parts(self, shares: int) -> list[Part]:
        reading = self._reading
        if reading.format == "parquet" and reading.pipe_command is None:
            return [
                Part(file, group, group + 1, size)
                for file, path in enumerate(reading.files)
                for group, size in enumerate(parquet.row_groups(path))
            ]
        whole = self.fed or reading.pipe_command is not None
        return cut(self.sizes_bytes, shares, whole)


def _check_headers(paths: Sequence[str], sizes_bytes: Sequence[int]) -> None:
    for path, size in zip(paths, sizes_bytes, strict=True):
        if size == 0:
            raise BadRecordError(
                f"{path}:1:1: expected a header with the names of columns, found an "
                "empty file"
            )


def _size_bytes(path: str) -> int:
    if remote.is_remote(path):
        return remote.size_bytes(path)
    try:
        found = Path(path).stat()
        if Path(path).is_dir():
            raise DataFileError(f"{path}: expected a file, found a folder")
        if not Path(path).is_file():  # a pipe would have open() wait for a writer
            raise DataFileError(
                f"{path}: expected a regular file, whose parts can be read in any order"
            )
        with Path(path).open("rb"):
            return found.st_size
    except OSError as error:
        if isinstance(error, DataFileError):
            raise
        raise DataFileError(f"{path}: {error.strerror or error}") from error


def check_state(state: Any, version: int, own: dict[str, Any]) -> None:
    """Checks that a saved position belongs to a dataset like this one.

    Raises:
        ConfigMismatchError: names what differs, with both values.
    """
    found = state.get("version") if isinstance(state, dict) else None
    if found != version or not {"settings", "epoch", "position"} <= state.keys():
        raise ConfigMismatchError(
            f"load_state_dict: expected what state_dict() returned, version {version}, "
            f"found {_short(state)}"
        )
    saved = state["settings"]
    for key, value in own.items():
        if saved.get(key) != value:
            raise ConfigMismatchError(
                f"this position was saved with {key}={_short(saved.get(key))}, this "
                f"dataset has {_short(value)}: positions only fit equal settings"
            )


def _short(value: Any, most: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def all_parts(lanes: Sequence[Sequence[Part]]) -> list[list[tuple[int, int, int]]]:
    """Lanes as the core takes them."""
    return [[(part.file, part.begin, part.end) for part in lane] for lane in lanes]
