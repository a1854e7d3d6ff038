# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Readers and stores of data in the compiled core; part of ``_core``.

Lanes are threads of the core, each with a list of splits ``(file, begin, end)`` in
order: of a file, the lines that start in bytes ``[begin, end)``; of a command's output
and of what is fed, everything. No lane ever takes the GIL. Calls that wait release it;
in the main thread they can be interrupted by signals.

Errors: ``BadRecordError`` and ``DataFileError`` come in the place of the batch that
could not be made, and again from then on. ``ClosedError`` after ``stop``,
``ForkedProcessError`` in a forked child.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from torch_cpudist._core import Secret

_Bytes = bytes | bytearray | memoryview
# Name, "int" or "float", dim (0: any number), hash_range (0: none), missing, used,
# columns, sparse.
_Slot = tuple[str, str, int, int, float, bool, list[str], bool]
_Lanes = Sequence[Sequence[tuple[int, int, int]]]
# Values of a slot, int64 or float32; offsets of a slot of any number.
_Column = tuple[
    npt.NDArray[np.int64] | npt.NDArray[np.float32], npt.NDArray[np.int64] | None
]

class DataSchema:
    """What lines hold. Keeps the memory of batches from one reader to the next.

    Args:
        format: "multislot", "criteo", "csv", or "parquet": columns that are fed, hashed
            and without missing values.
    """

    def __init__(
        self,
        *,
        format: str,
        slots: Sequence[_Slot],
        delimiter: str = ",",
        separator: str = "|",
        instance_ids: bool = False,
    ) -> None: ...

class DataBatch:
    """A batch. Arrays are views of its memory, which is used again after the last."""

    @property
    def records(self) -> int: ...
    @property
    def ints(self) -> npt.NDArray[np.int64]:
        """Per used integer slot its values, and offsets if it has any number."""

    @property
    def floats(self) -> npt.NDArray[np.float32]:
        """Per used float slot its values."""

    @property
    def sections(self) -> list[int]:
        """Per used slot how many values it has."""

    @property
    def instance_ids(self) -> npt.NDArray[np.int64] | None: ...
    @property
    def position(self) -> list[object] | int:
        """Of the reader after this batch; of a store, the records up to its end."""

class _Fed:
    def feed(self, lane: int, bytes: _Bytes) -> bool:
        """Bytes of the lane's present file. Waits for room; False: nothing reads them.

        One thread per lane at a time; this holds for all that feeds.
        """

    def feed_columns(self, lane: int, records: int, columns: list[_Column]) -> bool:
        """Records of the lane's present file, as one entry per used slot."""

    def feed_end_of_file(self, lane: int) -> bool: ...
    def feed_failure(self, lane: int, message: str) -> bool:
        """Raises DataFileError in this place of the data."""

    def bad_lines(self) -> dict[int, int]:
        """Bad lines that were left out, by the number of the file."""

    def notices(self) -> list[str]:
        """The first bad line of each file, once."""

    def command_notices(self) -> list[str]:
        """Commands that are slow, each once."""

class DataReader(_Fed):
    """A stream of batches. Batch k is of lane k mod lanes, what has ended left out.

    Args:
        command: a shell command that every file goes through.
        command_timeout_s: how long it may neither write nor end.
        fed: lanes take what Python feeds them.
        policy: "raise", "skip" or "quarantine".
        seed: permutes windows of `window_records` records per lane.
        position: of a batch, or of a reader with the same arguments.
    """

    def __init__(
        self,
        schema: DataSchema,
        *,
        files: Sequence[str],
        lanes: _Lanes,
        batch_size: int,
        drop_last: bool = False,
        buffer_bytes: int = ...,
        line_limit_bytes: int = ...,
        command: str | None = None,
        command_timeout_s: float = 600.0,
        fed: bool = False,
        policy: str = "raise",
        quarantine: str | None = None,
        seed: int | None = None,
        window_records: int = 0,
        position: Sequence[object] | None = None,
    ) -> None: ...
    def next(
        self, timeout_s: float, tell: Callable[[], None] | None = None
    ) -> DataBatch | None:
        """The next batch, None at the end; OperationTimeoutError names what is slow.

        ``tell`` is called while it waits, once there are command_notices().
        """

    def position(self) -> list[object]:
        """After the last batch: [lanes, turn, tail batches].

        Of each lane [split, offset, window, batches of the window]. A fed lane begins
        with the file of its split.
        """

    def stop(self) -> None:
        """Ends all threads, whatever they wait for. Idempotent."""

