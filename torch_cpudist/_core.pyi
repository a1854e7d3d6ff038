# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The compiled core: servers, clients, their settings. No torch inside.

Memory is passed as integer addresses (``tensor.data_ptr()``): contiguous, of the dtype
said, alive until the call returns (bound tables: until the parameter set is closed). An
address of 0 stands for "not there" where that is allowed. Every call that may wait
releases the GIL, may be interrupted by signals in the main thread, and has a deadline.
Errors are the classes of ``torch_cpudist.errors``.
"""

from collections.abc import Callable, Sequence
from typing import Final

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
    """A table: ``rows`` x ``dim`` float32; ``group`` indexes the layout's configs."""

    def __init__(self, name: str, rows: int, dim: int, group: int = 0) -> None: ...
    name: Final[str]
    rows: Final[int]
    dim: Final[int]
    group: Final[int]

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
    ) -> None: ...
    max_staleness: Final[int | None]
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
        host: str = "",
    ) -> None: ...
    def listen_tcp(
        self,
        bind: str = "127.0.0.1",
        port_first: int = 0,
        port_last: int = 0,
        unix_socket: bool = True,
        threads: int = 1,
    ) -> list[str]:
        """Listens on a TCP port (0: any) and a unix socket; returns the addresses."""

    def listen_inproc(self, network: InprocNetwork, name: str) -> str:
        """Listens inside this process; returns the address."""

    def wait_done(self, timeout_s: float) -> bool:
        """Waits for every goodbye; ``False`` late. ``PeerLostError`` after a loss."""

    def stop(self, reason: str = "") -> None:
        """Closes every connection; who still waits is told the reason. Idempotent."""

    def stats(self) -> dict[str, int]:
        """Counters; see ``ServerStats`` in ``csrc/core/server.h``."""

