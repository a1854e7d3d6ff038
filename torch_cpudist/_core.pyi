# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one compiled module.
"""The compiled core: servers, clients, their settings. No torch inside.

Memory is passed as integer addresses (``tensor.data_ptr()``): contiguous, of the dtype
said, alive until the call returns (bound tables: until the parameter set is closed). An
address of 0 stands for "not there" where that is allowed. Every call that may wait
releases the GIL, may be interrupted by signals in the main thread, and has a deadline.
Errors are the classes of ``torch_cpudist.errors``.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from typing_extensions import Buffer

from torch_cpudist._core_client import ROOT_STEP as ROOT_STEP
from torch_cpudist._core_client import AsyncPushes as AsyncPushes
from torch_cpudist._core_client import Client as Client
from torch_cpudist._core_client import GeoExchange as GeoExchange
from torch_cpudist._core_client import ParamSet as ParamSet
from torch_cpudist._core_data import DataBatch as DataBatch
from torch_cpudist._core_data import DataCommand as DataCommand
from torch_cpudist._core_data import DataReader as DataReader
from torch_cpudist._core_data import DataSchema as DataSchema
from torch_cpudist._core_data import DataShuffle as DataShuffle
from torch_cpudist._core_data import DataStore as DataStore
from torch_cpudist._core_data import DataStoreReader as DataStoreReader
from torch_cpudist._core_data import hash_texts as hash_texts
from torch_cpudist.errors import Error

def foreign_error(text: str) -> Error:
    """An error of gloo, NCCL or torch.distributed as one of ours, of its cause."""

class Secret:
    """A run's key, of at least 32 bytes. Nothing shows it or gives it back.

    Raises:
        InvalidArgumentError: it is shorter.
    """

    def __init__(self, key: bytes) -> None: ...
    def sign(self, data: bytes) -> bytes:
        """HMAC-SHA256 of data that is no part of a handshake, as 32 bytes.

        Raises:
            AuthenticationError: there is no libcrypto here.
        """

    def has_signed(self, data: bytes, mac: bytes) -> bool:
        """Whether ``mac`` is what ``sign`` gives; in a time that says nothing else."""

class FaultPlan:
    """Probabilities, per frame, of what an in-process network does wrong."""

    drop: float
    duplicate: float
    reorder: float
    delay: float
    delay_ms_max: int
    cut: float
    seed: int
    def __init__(
        self,
        *,
        drop: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        delay: float = 0.0,
        delay_ms_max: int = 0,
        cut: float = 0.0,
        seed: int = 0,
    ) -> None: ...

class FaultCounts:
    """What an in-process network really did, in frames."""

    delivered: Final[int]
    dropped: Final[int]
    duplicated: Final[int]
    reordered: Final[int]
    delayed: Final[int]
    cut: Final[int]

class InprocNetwork:
    """Links between servers and clients of one process."""

    def __init__(self, plan: FaultPlan | None = None) -> None: ...
    def counts(self) -> FaultCounts: ...

class RankNetwork:
    """Links to other ranks over the send and recv of a collective backend.

    Args:
        transport: from ``_c10d.make_rank_transport``.
        peers: ranks to have a link to.

    Raises:
        InvalidArgumentError: a peer that is none, or modules of two builds.
    """

    def __init__(self, transport: object, peers: Sequence[int]) -> None: ...
    def stop(self) -> None:
        """Says goodbye to every peer and ends the links; at most 0.3 s. Idempotent."""

class OptimizerConfig:
    """Hyper-parameters of one group, as they travel with a push.

    ``kind``: ``sgd``, ``adagrad``, ``row_wise_adagrad``, ``adam``, ``sparse_adam``,
    ``adamw``, ``rmsprop``, ``ftrl``. Options the kind has no use for stay at 0.

    Raises:
        InvalidArgumentError: unknown kind, or an option out of range.
    """

    def __init__(
        self,
        kind: str,
        *,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        beta1: float = 0.0,
        beta2: float = 0.0,
        eps: float = 0.0,
        alpha: float = 0.0,
        lr_decay: float = 0.0,
        initial_accumulator: float = 0.0,
        l1: float = 0.0,
        l2: float = 0.0,
        lr_power: float = 0.0,
        nesterov: bool = False,
    ) -> None: ...
    kind: Final[str]
    lr: Final[float]
    momentum: Final[float]
    dampening: Final[float]
    weight_decay: Final[float]
    beta1: Final[float]
    beta2: Final[float]
    eps: Final[float]
    alpha: Final[float]
    lr_decay: Final[float]
    initial_accumulator: Final[float]
    l1: Final[float]
    l2: Final[float]
    lr_power: Final[float]
    nesterov: Final[bool]
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

class TableSpec:
    """A table: ``rows`` x ``dim`` float32; ``group`` indexes the layout's configs.

    Args:
        name: of the parameter; decides with a row's key which server owns the row.
        rows: keys are 0 to ``rows - 1``; below 2^62.
        dim: elements of a row.
        group: index into the layout's configs.
        remote: rows are on the servers only. One that nobody has pushed or stored is
            what ``initial`` makes of its key, and takes no memory.
        seed: of the random steps of ``initial``; that of trainer 0 counts.
        initial: up to 8 steps (name, a, b): ``normal`` (mean, deviation), ``uniform``
            (low, high), ``fill`` (value, 0), ``mul`` (factor, 0), ``add`` (term, 0),
            ``clamp`` (low, high), ``erfinv`` (0, 0). The first is one of the first
            three, which replace what stood before. Empty: zeros.
        overrides: up to 16 (begin, end, value): rows that are constant; later ones win.
            Keys are unsigned here (-1 is 2^64 - 1); an end of 0 is 2^64.
        open: every int64 is a key, whatever ``rows`` says. This and what follows is of
            remote tables only.
        unknown_zeros: a key without a row reads zeros, not what its row begins with.
        max_rows: of all servers together; a push that would make more raises
            ``TableFullError``. 0: any number.
        admission: which keys that are pushed get a row: (kind, count, probability,
            sketch_bytes). ``("all", 0, 1.0, 0)``: each; ``("count", n, 1.0, bytes)``:
            from its n-th push on, n at most 15, ``bytes`` a multiple of 64;
            ``("probability", 0, p, 0)``: a fraction p of all keys.
        eviction: None or (unseen_steps, unseen_ms, min_count, max_rows, order), 0 for
            what is not given; order ``lru`` or ``lfu``.

    Raises:
        InvalidArgumentError: a program that cannot run, an unknown kind or order.
            What else a table cannot have is refused where it is opened.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        dim: int,
        group: int = 0,
        remote: bool = False,
        seed: int = 0,
        initial: Sequence[tuple[str, float, float]] = (),
        overrides: Sequence[tuple[int, int, float]] = (),
        open: bool = False,
        unknown_zeros: bool = False,
        max_rows: int = 0,
        admission: tuple[str, int, float, int] = ("all", 0, 1.0, 0),
        eviction: tuple[int, int, int, int, str] | None = None,
    ) -> None: ...
    name: Final[str]
    rows: Final[int]
    dim: Final[int]
    group: Final[int]
    remote: Final[bool]
    seed: Final[int]
    initial: Final[list[tuple[str, float, float]]]
    overrides: Final[list[tuple[int, int, float]]]
    open: Final[bool]
    unknown_zeros: Final[bool]
    max_rows: Final[int]
    admission: Final[tuple[str, int, float, int]]
    eviction: Final[tuple[int, int, int, int, str] | None]

