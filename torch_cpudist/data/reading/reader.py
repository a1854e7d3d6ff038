# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One pass over data: an iterator of batches over reader threads of the core."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch_cpudist import _core
from torch_cpudist.data.reading import sources
from torch_cpudist.data.reading.commands import Unwanted, run_command
from torch_cpudist.data.reading.dealing import STREAM_END, Part
from torch_cpudist.data.reading.feeding import Fed, Feeder, Open, Piece
from torch_cpudist.data.reading.leaving import leaving
from torch_cpudist.data.reading.parquet import ParquetReader, source_of
from torch_cpudist.data.reading.settings import Files, Reading, all_parts
from torch_cpudist.data.reading.tensors import Batch, BatchMaker
from torch_cpudist.errors import (
    ClosedError,
    DataFileError,
    InvalidArgumentError,
    OperationTimeoutError,
)
from torch_cpudist.log import logger

_REMEMBERED = 64


class Noticing(Protocol):
    """Has something to be logged."""

    def notices(self) -> list[str]:
        """What was not said yet: the first bad line of each file."""

    def command_notices(self) -> list[str]:
        """What was not said yet: which commands are slow."""


def log_notices(core: Noticing) -> None:
    """Logs the first bad line of each file, and slow commands, once."""
    for notice in core.notices():
        logger.warning("bad lines are left out, the first is %s", notice)
    for notice in core.command_notices():
        logger.warning("%s", notice)


@contextmanager
def raising_failures_of(feeder: Feeder | None) -> Iterator[None]:
    """Raises what ended a feeding thread, where the core tells that one ended."""
    try:
        yield
    except DataFileError:
        failure = feeder.failure() if feeder is not None else None
        if failure is None:
            raise
        raise failure from None


class Core(Noticing, Protocol):
    """What the core's readers of files and of memory have in common."""

    def next(
        self, timeout_s: float, tell: Callable[[], None] | None = None, /
    ) -> _core.DataBatch | None:
        """The next batch, ``None`` at the end; ``tell`` is called for notices."""

    def position(self) -> object:
        """Where it goes on, as ``position=`` of another one takes it."""

    def stop(self) -> None:
        """Ends its threads. Idempotent."""


