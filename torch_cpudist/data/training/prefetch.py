# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reading a loader ahead, so that rows of tables come while a batch is computed.

The loader runs in the training thread: ``DataLoader`` has workers of its own, a batch
that was asked for while a step is under way could not be told with its push, and
exceptions and interrupts stay where they belong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.optimizer.distributed import DistributedOptimizer
from torch_cpudist.optimizer.prefetching import MOST_BATCHES

BatchT = TypeVar("BatchT")
Ids = Mapping[nn.Module, torch.Tensor]


def prefetch(
    loader: Iterable[BatchT],
    opt: DistributedOptimizer,
    ids: Callable[[BatchT], Ids],
    depth: int = 1,
) -> Prefetched[BatchT]:
    """Yields a loader's batches, having asked for the rows of ``depth`` coming ones.

    ``for batch in cpudist.data.prefetch(loader, opt, ids=lambda b: {model.table:
    b[0]})``. Each iteration over the result iterates over the loader anew. What a
    batch's rows cost and guarantee: ``DistributedOptimizer.prefetch``. Memory:
    ``depth`` batches and their rows. Thread safety: one thread, the one that steps.

    Args:
        loader: any iterable of batches.
        opt: whose tables the ids belong to.
        ids: the ids of a batch by module, all that its forward will look up.
        depth: batches to read ahead, 1 to 15.

    Returns:
        An iterable of the same batches in the same order. What the loader, ``ids`` or
        ``opt.prefetch`` raises for a batch is raised in the place of this batch.

    Raises:
        InvalidArgumentError: ``depth`` is out of range.
    """
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise InvalidArgumentError(
            f"prefetch: depth must be a whole number, got {depth!r}"
        )
    # One more batch, the present one, is outstanding until its step.
    if not 1 <= depth < MOST_BATCHES:
        raise InvalidArgumentError(
            f"prefetch: depth must be 1 to {MOST_BATCHES - 1}, got {depth}"
        )
    return Prefetched(loader, opt, ids, depth)


@dataclass
class _Ready(Generic[BatchT]):
    """A batch that was read ahead, or what its reading raised."""

    batch: BatchT | None = None
    number: int = 0
    error: Exception | None = None


class Prefetched(Generic[BatchT]):
    """The iterable that ``prefetch`` returns."""

    def __init__(
        self,
        loader: Iterable[BatchT],
        opt: DistributedOptimizer,
        ids: Callable[[BatchT], Ids],
        depth: int,
    ) -> None:
        self._loader = loader
        self._opt = opt
        self._ids = ids
        self._depth = depth
        self._ahead = 0

    @property
    def ahead(self) -> int:
        """How many batches were read and not handed out: ``depth``, fewer at the end.

        What ``state_dict(unused=)`` of a dataset takes, called after a step.
        """
        return self._ahead

    def reads(self, source: object) -> bool:
        """Whether its batches are those of this dataset, or of a loader over it."""
        return (
            self._loader is source or getattr(self._loader, "dataset", None) is source
        )

    def __len__(self) -> int:
        """The length of the loader, which must have one."""
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[BatchT]:
        """Iterates over the loader anew."""
        source = iter(self._loader)
        self._opt.prefetching.follow(self)
        ready: deque[_Ready[BatchT]] = deque()
        ended = False
        try:
            while True:
                while not ended and len(ready) <= self._depth:
                    entry = self._read(source)
                    if entry is None:
                        ended = True
                        break
                    ready.append(entry)
                    ended = entry.error is not None
                if not ready:
                    return
                first = ready.popleft()
                self._ahead = sum(entry.batch is not None for entry in ready)
                if first.error is not None:
                    raise first.error
                self._opt.prefetching.use(first.number)
                yield first.batch  # type: ignore[misc]
        finally:
            if not self._opt.closed:
                self._opt.prefetching.leave(self)
                if ready:
                    self._opt.prefetching.forget()
            close = getattr(source, "close", None)
            if callable(close):
                close()

    def _read(self, source: Iterator[BatchT]) -> _Ready[BatchT] | None:
        """Reads one batch and asks for its rows; ``None`` at the end."""
        try:
            batch = next(source)
        except StopIteration:
            return None
        except Exception as error:
            return _Ready(error=error)
        try:
            coming = self._opt.prefetching
            return _Ready(batch, coming.ask(self._ids(batch), managed=True))
        except Exception as error:
            return _Ready(batch, error=error)