def initial_rows(spec: TableSpec, keys: int, count: int, out: int) -> None:
    """Rows as a server makes them that nobody has pushed or stored.

    The same bits on every host, in every process and for every number of servers.

    Args:
        spec: the table.
        keys: address of ``count`` int64.
        count: number of keys.
        out: address of ``[count, dim]`` float32 to write to.
    """

class BlockSpec:
    """A slice of a dense parameter and the server that owns it.

    Args:
        name: of the parameter, or of the slice.
        elements: length of the slice.
        dtype: ``"float32"`` or ``"float64"``.
        shard: the owning server.
        group: index into the layout's configs.
        parameter: index of the dense parameter.
        offset: first element inside the flattened parameter.
        row_width: elements per row of the parameter; divides ``elements``.
    """

    def __init__(
        self,
        name: str,
        elements: int,
        dtype: str = "float32",
        shard: int = 0,
        group: int = 0,
        parameter: int = 0,
        offset: int = 0,
        row_width: int = 1,
    ) -> None: ...
    name: Final[str]
    elements: Final[int]
    dtype: Final[str]
    shard: Final[int]
    group: Final[int]
    parameter: Final[int]
    offset: Final[int]
    row_width: Final[int]

class ParamSetLayout:
    """What a parameter set consists of; equal on every trainer."""

    def __init__(
        self,
        configs: Sequence[OptimizerConfig],
        tables: Sequence[TableSpec],
        blocks: Sequence[BlockSpec],
        on_arrival: bool = False,
        max_staleness: int | None = None,
        exchanges_deltas: bool = False,
        trainer_groups: Sequence[int] = (),
        compensation: tuple[float, bool, float, float] | None = None,
        push_dtype: str = "fp32",
        pull_dtype: str = "fp32",
        average_decay: float = 0.0,
    ) -> None: ...
    max_staleness: Final[int | None]
    push_dtype: Final[str]
    pull_dtype: Final[str]
    average_decay: Final[float]
    trainer_groups: Final[list[int]]
    configs: Final[list[OptimizerConfig]]
    tables: Final[list[TableSpec]]
    blocks: Final[list[BlockSpec]]