class BatchIterator(Iterator[Batch]):
    """Batches of a core reader, in its order. Several threads may call ``next``.

    Args:
        core: the reader; stopped by ``close`` and at the end.
        maker: of the tensors.
        timeout_s: how long a batch may take.
        names: of the files, for the log.
        counts: bad lines so far, by number of the file; nothing where records are in
            memory, whose store has the count.
        feeder: threads that feed the reader.
    """

    def __init__(
        self,
        core: Core,
        maker: BatchMaker,
        timeout_s: float,
        names: Sequence[str],
        counts: Callable[[], dict[int, int]],
        feeder: Feeder | None,
    ) -> None:
        self._core: Core | None = core  # None once it was closed
        self._maker = maker
        self._timeout_s = timeout_s
        self._names = names
        self._counts = counts
        self._feeder = feeder
        self._process = os.getpid()
        self._turn = threading.Lock()  # positions are noted in the order of batches
        self._mutex = threading.Lock()
        self._ended = False
        self._bad_lines: dict[int, int] = {}  # when it was closed
        self._positions: deque[Any] = deque([core.position()], maxlen=_REMEMBERED + 1)
        leaving.follow(self)

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            BadRecordError: a bad line, with ``bad_lines="raise"``.
            DataFileError: a file cannot be read to its end, or its command failed.
            OperationTimeoutError: it took longer than ``timeout_s``.
            ClosedError: the iterator was closed.
        """
        if not self._turn.acquire(timeout=self._timeout_s):
            raise OperationTimeoutError(
                f"no batch within {self._timeout_s:g} s: other threads wait for theirs"
            )
        try:
            made = self._take()
        finally:
            self._turn.release()
        return self._maker.make(made)

    def _take(self) -> _core.DataBatch:
        leaving.reads()
        try:
            return self._taken()
        except BaseException:
            leaving.has_read()
            raise

    def _taken(self) -> _core.DataBatch:
        if self._ended:
            raise StopIteration
        core = self._core
        try:
            if core is None:
                raise ClosedError("closed")
            with raising_failures_of(self._feeder):
                made = core.next(self._timeout_s, functools.partial(log_notices, core))
        except ClosedError:
            leaving.stay()
            raise ClosedError(
                "this iteration was closed: by close(), or because another one over "
                "the same dataset or a shuffle began, which end those before. For "
                "several at a time make several datasets."
            ) from None
        log_notices(core)
        if made is None:
            self.close()
            self._ended = True
            raise StopIteration
        with self._mutex:
            self._positions.append(made.position)
        return made

    @property
    def ended(self) -> bool:
        """Whether the end of the epoch was reached."""
        return self._ended

    def position(self, unused: int = 0) -> Any:
        """Where the data go on after the batches handed out, less the last ``unused``.

        Raises:
            InvalidArgumentError: more than are remembered.
        """
        with self._mutex:
            if not 0 <= unused < len(self._positions):
                raise InvalidArgumentError(
                    f"state_dict(unused={unused}): expected 0 to "
                    f"{len(self._positions) - 1}, of the batches handed out"
                )
            return self._positions[-1 - unused]

    def bad_lines(self) -> dict[str, int]:
        """Bad lines so far, by file."""
        counts = self._bad_lines if self._core is None else self._counts()
        return {self._names[file]: count for file, count in counts.items()}

    def close(self) -> None:
        """Ends the reader threads and lets go of records. Batches handed out stay."""
        if os.getpid() != self._process:
            return  # a fork has the parent's object, and none of its threads
        core = self._core
        if core is None:
            return
        core.stop()
        if self._feeder is not None:
            self._feeder.join()
        self._bad_lines = self._counts()
        self._core = None

    def end_at_exit(self) -> None:
        """Ends the threads; those that wait for a batch are told that it is closed."""
        self.close()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and getattr(self, "_process", None) == os.getpid():
            core.stop()


def open_reader(
    reading: Reading,
    files: Files,
    lanes: list[list[Part]],
    window: tuple[int, int] | None,
    position: Any,
) -> BatchIterator:
    """Starts reading.

    Args:
        reading: what is read, and how.
        files: its files.
        lanes: the parts of each reader thread.
        window: seed and records of the windows in which records are permuted.
        position: where to begin; default: at the beginning.
    """
    core = _core.DataReader(
        reading.core_schema(),
        files=list(reading.files),
        lanes=all_parts(lanes),
        batch_size=reading.batch_size,
        drop_last=reading.drop_last,
        buffer_bytes=reading.buffer_bytes,
        line_limit_bytes=reading.line_limit_bytes,
        command=reading.pipe_command if not files.fed else None,
        command_timeout_s=reading.silence_s,
        fed=files.fed,
        policy=reading.bad_lines,
        quarantine=reading.quarantine_name,
        seed=None if window is None else window[0],
        window_records=0 if window is None else window[1],
        position=position,
    )
    feeder = None
    if files.fed:
        begin: Any = core.position()
        first = [lane[0] for lane in begin[0]]
        feeder = Feeder(core, lanes, first, opener(reading, files))
    maker = BatchMaker(reading.slots)
    names, counts = reading.files, core.bad_lines
    return BatchIterator(core, maker, reading.timeout_s, names, counts, feeder)


def opener(reading: Reading, files: Files) -> Open:
    """How the parts of files that Python opens become pieces to feed."""
    if reading.format == "parquet":
        return functools.partial(_parquet_pieces, reading, ParquetReader(reading.slots))
    return functools.partial(_byte_pieces, reading, files)


def _byte_pieces(
    reading: Reading, files: Files, part: Part, unwanted: Unwanted
) -> Iterator[Piece]:
    kind = files.compressed[part.file]
    path = reading.files[part.file]
    pieces = sources.plain(path) if kind is None else sources.decompressed(path, kind)
    for data in pieces:
        if unwanted.is_set():
            return

        def feed(fed: Fed, lane: int, data: bytes = data) -> bool:
            return fed.feed(lane, data)

        yield feed


def _parquet_pieces(
    reading: Reading, reader: ParquetReader, part: Part, unwanted: Unwanted
) -> Iterator[Piece]:
    path = reading.files[part.file]
    if reading.pipe_command is None:
        groups = [*range(part.begin, part.end)] if part.end != STREAM_END else None
        with source_of(path) as source:
            yield from _column_pieces(reader.read(source, path, groups))
        return
    # Parquet is read from its end, which a pipe does not have yet.
    with tempfile.TemporaryFile() as spool:
        run_command(reading.pipe_command, path, spool, unwanted, reading.silence_s)
        yield from _column_pieces(reader.read(spool, path, None))


def _column_pieces(found: Iterator[tuple[int, Any]]) -> Iterator[Piece]:
    for records, columns in found:

        def feed(
            fed: Fed, lane: int, records: int = records, columns: Any = columns
        ) -> bool:
            return fed.feed_columns(lane, records, columns)

        yield feed