class Client:
    """A trainer's end of every server. Thread safety: any thread.

    Arguments: see ``ClientOptions`` in ``csrc/core/client.h``; ``logger`` is called in
    the waiting thread with (level, text); level 0 is a warning, 1 info, 2 debug.
    """

    def __init__(
        self,
        *,
        run_id: int,
        trainer_rank: int = 0,
        trainer_count: int = 1,
        servers: Sequence[Sequence[str]],
        network: InprocNetwork | None = None,
        incarnation: int = 1,
        liveness_ms: int = 5000,
        reconnect_grace_ms: int = 500,
        connect_deadline_ms: int = 60000,
        rpc_deadline_ms: int = 180000,
        rpc_retries: int = 3,
        round_deadline_ms: int = 1800000,
        probe_ms: int = 1000,
        resend_ms: int = 1000,
        straggler_log_ms: int = 30000,
        host: str = "",
        logger: Callable[[int, str], None] | None = None,
    ) -> None: ...
    def connect(self) -> None:
        """Says hello to every server.

        Raises:
            AddressError, PeerLostError, ConfigMismatchError, FencedError: see there.
        """

    def open(self, layout: ParamSetLayout) -> int:
        """Opens a parameter set; the n-th open of every trainer names the same one."""

    def bind_table(self, param_set: int, table: int, weight: int) -> None:
        """Says where pulled rows go: float32 ``[rows, dim]``; all count as stale."""

    def store_table(
        self,
        param_set: int,
        table: int,
        keys: int,
        count: int,
        weights: int,
        state: int = 0,
        counts: int = 0,
        step: int = 0,
    ) -> None:
        """Writes rows to the servers.

        ``keys`` int64 ``[count]``, distinct; ``weights`` float32 ``[count, dim]``;
        ``state`` float32 ``[count, state_elements]``, 0: the initial one; ``counts``
        uint32 ``[count]``, updates of each row; ``step`` updates of the table as a
        whole.
        """

    def store_parameter(
        self, param_set: int, index: int, weights: int, state: int = 0, step: int = 0
    ) -> None:
        """Writes a dense parameter; ``state`` is that of its blocks, one by one."""

    def ready(self, param_set: int) -> None:
        """Trainer 0 after its last store; the others wait here for it."""

    def holds_values(self, param_set: int) -> bool:
        """Whether the servers had all values when it was opened."""

    def start_queue(
        self,
        param_set: int,
        *,
        size: int,
        max_merge: int,
        mean: Sequence[bool],
        pull_every: int,
    ) -> None:
        """Starts what sends queued pushes; see ``QueueOptions`` in ``client.h``."""

    def enqueue(
        self,
        param_set: int,
        *,
        configs: Sequence[OptimizerConfig],
        parameters: Sequence[tuple[int, int]] = (),
        tables: Sequence[tuple[int, int, int, int]] = (),
        weights: Sequence[int] = (),
        samples: int = 0,
        clip_value: float = 0.0,
        clip_norm: float = 0.0,
    ) -> int:
        """One step: queues a copy of the gradients; see ``csrc/core/client.h``."""

    def drain(self, param_set: int) -> None:
        """Waits until everything queued is applied."""

    def fetch_table(
        self,
        param_set: int,
        table: int,
        keys: int,
        count: int,
        weights: int,
        state: int = 0,
        counts: int = 0,
    ) -> int:
        """Reads rows as ``store_table`` takes them; returns the table's step."""

    def fetch_parameter(
        self, param_set: int, index: int, weights: int, state: int = 0
    ) -> int:
        """Reads a dense parameter as ``store_parameter`` takes it; returns its step."""

    def pull(
        self,
        param_set: int,
        table: int,
        ids: int,
        count: int,
        ids_are_int32: bool = False,
    ) -> None:
        """Makes the rows of ``ids`` current; at most one request per server."""

    def pull_all_rows(self, param_set: int) -> None:
        """Makes every row of every table current, in chunks."""

    def pull_dense(self, param_set: int, weights: Sequence[int]) -> None:
        """Overwrites every dense parameter; ``weights``: their addresses in order."""

    def push(
        self,
        param_set: int,
        *,
        configs: Sequence[OptimizerConfig],
        parameters: Sequence[tuple[int, int]] = (),
        tables: Sequence[tuple[int, int, int, int]] = (),
        weights: Sequence[int] = (),
        weight: float = 1.0,
        samples: int = 0,
        by_samples: bool = False,
        clip_value: float = 0.0,
        clip_norm: float = 0.0,
    ) -> int:
        """One step: sends gradients, waits for the round, takes updated values in.

        Joins first if this trainer has left. Pulled rows are stale afterwards.

        Arguments: see ``StepPush`` in ``csrc/core/client.h``. ``parameters``: (index,
        address of the gradient) of dense parameters with one; ``tables``: (index, keys
        int64 ``[n]``, n, rows float32 ``[n, dim]``) of tables with one; ``weights``:
        addresses of every dense parameter, in order.

        Returns the number of the round applied.
        """

    def leave(self, param_set: int) -> None:
        """Ends this trainer's part in rounds; the next ``push`` joins again."""

    def join(self, param_set: int) -> None:
        """Takes part again in a set updated on arrival, with a bound on staleness."""

    def is_member(self, param_set: int) -> bool:
        """Whether rounds wait for this trainer."""

    def barrier(self) -> None:
        """Leaves all parameter sets, waits for all trainers, rejoins with all."""

    def close(self, param_set: int) -> None:
        """Drops a parameter set; the servers free it when the last trainer has."""

    def goodbye(self) -> None:
        """Tells every server that this trainer is done, and disconnects."""

    def abort(self, reason: str) -> None:
        """Ends every wait of this client with ``ClosedError`` and disconnects."""

    def stats(self) -> dict[str, float]:
        """Counters; see ``ClientStats`` in ``csrc/core/client.h``."""

def state_elements(config: OptimizerConfig, elements: int, row_width: int) -> int:
    """Optimizer state elements beside a block of ``elements`` weights (or one row)."""

def slice_parameter(
    elements: int, row_width: int, server_count: int, min_block_size: int, slice: bool
) -> list[tuple[int, int]]:
    """Cuts a flattened parameter into blocks of (first element, length)."""

def owner_of_keys(
    keys: Sequence[int], param_set: int, table: int, server_count: int
) -> list[int]:
    """Which server owns each key."""

def simd_level() -> str:
    """The vector instructions in use: ``scalar``, ``avx2`` or ``avx512``."""
