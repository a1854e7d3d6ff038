# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What servers tell of their load, and who is told."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from sync_cases import run

from torch_cpudist.errors import AddressError
from torch_cpudist.launch import loads
from torch_cpudist.machine.busy import Busy


class Store:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def show(self, key: str, value: Any) -> None:
        self.told.append((key, value))


class EndedStore(Store):
    """Answers nobody."""

    def show(self, key: str, value: Any) -> None:
        raise AddressError("ended")


def test_the_busiest_thread_is_told_where_its_load_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(100.0)
    ran = {1: 0.0, 2: 50.0}

    def threads() -> dict[int, Busy]:
        return {number: Busy(seconds, 0.0) for number, seconds in ran.items()}

    monkeypatch.setattr(loads, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(loads.busy, "of_threads", threads)
    store: Any = Store()
    load = loads.ServerLoad(store, 3)
    load.tell()
    assert store.told == []  # there is no time before it
    for seconds in (0.25, 0.25, 0.25, 1.0, 1.0, 1.0):
        ran[1] += seconds
        load.tell()
    # The mean of three calls at most; what has hardly changed is not told again.
    assert [key for key, _ in store.told] == ["load/3"] * 4
    assert [value for _, value in store.told] == [0.25, 0.5, 0.75, 1.0]
    ran[3] = 0.5  # a new one counts from its beginning
    load.tell()
    assert store.told[-1][1] == pytest.approx(2 / 3)


def test_a_store_that_has_ended_or_is_none_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(100.0)
    monkeypatch.setattr(loads, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    ended: Any = EndedStore()
    for store in (ended, None):
        load = loads.ServerLoad(store, 0)
        load.tell()
        load.tell()


def test_trainers_that_serve_are_told_nothing() -> None:
    assert run(loads.loads_of, 2) == [[], []]