class Server:
    """One parameter server. Its requests run on C++ threads without the GIL.

    Arguments: see ``ServerOptions`` in ``csrc/core/server.h``.
    """

    def __init__(
        self,
        *,
        run_id: int,
        shard_id: int = 0,
        server_count: int = 1,
        trainer_count: int = 1,
        threads: int = 1,
        liveness_ms: int = 5000,
        reconnect_grace_ms: int = 500,
        join_deadline_ms: int = 600000,
        elastic: bool = False,
        rejoin_ms: int = 600000,
        memory_cap_bytes: int = 0,
        nonfinite: str = "raise",
        host: str = "",
        snapshot_dir: str = "",
        snapshot_memory_bytes: int = 536870912,
        secret: Secret | None = None,
    ) -> None: ...
    def set_snapshot_directory(self, path: str) -> None:
        """Where snapshots are from now on; empty: nowhere. Any thread."""

    def listen_tcp(
        self,
        bind: str = "127.0.0.1",
        port_first: int = 0,
        port_last: int = 0,
        unix_socket: bool = True,
        threads: int = 1,
    ) -> list[str]:
        """Listens on a TCP port (0: any) and a unix socket; returns the addresses."""

    def listen_ranks(self, network: RankNetwork) -> str:
        """Listens to the peers of a network of ranks; returns the address."""

    def listen_inproc(self, network: InprocNetwork, name: str) -> str:
        """Listens inside this process; returns the address."""

    def wait_done(self, timeout_s: float) -> bool:
        """Waits for every goodbye; ``False`` late. ``PeerLostError`` after a loss."""

    def stop(self, reason: str = "") -> None:
        """Closes every connection; who still waits is told the reason. Idempotent."""

    def stats(self) -> dict[str, int]:
        """Counters; see ``ServerStats`` in ``csrc/server/options.h``.

        Besides: ``unauthenticated`` (connections refused for want of the key),
        ``half_open`` (connected, nothing said yet), ``turned_away`` (of those, closed
        so that others had a place).
        """

    def take_refusals(self, timeout_s: float) -> tuple[list[tuple[str, str]], int]:
        """Unauthenticated connections since the last call.

        Waits for one at most so long; ends with ``stop``.

        Returns:
            (address, why) of the newest, at most 64, and how many there were.
        """

    def table_stats(self) -> list[dict[str, Any]]:
        """This server's share of every table of every open parameter set.

        Returns:
            ``param_set``, ``name``, ``remote``, ``rows`` (that take memory), ``bytes``
            (of their records and index, and what admission counts in), ``created``
            (rows that pushes have made), ``filtered`` (rows of pushes that were
            dropped, as their keys are not admitted), ``evicted`` (rows that have gone)
            and ``unknown_reads`` (of keys without a row).
        """

