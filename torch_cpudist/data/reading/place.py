# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where a dataset is in its data: the epoch, and what of it was handed out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_cpudist.data.reading.reader import BatchIterator
from torch_cpudist.errors import InvalidArgumentError


class Place:
    """The epoch of a dataset, and the iteration over it that is under way.

    An iteration that has ended is kept until the next begins: batches that were read
    ahead of training can be asked for again after the last one was read.

    Args:
        beginning: the position at which an epoch begins.
    """

    def __init__(self, beginning: Any) -> None:
        self._beginning = beginning
        self._epoch = 0
        self._position = beginning  # to begin the next iteration at
        self._iterator: BatchIterator | None = None
        self._sizes_bytes: Sequence[int] = ()  # of the files, when it began

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads, or the present one does."""
        ended = self._iterator is not None and self._iterator.ended
        return self._epoch + ended

    @property
    def position(self) -> Any:
        """Where the next iteration begins; an epoch's beginning, unless ``go_to``."""
        return self._position

    def go_to(self, epoch: int, position: Any = None) -> None:
        """Names where the next iteration begins; default: at the epoch's beginning.

        Raises:
            InvalidArgumentError: the epoch is no whole number from 0 up.
        """
        if type(epoch) is not int or epoch < 0:
            raise InvalidArgumentError(
                f"epoch={epoch!r}, expected a whole number from 0 up"
            )
        self._epoch = epoch
        self._position = self._beginning if position is None else position
        self._iterator = None

    def end(self) -> None:
        """Ends the iteration that is under way; the next one reads ``epoch`` anew."""
        self._epoch = self.epoch
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None

    def follow(self, iterator: BatchIterator, sizes_bytes: Sequence[int]) -> None:
        """Takes an iteration that has begun at ``position``.

        Args:
            iterator: of it.
            sizes_bytes: of the files as it found them.
        """
        self._position = self._beginning
        self._iterator = iterator
        self._sizes_bytes = sizes_bytes

    def sizes_bytes(self) -> Sequence[int] | None:
        """The sizes that a position belongs to; ``None``: those of the files now."""
        return None if self._iterator is None else list(self._sizes_bytes)

    def saved(self, unused: int) -> tuple[int, Any]:
        """The epoch and the position, less the last ``unused`` batches handed out.

        Raises:
            InvalidArgumentError: there were not so many, or they are not remembered.
        """
        if self._iterator is None:
            if unused:
                raise InvalidArgumentError(
                    f"state_dict(unused={unused}): no batch was handed out, expected 0"
                )
            return self._epoch, self._position
        position = self._iterator.position(unused)
        if self._iterator.ended and not unused:
            return self._epoch + 1, self._beginning
        return self._epoch, position
