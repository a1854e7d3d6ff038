# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``QueueDataset``: batches straight from files, by reader threads in C++."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Unpack

from torch.utils.data import get_worker_info

from torch_cpudist.data.arguments import passes_on_to
from torch_cpudist.data.reading.dataset import RecordDataset
from torch_cpudist.data.reading.dealing import mixed_seed
from torch_cpudist.data.reading.place import Place
from torch_cpudist.data.reading.reader import BatchIterator, open_reader
from torch_cpudist.data.reading.schema import Slot
from torch_cpudist.data.reading.settings import Arguments, Files, PathLike
from torch_cpudist.data.reading.sharing import share_of_worker
from torch_cpudist.data.reading.tensors import Batch
from torch_cpudist.errors import InvalidArgumentError


class QueueDataset(RecordDataset):
    """Reads files as a stream of batches; every iteration is an epoch.

    ``threads`` reader threads parse without the GIL and stay at most ``buffer_bytes``
    ahead. Files are cut at line ends and dealt to trainers, to the processes of a
    ``DataLoader(batch_size=None, num_workers=n)`` and to threads: no record is lost or
    read twice. Which records make which batch depends on the files, their order, the
    number of threads, trainers and processes, ``batch_size``, ``shuffle`` and ``seed``,
    and on nothing else. See docs/data.md.

    A batch is a dict: sparse slot to ``Bags(values int64 [nnz], offsets int64
    [batch + 1])``, dense slot to ``[batch, dim]``; with ``instance_ids`` the key
    ``"instance_id"`` to int64 ``[batch]``.

    Thread safety: an iterator may be used by several threads at once, each batch goes
    to one of them. The dataset itself is for one thread.

    Args:
        files: the same list in the same order on every trainer, or what
            ``cpudist.split_files`` returned, which is read whole. Text; gzip and zstd
            are recognised.
        slots: what a line holds, in its order (CSV, Parquet: by column name).
        format: ``"multislot"``, ``"criteo"``, ``"csv"`` or ``"parquet"``.
        batch_size: records per batch; the last of an epoch may have fewer.
        threads: reader threads; default: half of the cores.
        pipe_command: a shell command: it gets each file as standard input, as it is,
            and its standard output is read in the file's place.
        command_timeout_s: how long the command may write nothing while its output is
            waited for, and how long it may go on after the end of its output, before it
            is killed with all that it started and ``DataFileError`` is raised. A
            warning is logged after half of that, or 30 s. Default: 600, or
            ``timeout_s`` if that is longer.
        drop_last: leave out a last batch of fewer records.
        shuffle: deal parts of files in another order every epoch, and permute records
            within windows of ``shuffle_records`` per thread.
        seed: of the shuffle.
        shuffle_records: records in a window; all of them are in memory at once.
        buffer_bytes: of batches read ahead, over all threads.
        bad_lines: ``"raise"``, ``"skip"`` (counted, the first of a file is logged) or
            ``"quarantine"`` (appended to the file ``quarantine``, too).
        quarantine: path for bad lines.
        instance_ids: MultiSlot lines begin with ``1 id``; ids are hashed to 64 bits.
        delimiter: of CSV cells.
        separator: of several ids in a CSV cell.
        line_limit_bytes: longer lines are bad ones.
        timeout_s: how long a batch may take before ``OperationTimeoutError``.
        share: (number, count): which share of the data is this trainer's; default: its
            rank and the number of trainers.

    Raises:
        InvalidArgumentError: an argument is wrong; nothing was opened.
        ConfigurationError: a dedicated server, or ``init()`` was not called yet.
    """

    @passes_on_to(RecordDataset.__init__)
    def __init__(
        self,
        files: Iterable[PathLike],
        slots: Iterable[Slot],
        *,
        shuffle_records: int = 65536,
        **others: Unpack[Arguments],
    ) -> None:
        super().__init__(files, slots, **others)
        if type(shuffle_records) is not int or shuffle_records < 1:
            raise InvalidArgumentError(
                f"shuffle_records={shuffle_records!r}, expected a whole number from 1"
            )
        self._shuffle_records = shuffle_records
        self._newest: BatchIterator | None = None

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch that the next iteration reads, from its beginning.

        With ``DataLoader(num_workers=n)`` call it before every epoch: iterations are in
        other processes then, and the dataset here does not count them.
        """
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """Opens the files and starts the reader threads.

        Raises:
            DataFileError: a file is missing or cannot be read.
            InvalidArgumentError: in a process of a ``DataLoader`` after
                ``load_state_dict``.
        """
        place = self._place
        place.end()
        if place.position is not None and get_worker_info() is not None:
            raise InvalidArgumentError(
                "a position was loaded, which is that of one process; this is one of "
                "several of a DataLoader. Set num_workers=0."
            )
        share = share_of_worker(self._share)
        files = Files(self._reading)
        lanes = files.shares(share, place.epoch, shuffle=self._reading.shuffle)
        seed = mixed_seed(self._reading.seed, place.epoch, *share)
        self._newest = open_reader(
            self._reading,
            files,
            lanes,
            window=(seed, self._shuffle_records) if self._reading.shuffle else None,
            position=place.position,
        )
        place.follow(self._newest, files.sizes_bytes)
        return self._newest

    def bad_lines(self) -> dict[str, int]:
        """Bad lines by file, of the newest iteration in this process."""
        return {} if self._newest is None else self._newest.bad_lines()

    def state_dict(self, unused: int = 0) -> dict[str, Any]:
        """The position in the data, as JSON can hold it; exact to the record.

        Args:
            unused: how many of the batches that were handed out last are to come again,
                because they were read ahead and not trained.

        Raises:
            InvalidArgumentError: more than the iterator remembers, or in a process of a
                ``DataLoader``: there positions would be of one process only.
        """
        if get_worker_info() is not None:
            raise InvalidArgumentError(
                "state_dict() in a process of a DataLoader: ask the dataset in the "
                "training process, which needs num_workers=0"
            )
        return self._saved(unused, self._place.sizes_bytes())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration go on where ``state_dict`` was called.

        Raises:
            ConfigMismatchError: it was saved with other settings, files or trainers.
        """
        self._check_saved(state)
        self._place.go_to(state["epoch"], state["position"])

    def __getstate__(self) -> dict[str, Any]:
        """Leaves open iterators where they are: a copy begins anew."""
        place = Place(None)
        place.go_to(self._place.epoch, self._place.position)
        return {**self.__dict__, "_place": place, "_newest": None}

    def _own_settings(self) -> dict[str, Any]:
        return {"shuffle_records": self._shuffle_records}
