# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: the classes that one compiled module has for trainers
"""A client of the compiled core, its parameter sets, and what is built on them.

Conventions as in ``_core``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch_cpudist._core import (
    InprocNetwork,
    OptimizerConfig,
    ParamSetLayout,
    RankNetwork,
    Secret,
)

class Client:
    """A trainer's end of every server. Thread safety: any thread.

    Arguments: see ``ClientOptions`` in ``csrc/client/options.h``; ``logger`` is called
    in the waiting thread with (level, text); level 0 is a warning, 1 info, 2 debug.
    """

    def __init__(
        self,
        *,
        run_id: int,
        trainer_rank: int = 0,
        trainer_count: int = 1,
        servers: Sequence[Sequence[str]],
        network: InprocNetwork | None = None,
        ranks: RankNetwork | None = None,
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
        secret: Secret | None = None,
    ) -> None: ...
    def connect(self) -> None:
        """Says hello to every server.

        Raises:
            AddressError, PeerLostError, ConfigMismatchError, FencedError: see there.
            AuthenticationError: the key of an end is missing or wrong.
        """

    def open(
        self,
        layout: ParamSetLayout,
        *,
        cache_bytes: int = 256 << 20,
        residue_bytes: int = 64 << 20,
    ) -> ParamSet:
        """Opens a parameter set; the n-th open of every trainer names the same one.

        Args:
            layout: what every trainer opens.
            cache_bytes: of values of rows of remote tables, on this trainer; beyond it
                they go before their step does, and are pulled again.
            residue_bytes: of what lossy pushes hold back of rows of remote tables.
        """

    def barrier(self) -> None:
        """Leaves all parameter sets, waits for all trainers, rejoins with all."""

    def goodbye(self) -> None:
        """Tells every server that this trainer is done, and disconnects."""

    def check(self) -> None:
        """Raises what the client has failed with: a lost server."""

    def counted_lost(self) -> bool:
        """Whether a server has said that it has counted this trainer as lost.

        That server goes on, and takes this trainer as a newer incarnation.
        """

    def out_of_reach(self) -> bool:
        """Whether a server was lost that may still run.

        Nothing came from it, or no other link could be made in the place of one that
        broke. False where a server has said that it ends.
        """

    def server_ended(self) -> bool:
        """Whether the process of a server on this host has ended by now."""

    def carried_out_before(self) -> list[int]:
        """Per server, the last request of an earlier incarnation that was carried out.

        Of the last one that had any; 0: there is none. As of ``connect``.
        """

    def abort(self, reason: str) -> None:
        """Ends every wait of this client with ``ClosedError`` and disconnects."""

    def table_traffic(self) -> list[dict[str, Any]]:
        """By table: ``param_set``, ``name``, ``bytes_sent``, ``bytes_received``."""

    def fenced_by(self) -> int:
        """Incarnation that servers have, where ``connect`` failed as another has it."""

    def waited_s(self) -> float:
        """Seconds blocked so far: ``wait_s`` of ``stats()``, without the rest."""

    def stats(self) -> dict[str, float]:
        """Counters; see ``ClientStats`` in ``csrc/client/stats.h``."""

class ParamSet:
    """An open parameter set; raises ``ClosedError`` once it is closed.

    Keeps its client. Thread safety: any thread.
    """

    @property
    def id(self) -> int:
        """Its number, of which keys are sharded: the n-th set of every trainer."""

    def bind_table(self, table: int, weight: int) -> None:
        """Says where pulled rows go: float32 ``[rows, dim]``; all count as stale."""

    def store_run(
        self,
        table: int,
        begin: int,
        end: int,
        weights: int,
        state: int = 0,
        counts: int = 0,
        step: int = 0,
    ) -> None:
        """Writes rows ``begin`` to ``end`` (exclusive) to the servers.

        ``weights`` float32 ``[rows, dim]``; ``state`` float32 ``[rows,
        state_elements]``, 0: the initial one; ``counts`` uint32 ``[rows]``, updates of
        each row; ``step`` updates of the table as a whole.
        """

    def store_parameter(
        self,
        index: int,
        weights: int,
        state: int = 0,
        step: int = 0,
        average: int = 0,
    ) -> None:
        """Writes a dense parameter; ``state`` is that of its blocks, one by one.

        ``average`` is shaped as the weights; without one it begins at them.
        """

    def load_rows(
        self,
        server: int,
        table: int,
        *,
        clear: bool,
        seed: int,
        round: int,
        table_step: int,
        snapshot: str,
        file: str,
        file_bytes: int,
        row_begin: int,
        row_end: int,
        offsets: Sequence[int],
        crcs: Sequence[int],
    ) -> None:
        """Has one server load rows of a file of its snapshot directory; trainer 0 only.

        Args:
            server: which one; the rows must be its own.
            table: number of the table.
            clear: all rows of the table on that server are dropped first.
            seed: with ``clear``, of what rows of a remote table begin with.
            round: updates that the snapshot's values have had; the rows count theirs
                by it, and by the server's then.
            table_step: updates of the table as a whole.
            snapshot: name of the snapshot.
            file: name of the file in it.
            file_bytes: its size.
            row_begin: first row of the file that is loaded.
            row_end: behind the last one; ``row_begin`` where only ``clear`` is wanted.
            offsets: byte in the file of row 0 of keys, weight, state, count, last_seen
                and average; 0 where the file has none.
            crcs: CRC-32C of every 256 KiB of the file.

        Raises:
            SnapshotCorruptError: the file is not what the checksums say.
            SnapshotError: it cannot be read.
            InvalidArgumentError: rows of another server, pushes that wait, Geo.
        """

    def load_version(self, server: int, round: int, samples: int, steps: int) -> None:
        """Tells one server how many updates its values have had; trainer 0 only.

        Sets the next round too, which trainers learn at the next barrier.
        """

    def table_stats(self, table: int) -> dict[str, int]:
        """What all servers together count of a table. Any thread.

        Returns:
            ``rows``, ``bytes`` (of their records and index, whose memory stays when
            rows go), ``created`` (rows that pushes have made), ``filtered`` (rows of
            pushes that were not admitted), ``evicted`` (rows that have gone) and
            ``unknown_reads`` (rows that were pulled and not there).

        Raises:
            InvalidArgumentError: there is no such table.
        """

    def shrink(self, table: int) -> int:
        """Has rows of a table that are to go by its eviction go now, on all servers.

        Behind the pushes of this trainer so far; others push and pull meanwhile.
        Takes some milliseconds for each million of rows.

        Returns:
            How many rows went; 0 for a table without eviction.

        Raises:
            InvalidArgumentError: there is no such table.
        """

    def ready(self) -> None:
        """Trainer 0 after its last store; the others wait here for it."""

    def holds_values(self) -> bool:
        """Whether the servers had all values when it was opened."""

    def start_queue(
        self,
        *,
        size: int,
        max_merge: int,
        mean: Sequence[bool],
        pull_every: int,
    ) -> AsyncPushes:
        """Starts what sends queued pushes; see ``csrc/client/arrivals/queue.h``."""

    def prefetch(
        self,
        ids: Sequence[tuple[int, int, int, bool]],
        managed: bool = False,
    ) -> int:
        """Asks for the rows of a batch to come; see ``csrc/client/param_set.h``.

        ``ids``: per table its index, the address of the ids, their count and whether
        they are int32.
        """

    def use_prefetched(self, number: int) -> None:
        """A managed batch ends with the next step."""

    def drop_prefetched(self) -> None:
        """Forgets the batches that are outstanding."""

    def drain(self) -> None:
        """Waits until everything queued is applied."""

    def fetch_run(
        self,
        table: int,
        begin: int,
        end: int,
        weights: int,
        state: int = 0,
        counts: int = 0,
    ) -> int:
        """Reads rows as ``store_run`` takes them; returns the table's step."""

    def fetch_parameter(self, index: int, weights: int, state: int = 0) -> int:
        """Reads a dense parameter as ``store_parameter`` takes it; returns its step."""

    def pull(
        self,
        table: int,
        ids: int,
        count: int,
        ids_are_int32: bool = False,
    ) -> int:
        """Makes the rows of ``ids`` current; at most one request per server.

        Returns how many rows were asked for.
        """

    def pull_together(
        self, guesses: Sequence[tuple[int, int, int, Sequence[int], Sequence[int]]]
    ) -> list[int]:
        """The same of what lookups are likely to want, of all tables at once.

        ``guesses``: the table's index, the address of the first id, what ids are (0
        int64, 1 int32, 2 float32, 3 float64), sizes and strides in elements. Returns
        for each how many rows were asked for.
        """

    def lookup(
        self,
        table: int,
        ids: int,
        count: int,
        ids_are_int32: bool,
        out: int,
        keep: bool,
    ) -> int:
        """Copies the rows of ``ids`` to ``out``, float32 ``[count, dim]``.

        Returns how many rows were asked for.

        Args:
            table: of either kind.
            ids: where they are, int64 or int32; any order, they may repeat.
            count: how many there are.
            ids_are_int32: else int64.
            out: where the rows go.
            keep: for a gradient, and for later lookups of this step. Without it rows
                of a remote table that are not here are pulled, copied and forgotten:
                memory stays as it was.

        Raises:
            RowOutOfRangeError: nothing was pulled or marked.
            PeerLostError, OperationTimeoutError: a server does not answer; what was
                asked for is asked for again by the next lookup.
        """

    def read_rows(self, table: int, keys: int, count: int) -> None:
        """Brings values of distinct int64 ``keys`` for who reads the weight itself."""

    def pull_all_rows(self) -> None:
        """Makes every row of every static table current, in chunks."""

    def read_averages(self, averages: bool) -> None:
        """See ``csrc/client/param_set.h``."""

    def pull_dense(self, weights: Sequence[int]) -> None:
        """Overwrites every dense parameter; ``weights``: their addresses in order."""

    def push_early(self, parameters: Sequence[tuple[int, int]]) -> int:
        """Sends dense gradients of the step to come; see ``served/early.py``.

        Args:
            parameters: (index, address of the gradient) of each.

        Returns:
            The bytes that went.
        """

    def may_push_early(self) -> bool:
        """Whether a server of another host takes gradients before their push."""

    def early_bytes(self) -> tuple[int, int]:
        """Bytes of gradients that went early so far, and of those that changed."""

    def push(
        self,
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
        clip_each: bool = False,
    ) -> int:
        """One step: sends gradients, waits for the round, takes updated values in.

        Joins first if this trainer has left. Pulled rows are stale afterwards.

        Arguments: see ``csrc/client/push/step.h``. ``parameters``: (index, address of
        the gradient) of dense parameters with one; ``tables``: (index, keys int64
        ``[n]``, n, rows float32 ``[n, dim]``) of tables with one; ``weights``:
        addresses of every dense parameter, in order.

        Returns the number of the round applied.
        """

    def leave(self) -> None:
        """Ends this trainer's part in rounds; the next ``push`` joins again."""

    def join(self) -> None:
        """Takes part again in a set updated on arrival, with a bound on staleness."""

    def join_with(self, last: ParamSet) -> None:
        """Takes part again in this set and in ``last``, from one step of all others on.

        ``last`` is updated in rounds, and every trainer steps it after this one.
        """

    def is_member(self) -> bool:
        """Whether rounds wait for this trainer."""

    def mark_cut(
        self, number: int, name: str, wait_ms: int, base: int = 0
    ) -> tuple[bool, str, str, int]:
        """Marks a cut after all pushes so far; waits until it is taken or given up.

        Args:
            number: Of the cut, above 0; higher than those before it.
            name: Of the snapshot, from the trainer that asks for it; else empty.
            wait_ms: How long servers wait for all markers, from the first one on.
            base: Number of the snapshot since whose cut rows are written if they have
                changed, from one trainer at most; 0: names none.

        Returns:
            Whether all servers took it, at one moment; its name; why not; and of
            ``take_marker_back``, 1 if all servers were in time for that, 2 if some
            were, else 0.
        """

    def take_marker_back(self, number: int) -> None:
        """Has a mark answered that waits for others, which another thread waits for.

        The same number may be marked again once ``cut_wanted`` asks for it.
        """

    def announce_cut(self, number: int, name: str, wait_ms: int) -> str:
        """Lets replies to pushes ask for markers, this trainer's too, from now on.

        Under ``HalfAsync`` in the place of an own marker, which comes when it is asked
        for: the group waits in its next push for this trainer's.

        Returns:
            Why a server refuses it; empty if none does.
        """

    def abandon_cut(self, number: int) -> None:
        """Drops what is open, being written or written of this number."""

    def holds_back(self) -> bool:
        """Whether pushes are rounded, in rounds, and what that leaves is kept."""

    def held_rows(self, table: int) -> tuple[bytes, bytes]:
        """What is held back of rows: keys, int64, and values, float32."""

    def held_block(self, block: int) -> bytes:
        """What is held back of a dense block, float32; nothing if nothing ever was."""

    def forget_held(self) -> None:
        """Holds nothing back."""

    def hold_rows(self, table: int, keys: int, count: int, values: int) -> None:
        """Holds this back of rows: addresses of keys and values."""

    def hold_block(self, block: int, values: int) -> None:
        """Holds this back of a dense block: the address of its elements."""

    def cut_wanted(self) -> int:
        """The cut that the last replies to pushes ask a marker for; 0: none."""

    def cut_status(self, server: int, number: int, token: str = "") -> dict[str, Any]:
        """How far one server is with what was cut. Any thread.

        With number 0: whether a file ``token`` lies in its directory of snapshots;
        without one, who would take part in a cut of now (``members``).

        Returns:
            ``state`` (0 unknown, 1 being written, 2 done, 3 failed), ``shard``,
            ``reason``, ``round``, ``samples``, ``steps``, ``table_steps``,
            ``block_steps``, ``members`` (ranks), of a cut of now also ``present`` and
            ``lost`` (ranks that the server has met and waits for at its end, there or
            lost and not given up); ``files``: dicts with ``name``,
            ``table`` (None: dense parameters), ``rows``, ``bytes``, ``crcs``; ``base``
            (of what was written; 0: all rows), ``can_be_base`` (the server knows what
            has changed since).
        """

    def forget_weights(self) -> None:
        """Ends what goes on beside in the memory of bound weights."""

    def close(self) -> None:
        """Drops a parameter set; the servers free it when the last trainer has."""

    def start_exchange(
        self,
        *,
        alone: bool,
        memory_cap_bytes: int,
        rules: Sequence[OptimizerConfig],
        cache_bytes: int,
    ) -> GeoExchange:
        """Prepares exchanges of deltas, and what sends them; once.

        ``rules``: by table, how this trainer updates it; ``cache_bytes``: what rows of
        remote tables may take here.
        """

