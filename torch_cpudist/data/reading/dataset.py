# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the datasets have in common: their arguments, epochs and positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from torch.utils.data import IterableDataset

from torch_cpudist.data.reading.place import Place
from torch_cpudist.data.reading.schema import Format, Slot
from torch_cpudist.data.reading.settings import (
    BadLines,
    Files,
    PathLike,
    check_state,
    make_reading,
)
from torch_cpudist.data.reading.sharing import Share, own_share, trainers_share
from torch_cpudist.data.reading.tensors import Batch

_STATE_VERSION = 1


class RecordDataset(IterableDataset[Batch]):
    """Records of files, as batches; every iteration is an epoch."""

    # The position before the first record.
    _beginning: ClassVar[int | None] = None

    def __init__(
        self,
        files: Iterable[PathLike],
        slots: Iterable[Slot],
        *,
        format: Format = "multislot",
        batch_size: int = 1,
        threads: int | None = None,
        pipe_command: str | None = None,
        command_timeout_s: float | None = None,
        drop_last: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        buffer_bytes: int = 64 << 20,
        bad_lines: BadLines = "raise",
        quarantine: PathLike | None = None,
        instance_ids: bool = False,
        delimiter: str = ",",
        separator: str = "|",
        line_limit_bytes: int = 16 << 20,
        timeout_s: float = 600.0,
        share: Share | None = None,
    ) -> None:
        """See the subclasses."""
        super().__init__()
        self._share = own_share(files, share)
        self._shuffle_share = trainers_share(files, share)
        self._reading = make_reading(
            files,
            slots,
            format=format,
            batch_size=batch_size,
            threads=threads,
            pipe_command=pipe_command,
            command_timeout_s=command_timeout_s,
            drop_last=drop_last,
            shuffle=shuffle,
            seed=seed,
            buffer_bytes=buffer_bytes,
            bad_lines=bad_lines,
            quarantine=quarantine,
            instance_ids=instance_ids,
            delimiter=delimiter,
            separator=separator,
            line_limit_bytes=line_limit_bytes,
            timeout_s=timeout_s,
        )
        self._place = Place(self._beginning)
        self._prepare()

    def _prepare(self) -> None:
        """Sets what a subclass has besides."""

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads, or the present one does."""
        return self._place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch that the next iteration reads, from its beginning."""
        self._place.go_to(epoch)

    def _saved(self, unused: int, sizes_bytes: Sequence[int] | None) -> dict[str, Any]:
        """The position in files of these sizes, or as they are, as JSON can hold it."""
        epoch, position = self._place.saved(unused)
        return {
            "version": _STATE_VERSION,
            "settings": self._settings(sizes_bytes),
            "epoch": epoch,
            "position": position,
        }

    def _check_saved(self, state: dict[str, Any]) -> None:
        """Refuses a position of other settings or of files that are others now."""
        check_state(state, _STATE_VERSION, self._settings(None))

    def _own_settings(self) -> dict[str, Any]:
        """What a position must agree with besides."""
        return {}

    def _settings(self, sizes_bytes: Sequence[int] | None) -> dict[str, Any]:
        sizes = Files(self._reading).sizes_bytes if sizes_bytes is None else sizes_bytes
        return {
            **self._reading.settings(),
            **self._own_settings(),
            "share": list(self._share),
            "sizes_bytes": list(sizes),
        }
