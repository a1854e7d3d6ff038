# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``cpudist.data.prefetch``: order, exceptions, the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from async_cases import alone, wrapped
from torch import nn

import torch_cpudist as cpudist


class Loader:
    """Five batches, of which one may fail; notes when it is closed."""

    def __init__(self, fails_at: int = 99) -> None:
        self.fails_at = fails_at
        self.closed = False

    def __iter__(self) -> Any:
        try:
            for step in range(5):
                if step == self.fails_at:
                    raise OSError("no such file")
                yield torch.tensor([step])
        finally:
            self.closed = True


def collect(batches: Any, got: list[int]) -> None:
    for batch in batches:
        got.append(batch.item())


def test_batches_come_in_order_and_again() -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Embedding(8, 2, sparse=True)
        opt = wrapped(model, cpudist.Sync())
        loader = cpudist.data.prefetch(Loader(), opt, ids=lambda b: {model: b}, depth=3)
        for _ in range(2):
            ahead = [(batch.item(), loader.ahead) for batch in loader]
            assert ahead == [(0, 3), (1, 3), (2, 2), (3, 1), (4, 0)]
        for depth in (0, 16, 1.5, True):
            with pytest.raises(cpudist.InvalidArgumentError, match="depth"):
                cpudist.data.prefetch(loader, opt, ids=lambda b: {}, depth=depth)

    alone(body)


def test_an_exception_comes_in_its_place_and_the_end_is_clean() -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Embedding(8, 2, sparse=True)
        opt = wrapped(model, cpudist.Sync())
        source = Loader(fails_at=3)
        got: list[int] = []
        batches = cpudist.data.prefetch(source, opt, lambda b: {model: b}, depth=2)
        with pytest.raises(OSError, match="no such file"):
            collect(batches, got)
        assert got == [0, 1, 2]
        assert source.closed

        got.clear()
        bad = cpudist.data.prefetch(Loader(), opt, lambda b: {model: b * 3})
        with pytest.raises(cpudist.RowOutOfRangeError):
            collect(bad, got)
        assert got == [0, 1, 2]

        source = Loader()
        for _ in cpudist.data.prefetch(source, opt, lambda b: {model: b}, depth=3):
            break
        assert source.closed

    alone(body)