class AsyncPushes:
    """The steps of a trainer whose pushes are applied as they come.

    Thread safety: one caller of ``enqueue`` at a time.
    """

    def enqueue(
        self,
        *,
        configs: Sequence[OptimizerConfig],
        parameters: Sequence[tuple[int, int]] = (),
        tables: Sequence[tuple[int, int, int, int]] = (),
        weights: Sequence[int] = (),
        samples: int = 0,
        clip_value: float = 0.0,
        clip_norm: float = 0.0,
        clip_each: bool = False,
    ) -> int:
        """Queues a copy of the gradients; see ``csrc/client/arrivals/pushes.h``."""

    def added(self) -> int:
        """Steps that were queued, ever; also of a set that is closed."""

    def end(self, carried_out: Sequence[int]) -> tuple[int, int]:
        """Ends the queue of a trainer that was counted as lost.

        Args:
            carried_out: ``Client.carried_out_before`` of its newer incarnation.

        Returns:
            Of the last steps queued, how many not all servers have applied, and how
            many of these some have.
        """

    def known_steps(self) -> int:
        """Steps of all trainers as told by server 0, and own ones not answered yet."""

    def mark_cut(
        self, number: int, name: str, wait_ms: int, base: int = 0, hold_ms: int = 0
    ) -> None:
        """Puts a marker behind the pushes of all steps so far, and returns.

        Args:
            number: As ``ParamSet.mark_cut``, and what follows.
            name: Of the snapshot.
            wait_ms: For all markers.
            base: Of changes.
            hold_ms: How long a call here may wait behind the marker for other trainers;
                then it is taken back. 0: as long as servers wait.
        """

    def cut_answer(self) -> tuple[int, bool, str, str, int] | None:
        """What the marker was answered with: number, and as ``ParamSet.mark_cut``.

        Once.

        Raises:
            Error: What the marker, or an earlier push, failed with.
        """