class DataStoreReader:
    """One pass over a store, in the order that it had when the pass began."""

    def next(
        self, timeout_s: float, tell: Callable[[], None] | None = None
    ) -> DataBatch | None: ...
    def position(self) -> int:
        """Records before the next batch."""

    def notices(self) -> list[str]: ...
    def command_notices(self) -> list[str]: ...
    def stop(self) -> None: ...

class DataStore(_Fed):
    """Records in memory, in the order of files and lines, or permuted."""

    def __init__(self, schema: DataSchema) -> None: ...
    def load(
        self,
        *,
        files: Sequence[str],
        lanes: _Lanes,
        buffer_bytes: int = ...,
        line_limit_bytes: int = ...,
        command: str | None = None,
        command_timeout_s: float = 600.0,
        fed: bool = False,
        policy: str = "raise",
        quarantine: str | None = None,
    ) -> None:
        """Begins to read, into an empty store, with a thread per lane."""

    def wait(self, timeout_s: float, tell: Callable[[], None] | None = None) -> None:
        """Until all is read. OperationTimeoutError: stood still for timeout_s.

        ``tell`` is called while it waits, once there are command_notices().
        """

    def progress(self) -> dict[str, int]:
        """Of the load: records, size_bytes, parts_done, parts."""

    @property
    def records(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def permute(self, seed: int) -> None:
        """Orders the records by the seed alone. Readers that there are keep theirs."""

    def merge_by_instance(self, size: int) -> int:
        """One record per instance id; returns how many records were left out.

        With a size other than 0, ids of another number of records are left out.
        """

    def exchange_slots(self, used_slots: Sequence[int], seed: int) -> None:
        """Gives records the values of others there, until restore_slots()."""

    def restore_slots(self) -> None: ...
    @property
    def slots_exchanged(self) -> bool: ...
    def reader(
        self,
        *,
        batch_size: int,
        drop_last: bool = False,
        begin_record: int = 0,
        threads: int = 1,
        buffer_bytes: int = ...,
        seed: int | None = None,
    ) -> DataStoreReader:
        """One pass, with a seed in the order that permute(seed) would give."""

    def checksum(self) -> tuple[int, int]:
        """Sum (modulo 2^64) and xor of a hash of each record: of any order the same."""

    def release(self) -> None:
        """Ends a load and frees the records, those of readers when they end."""

class DataCommand:
    """A shell command on a file, run in the thread that calls ``run``."""

    def __init__(self, command: str, path: str, *, timeout_s: float) -> None: ...
    def run(self, descriptor: int, tell: Callable[[str], object]) -> None:
        """Writes its output to a file; ``tell`` gets a text when it is slow.

        Raises DataFileError as readers do, ClosedError after ``stop``.
        """

    def stop(self) -> None:
        """Ends it and what it started, now or when it is run. Any thread."""

def hash_texts(
    offsets: npt.NDArray[np.int64], texts: _Bytes, slot_index: int, hash_range: int
) -> npt.NDArray[np.int64]:
    """Ids in [1, hash_range) of texts[offsets[i]:offsets[i + 1]], as readers hash text.

    ``slot_index`` is the position of the slot among all of its schema.
    """

class DataShuffle:
    """One global shuffle of a store. Listen, tell all trainers the addresses, run."""

    def __init__(
        self,
        schema: DataSchema,
        *,
        rank: int,
        trainers: int,
        run_id: int,
        epoch: int,
        host: str,
        connect_deadline_ms: int,
        liveness_ms: int,
        round_deadline_ms: int,
        secret: Secret | None = None,
    ) -> None: ...
    def take_refusals(self, timeout_s: float) -> tuple[list[tuple[str, str]], int]:
        """As of ``Server``."""

    def listen(self, *, bind: str, port_first: int, port_last: int) -> list[str]:
        """Addresses for other trainers, best first."""

    def run(
        self,
        store: DataStore,
        *,
        addresses: Sequence[Sequence[str]],
        seed: int,
        by: str,
        used_slot: int = 0,
    ) -> None:
        """Gives all records away and takes those that come; once.

        By "record", by "instance" or by the first id of a used "slot". The store is
        empty if it raises PeerLostError, OperationTimeoutError, ProtocolError or
        AddressError.
        """
