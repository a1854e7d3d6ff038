# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one class
"""``InMemoryDataset``: loaded once, shuffled, and read again and again."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from torch_cpudist import _core
from torch_cpudist.data.reading.dataset import RecordDataset
from torch_cpudist.data.reading.dealing import mixed_seed
from torch_cpudist.data.reading.feeding import Feeder
from torch_cpudist.data.reading.global_shuffle import exchange_records
from torch_cpudist.data.reading.leaving import leaving
from torch_cpudist.data.reading.place import Place
from torch_cpudist.data.reading.reader import (
    BatchIterator,
    log_notices,
    opener,
    raising_failures_of,
)
from torch_cpudist.data.reading.settings import (
    Files,
    all_parts,
)
from torch_cpudist.data.reading.tensors import Batch, BatchMaker
from torch_cpudist.errors import ClosedError, InvalidArgumentError
from torch_cpudist.launch import context
from torch_cpudist.log import logger


class InMemoryDataset(RecordDataset):
    """Keeps all records of this trainer in memory, about as large as in a binary file.

    ``load()``, then ``local_shuffle`` or ``global_shuffle`` as often as wanted; every
    iteration is an epoch over what is in memory. Batches are as ``QueueDataset`` makes
    them. The order after ``load()`` is that of the files whatever the number of
    threads, and every shuffle is a function of its seed, so runs can be repeated.

    Memory: per record 16 bytes and 8 per integer and 4 per float, 8 more per sparse
    slot of any number of ids, 8 for the order, and ``buffer_bytes`` of batches.

    Thread safety: an iterator may be used by several threads at once, each batch goes
    to one of them. The dataset itself is for one thread.

    Args:
        files: see ``QueueDataset``, also for all that is not named here.
        slots: what a line holds.
        format: ``"multislot"``, ``"criteo"``, ``"csv"`` or ``"parquet"``.
        batch_size: records per batch.
        threads: that parse, and that make batches.
        pipe_command: a shell command that each file goes through.
        command_timeout_s: how long it may neither write nor end.
        drop_last: leave out a last batch of fewer records.
        shuffle: permute the records anew for every epoch, by ``seed`` and the epoch.
        seed: of ``shuffle``.
        buffer_bytes: of batches made ahead.
        bad_lines: ``"raise"``, ``"skip"`` or ``"quarantine"``.
        quarantine: path for bad lines.
        instance_ids: MultiSlot lines begin with ``1 id``.
        delimiter: of CSV cells.
        separator: of several ids in a CSV cell.
        line_limit_bytes: longer lines are bad ones.
        timeout_s: how long a batch may take, and how long loading may stand still.
        share: (number, count) of this trainer's share.

    Raises:
        InvalidArgumentError: an argument is wrong; nothing was opened.
        ConfigurationError: a dedicated server, or ``init()`` was not called yet.
    """

    _beginning = 0  # positions: records of the epoch that were handed out

    def _prepare(self) -> None:
        self._store: _core.DataStore | None = None
        self._feeder: Feeder | None = None
        self._loaded = False
        self._shuffles: list[list[Any]] = []  # what was done to the records, in order
        self._sizes_bytes: list[int] = []  # of the files, when they were loaded

    def load(self) -> None:
        """Reads all files of this trainer; what was there before is released.

        Raises:
            DataFileError: a file is missing or cannot be read to its end.
            BadRecordError: a bad line, with ``bad_lines="raise"``.
            OperationTimeoutError: nothing came for ``timeout_s``.
        """
        self.preload()
        self.wait()

    def preload(self) -> None:
        """Begins to load and returns; ``wait`` for it before anything else.

        Raises:
            DataFileError: a file is missing.
        """
        self.release()
        files = Files(self._reading)
        self._sizes_bytes = files.sizes_bytes
        # In the order of files: who loads what does not depend on epochs.
        lanes = files.shares(self._share, 0, shuffle=False)
        reading = self._reading
        self._store = _core.DataStore(reading.core_schema())
        leaving.follow(self)
        self._store.load(
            files=list(reading.files),
            lanes=all_parts(lanes),
            line_limit_bytes=reading.line_limit_bytes,
            command=reading.pipe_command if not files.fed else None,
            command_timeout_s=reading.silence_s,
            fed=files.fed,
            policy=reading.bad_lines,
            quarantine=reading.quarantine_name,
        )
        if files.fed:
            first = [0] * len(lanes)
            self._feeder = Feeder(self._store, lanes, first, opener(reading, files))

    def wait(self) -> None:
        """Waits until what ``preload`` began is done.

        Raises:
            InvalidArgumentError: nothing was begun.
            DataFileError, BadRecordError, OperationTimeoutError: see ``load``.
        """
        if self._store is None:
            raise InvalidArgumentError("wait(): expected preload() before it")
        try:
            with raising_failures_of(self._feeder):
                self._store.wait(
                    self._reading.timeout_s,
                    functools.partial(log_notices, self._store),
                )
        except BaseException:
            leaving.stay()
            self.release()
            raise
        log_notices(self._store)
        self._join_feeder()
        self._loaded = True

    def local_shuffle(self, seed: int = 0) -> None:
        """Permutes this trainer's records. Costs no messages.

        Args:
            seed: the order is a function of it and of what was loaded or received, not
                of the order before.

        Raises:
            ClosedError: nothing is loaded.
        """
        self._check_seed(seed)
        self._loaded_store("local_shuffle").permute(mixed_seed(seed, self._share[0]))
        self._shuffled(["local", seed])

    def global_shuffle(self, seed: int = 0, key: str | None = None) -> None:
        """Sends every record to a trainer drawn at random, and permutes what came.

        Collective: all trainers call it, with equal arguments. Every record is on one
        trainer after it, as before. Records travel as they are in memory, over the
        transport of pushes and pulls, a trainer keeps (n - 1) / n of them on their way
        and no more than about 16 MiB per other trainer besides. In a world of one it is
        ``local_shuffle``.

        Args:
            seed: the result is a function of it, the files and the number of trainers.
            key: name of a sparse slot, or ``"instance_id"``: records with an equal
                first id stay together. Default: each goes by itself.

        Raises:
            ClosedError: nothing is loaded, or the context was shut down.
            PeerLostError: a trainer died; the records here are lost, load again.
            OperationTimeoutError: a trainer did not come in time.
            ConfigMismatchError: trainers called it with other arguments or slots.
        """
        self._check_seed(seed)
        store = self._whole_store("global_shuffle")
        index = self._key_index(key)
        self._place.end()
        here = context.last()
        if self._shuffle_share[1] > 1 or (here is not None and here.trainer_count > 1):
            try:
                exchange_records(store, self._reading, self._shuffle_share, seed, index)
            except BaseException:
                self.release()
                raise
        store.permute(mixed_seed(seed, self._share[0]))
        self._shuffled(["global", seed, key])

    def merge_by_id(self, size: int | None = None) -> int:
        """Makes one record of those that carry one instance id. Costs no messages.

        Sparse slots of any number get the ids of all of them, in the order of the files
        (after a global shuffle: in that in which they came); dense slots and sparse
        ones of a fixed dim have the values of the first. Of several trainers each has
        all records of an id after ``global_shuffle(key="instance_id")`` only, which is
        therefore needed before. What there was is freed at the end: both are in memory
        meanwhile, and 32 bytes per record.

        Args:
            size: leaves out the records of ids that another number of records carry.
                Default: none is left out.

        Returns:
            How many records of this trainer were left out.

        Raises:
            ClosedError: nothing is loaded.
            InvalidArgumentError: without ``instance_ids=True``, with several trainers
                and no such shuffle before, or while slots are shuffled.
        """
        store = self._whole_store("merge_by_id")
        if not self._reading.instance_ids:
            raise InvalidArgumentError(
                "merge_by_id: the records have no instance ids: expected "
                "instance_ids=True, and lines that begin with `1 id`"
            )
        if size is not None and (type(size) is not int or not 1 <= size < 2**31):
            raise InvalidArgumentError(
                f"merge_by_id: size={size!r}, expected a whole number from 1, or None"
            )
        keys = [how[2] for how in self._shuffles if how[0] == "global"]
        if self._shuffle_share[1] > 1 and keys[-1:] != ["instance_id"]:
            raise InvalidArgumentError(
                "merge_by_id: the records of an id may be on several trainers: call "
                "global_shuffle(key='instance_id') before, the last of all"
            )
        self._place.end()
        left_out = int(store.merge_by_instance(size or 0))
        if left_out:
            logger.warning(
                "merge_by_id(size=%d): %d records left out, of ids that another number "
                "of records carry", size, left_out,
            )  # fmt: skip
        self._shuffled(["merge", size])
        return left_out

    def shuffle_slots(self, slots: Iterable[str], seed: int = 0) -> None:
        """Exchanges the values of slots among this trainer's records.

        What a metric loses by it is what the slots are worth to the model. All named
        slots move together: a record has all their values of one other record. The
        order of records, and what other slots hold, stay. Begins with the values that
        were loaded, whatever was shuffled before, which are kept besides until
        ``restore_slots``: twice the memory. Costs no messages.

        Args:
            slots: names of used slots, sparse or dense.
            seed: the result is a function of it and of what was loaded.

        Raises:
            ClosedError: nothing is loaded.
            InvalidArgumentError: a slot that is unknown, unused or named twice; none.
        """
        self._check_seed(seed)
        store = self._loaded_store("shuffle_slots")
        names = [slot.name for slot in self._reading.slots if slot.used]
        wanted = [slots] if isinstance(slots, str) else list(slots)
        if not wanted or len(set(wanted)) < len(wanted) or set(wanted) - set(names):
            raise InvalidArgumentError(
                f"shuffle_slots: slots={wanted!r}, expected some of the used slots "
                f"{names[:20]}, each once"
            )
        self._place.end()
        numbers = [names.index(name) for name in wanted]
        store.exchange_slots(numbers, mixed_seed(seed, self._share[0]))
        self.set_epoch(self.epoch)

    def restore_slots(self) -> None:
        """Gives slots their own values again, after ``shuffle_slots``. Idempotent.

        Raises:
            ClosedError: nothing is loaded.
        """
        store = self._loaded_store("restore_slots")
        self._place.end()
        store.restore_slots()
        self.set_epoch(self.epoch)

    def release(self) -> None:
        """Frees the records; batches handed out stay. Idempotent."""
        self._place.end()
        if self._store is not None:
            self._store.release()
        self._join_feeder()
        self._store, self._loaded, self._shuffles = None, False, []
        self._place.go_to(self._place.epoch)

    def end_at_exit(self) -> None:
        """Ends a load that is under way, for the end of the process."""
        if not self._loaded and self._store is not None:
            self._store.release()
            self._join_feeder()

    @property
    def records(self) -> int:
        """Records of this trainer in memory."""
        return int(self._loaded_store("records").records)

    @property
    def size_bytes(self) -> int:
        """Memory that the records take."""
        return int(self._loaded_store("size_bytes").size_bytes)

    def __len__(self) -> int:
        """Batches of an epoch of this trainer."""
        batches, rest = divmod(self.records, self._reading.batch_size)
        return batches + (rest > 0 and not self._reading.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        """Begins an epoch, or goes on where a loaded position says.

        Raises:
            ClosedError: nothing is loaded.
            InvalidArgumentError: in a process of a ``DataLoader``.
        """
        if get_worker_info() is not None:
            raise InvalidArgumentError(
                "an InMemoryDataset in a process of a DataLoader: its records are in "
                "the training process. Set num_workers=0: reader threads make batches "
                "ahead without the GIL"
            )
        store = self._loaded_store("iter")
        self._place.end()
        reading, epoch = self._reading, self._place.epoch
        core = store.reader(
            batch_size=reading.batch_size,
            drop_last=reading.drop_last,
            threads=reading.threads,
            buffer_bytes=reading.buffer_bytes,
            begin_record=self._place.position,
            seed=mixed_seed(reading.seed, epoch) if reading.shuffle else None,
        )
        maker = BatchMaker(reading.slots)
        iterator = BatchIterator(
            core, maker, reading.timeout_s, reading.files, counts=dict, feeder=None
        )
        self._place.follow(iterator, self._sizes_bytes)
        return iterator

    def bad_lines(self) -> dict[str, int]:
        """Bad lines that loading left out, by file."""
        counts = self._loaded_store("bad_lines").bad_lines()
        return {self._reading.files[file]: count for file, count in counts.items()}

    def state_dict(self, unused: int = 0) -> dict[str, Any]:
        """The position, exact to the record, and the shuffles that led to the order.

        Args:
            unused: how many of the batches that were handed out last are to come again.

        Raises:
            ClosedError: nothing is loaded.
            InvalidArgumentError: more than the iterator remembers, or slots are
                shuffled.
        """
        self._whole_store("state_dict")
        shuffles = [list(shuffle) for shuffle in self._shuffles]
        return {**self._saved(unused, self._sizes_bytes), "shuffles": shuffles}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the files anew, repeats the shuffles, and goes to the position.

        Collective if a global shuffle is among them.

        Raises:
            ConfigMismatchError: it was saved with other settings, files or trainers.
            DataFileError, BadRecordError, PeerLostError: see ``load`` and
                ``global_shuffle``.
        """
        self._check_saved(state)
        self.load()
        again = {
            "local": self.local_shuffle,
            "global": self.global_shuffle,
            "merge": self.merge_by_id,
        }
        for kind, *arguments in state["shuffles"]:
            again[kind](*arguments)
        self._place.go_to(state["epoch"], state["position"])

    def _loaded_store(self, caller: str) -> _core.DataStore:
        if not self._loaded or self._store is None:
            raise ClosedError(
                f"{caller}: nothing is in memory. Call load(), or wait() after "
                "preload()."
            )
        return self._store

    def _whole_store(self, caller: str) -> _core.DataStore:
        """The same, with the values that its slots were loaded with."""
        store = self._loaded_store(caller)
        if store.slots_exchanged:
            raise InvalidArgumentError(
                f"{caller}: slots have the values of other records since "
                "shuffle_slots(): call restore_slots() first"
            )
        return store

    def _shuffled(self, how: list[Any]) -> None:
        if self._shuffles and self._shuffles[-1][0] == "local":
            self._shuffles.pop()  # orders that are gone
        self._shuffles.append(how)
        self.set_epoch(self.epoch)

    def _key_index(self, key: str | None) -> int | None:
        """The slot that keeps records together; -1 for instance ids."""
        if key is None:
            return None
        if key == "instance_id" and self._reading.instance_ids:
            return -1
        names = [slot.name for slot in self._reading.slots if slot.used]
        sparse = [slot.name for slot in self._reading.slots if slot.kind == "sparse"]
        if key not in names or key not in sparse:
            raise InvalidArgumentError(
                f"global_shuffle: key={key!r}, expected one of the sparse slots "
                f"{sparse[:20]}, or 'instance_id' with instance_ids=True"
            )
        return names.index(key)

    def _check_seed(self, seed: int) -> None:
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise InvalidArgumentError(
                f"seed={seed!r}, expected a whole number from 0 up"
            )

    def _join_feeder(self) -> None:
        if self._feeder is not None:
            self._feeder.join()
            self._feeder = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves records and iterators where they are: a copy is to be loaded."""
        place = Place(0)
        place.go_to(self.epoch)
        copied = {**self.__dict__, "_place": place, "_store": None, "_feeder": None}
        return {**copied, "_loaded": False, "_shuffles": []}