ROOT_STEP: float  # the square root of the number of trainers

class GeoExchange:
    """The exchange of deltas of a trainer that steps by itself.

    ``weights``: addresses of every dense parameter, in order; see
    ``csrc/client/geo/exchange.h``. Thread safety: one caller at a time.
    """

    def reset(self, weights: Sequence[int]) -> None:
        """Takes the weights as the servers', and forgets all movement."""

    def undo(
        self,
        weights: Sequence[int],
        *,
        parameters: Sequence[int],
        tables: Sequence[int],
    ) -> None:
        """Takes back what these moved since their last exchange."""

    def begin(
        self,
        *,
        whole: bool,
        step: tuple[float, float],
        steps: int,
        samples: int,
    ) -> None:
        """Starts an exchange of what this trainer moved.

        ``step``: of rows and of dense parameters on the mean of movements, or
        ``ROOT_STEP``; 0 adds movements up.
        """

    def advance(self, weights: Sequence[int], budget_s: float) -> bool:
        """Works on it for a while; whether none is under way any more."""

    def keep_pace(self, weights: Sequence[int], *, left: int, interval: int) -> bool:
        """As ``advance``, so fast that it is over in ``left`` of ``interval`` calls."""

    def finish(self, weights: Sequence[int]) -> None:
        """Works on it until it is over."""

    def mark_cut(
        self,
        weights: Sequence[int],
        number: int,
        name: str,
        wait_ms: int,
        hold_ms: int = 0,
    ) -> None:
        """Queues the marker of a cut, behind what has begun; see ``AsyncPushes``."""

    def cut_answer(self) -> tuple[int, bool, str, str, int] | None:
        """What it was answered with, as ``AsyncPushes.cut_answer``."""

    def has_more(self) -> bool:
        """Whether servers have rows that did not fit the last reply."""

    def has_unsent(self) -> bool:
        """Whether rows are left that did not fit the last push."""

    def steps(self) -> int:
        """Steps of all trainers behind the last reply."""

    def stats(self) -> dict[str, float]:
        """Exchanges, rows, shadows, memory in bytes, seconds of this thread."""

    def update_rows(
        self,
        *,
        gradient: tuple[int, int, int, int],
        rows: tuple[int, int, int],
        config: OptimizerConfig,
        step: int,
    ) -> None:
        """Updates rows here: (table, keys, count, values), (weight, state, counts)."""

    def forget_lookups(self) -> None:
        """Ends a step: rows of remote tables are to be looked up anew."""

    def refresh_slots(self) -> None:
        """Rows of remote tables that are here take the servers' values."""

    def store_slots(self) -> None:
        """Servers take them, of a trainer that is alone."""

    def keep_budget(self) -> None:
        """Gives slots up that are too many, of a trainer that is alone."""

    def slot_count(self, table: int) -> int:
        """Rows of a remote table that are here."""

    def read_slots(self, table: int, slots: tuple[int, int, int]) -> None:
        """To arrays of so many rows: addresses of keys, counts and state."""

    def write_slots(self, table: int, rows: int, slots: tuple[int, int, int]) -> None:
        """Replaces all slots by these, with the servers' values."""

    def moved_count(self, table: int) -> int:
        """Rows that this trainer has moved and not handed on; nothing is under way."""

    def read_moved(self, table: int, rows: tuple[int, int, int, int]) -> None:
        """To arrays of so many rows: addresses.

        Of keys, values, what these were when last exchanged, and whether the next
        exchange has the row in any case, a byte each.
        """

    def write_moved(
        self, table: int, count: int, rows: tuple[int, int, int, int]
    ) -> int:
        """Puts that back, on top of the servers' values; of how many rows."""

    def read_agreed(self, to: Sequence[int]) -> None:
        """Dense parameters as last exchanged: an address each, 0 leaves one out."""

    def write_agreed(self, values: Sequence[int]) -> None:
        """Puts that back."""