def init_state(config: OptimizerConfig, state: int, rows: int, dim: int) -> None:
    """Fills the state of a table's rows, ``[rows, elements]``, as before a step."""

def state_elements(config: OptimizerConfig, elements: int, row_width: int) -> int:
    """Optimizer state elements beside a block of ``elements`` weights (or one row)."""

def slice_parameter(
    elements: int, row_width: int, server_count: int, min_block_size: int, slice: bool
) -> list[tuple[int, int]]:
    """Cuts a flattened parameter into blocks of (first element, length)."""

def owner_of_keys(keys: Sequence[int], table: str, server_count: int) -> list[int]:
    """Which server owns each key."""

def listen_to_waits(told: Callable[[bool], None] | None) -> Any:
    """Calls ``told(begins)`` at both ends of this thread's waits for servers.

    ``None`` ends it. Returns what was told before; the caller keeps ``told`` alive.
    """

def open_libcrypto() -> None:
    """``AuthenticationError`` where there is no library to prove a key by."""

def crc32c(data: Buffer, begin: int = 0) -> int:
    """The CRC-32C of an object's memory; lets other threads run.

    Args:
        data: contiguous bytes, an array or a memory map; it may be read-only.
        begin: the checksum of what stands before it.

    Raises:
        BufferError, ValueError: its memory is not contiguous.
        TypeError: it lends none.
    """

def simd_level() -> str:
    """The vector instructions in use: ``scalar``, ``avx2`` or ``avx512``."""

class ExportedBytes:
    """A mapped file, whose chunks are checked when they are looked at first."""

    def __init__(
        self, data: Buffer, checksums: Sequence[int], chunk_bytes: int, name: str
    ) -> None:
        """Keeps ``data``. ``SnapshotCorruptError``: not as many checksums as chunks."""

class ExportedRows:
    """Rows of one table in one file; offsets are from its beginning, 0: has none.

    Without ``keys`` row i is that of key i; without ``weight`` the keys are gone.
    """

    def __init__(
        self,
        data: ExportedBytes,
        *,
        rows: int,
        buckets: tuple[int, int],
        dtype: str,
        dim: int,
        keys: int = 0,
        weight: int = 0,
        scale: int = 0,
        bucket_begin: int = 0,
    ) -> None:
        """Checks the layout; ``SnapshotCorruptError`` names the file."""

class ExportedTable:
    """An immutable table for lookups from any number of threads."""

    def __init__(
        self, spec: TableSpec, layers: Sequence[Sequence[ExportedRows]]
    ) -> None:
        """``layers`` with the newest first; rows in none begin as ``spec`` says."""

    def lookup(self, ids: int, count: int, small: bool, out: int) -> int:
        """Rows of int64 (``small``: int32) ids to float32 ``out``.

        Returns how many are in no file. ``RowOutOfRangeError``,
        ``SnapshotCorruptError``.
        """

    def check_all(self) -> None:
        """Checks every byte; ``SnapshotCorruptError`` names the file."""

def narrow_rows(
    rows: int, count: int, dim: int, dtype: str, out: int, scales: int
) -> None:
    """float32 rows as fp16, bf16 or int8; of int8 also float32 scales."""
